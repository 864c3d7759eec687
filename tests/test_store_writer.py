"""The writer's thread: offers never wait, everything taken is written, and no exception ends it."""

import hashlib
import threading
from collections.abc import Iterator

import pytest

from kvarn.keys import block_key
from kvarn.store import BlockMeta, ByteStore, MemoryStore
from kvarn.store_writer import Writer

ROOT = hashlib.sha256(b"root").digest()


def meta_of(number: int) -> BlockMeta:
    return BlockMeta(key=block_key(ROOT, [number]), parent=ROOT, tokens=(number,), fingerprint=ROOT, format="test")


class SlowStore(MemoryStore):
    """A store whose puts wait for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go = threading.Event()

    def put(self, meta: BlockMeta, data: bytes) -> bool:
        self.entered.set()
        assert self.go.wait(10)
        return super().put(meta, data)


@pytest.fixture
def slow() -> Iterator[SlowStore]:
    store = SlowStore()
    yield store
    store.go.set()


def test_close_writes_what_is_queued() -> None:
    store = MemoryStore()
    writer = Writer(store)
    assert all(writer.offer(meta_of(n), b"x" * n) for n in range(20))
    assert writer.close(10)
    assert [store.get(meta_of(n).key) for n in range(20)] == [b"x" * n for n in range(20)]
    assert (writer.written, writer.bytes_written, writer.dropped, writer.failed) == (20, 190, 0, 0)
    assert not any(writer.pending(meta_of(n).key) for n in range(20))


def test_a_full_queue_drops_and_does_not_wait(slow: SlowStore) -> None:
    writer = Writer(slow, capacity=2)
    assert writer.offer(meta_of(0), b"0")
    assert slow.entered.wait(10)  # the thread holds block 0, the queue is empty
    assert [writer.offer(meta_of(n), b"x") for n in (1, 2, 3)] == [True, True, False]
    assert writer.dropped == 1
    assert [writer.pending(meta_of(n).key) for n in range(4)] == [True, True, True, False]
    slow.go.set()
    assert writer.close(10)
    assert [slow.contains(meta_of(n).key) for n in range(4)] == [True, True, True, False]


def test_a_block_that_is_on_its_way_is_not_queued_twice(slow: SlowStore) -> None:
    writer = Writer(slow, capacity=1)
    assert writer.offer(meta_of(0), b"0")
    assert slow.entered.wait(10)
    assert writer.offer(meta_of(0), b"0")
    assert writer.offer(meta_of(1), b"1")
    slow.go.set()
    assert writer.close(10)
    assert (writer.written, writer.dropped) == (2, 0)


def test_a_builder_runs_on_the_thread() -> None:
    store, names = MemoryStore(), []

    def build() -> bytes:
        names.append(threading.current_thread().name)
        return b"built"

    writer = Writer(store)
    assert writer.offer(meta_of(0), build)
    assert writer.close(10)
    assert names == ["kvarn-store-writer"]
    assert store.get(meta_of(0).key) == b"built"


def test_an_exception_is_counted_and_the_next_block_is_written() -> None:
    def build(text: str) -> bytes:
        raise ValueError(text)

    store = MemoryStore()
    writer = Writer(store)
    writer.offer(meta_of(0), lambda: build("first"))
    writer.offer(meta_of(1), lambda: build("second"))
    writer.offer(meta_of(2), b"2")
    assert writer.close(10)
    assert (writer.failed, writer.written, writer.first_failure) == (2, 1, "ValueError: first")
    assert not writer.pending(meta_of(0).key)


def test_what_the_store_refuses_is_dropped() -> None:
    writer = Writer(MemoryStore(budget_bytes=3))
    writer.offer(meta_of(0), b"123")
    writer.offer(meta_of(1), b"4")
    assert writer.close(10)
    assert (writer.written, writer.dropped) == (1, 1)


def test_a_close_that_runs_out_of_time_says_so_and_writes_no_more(slow: SlowStore) -> None:
    writer = Writer(slow)
    for n in range(3):
        writer.offer(meta_of(n), b"x")
    assert slow.entered.wait(10)
    assert not writer.close(0.05)
    assert writer.dropped == 2
    assert not writer.offer(meta_of(9), b"x")
    slow.go.set()
    assert writer.close(10)
    assert [slow.contains(meta_of(n).key) for n in range(3)] == [True, False, False]


def test_the_dict_is_a_byte_store() -> None:
    store: ByteStore = MemoryStore()
    first = meta_of(1)
    second = BlockMeta(key=block_key(first.key, [2]), parent=first.key, tokens=(2,), fingerprint=ROOT, format="test")
    assert store.get(first.key) is None
    assert store.put(first, b"a")
    assert store.put(first, b"other")
    assert store.put(second, b"b")
    assert store.get(first.key) == b"a"
    assert (store.children(ROOT), store.children(first.key)) == ([first], [second])
    store.quarantine(first.key, "bad")
    assert not store.contains(first.key)
    store.close()
    assert not store.put(first, b"a")
    assert store.get(second.key) is None
