"""The disk store under faults: killed while it saves, a broken index, a full or failing disk, several processes."""

import errno
import fcntl
import hashlib
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarn.backend import Record
from kvarn.keys import block_key
from kvarn.record import BlockMeta, build, parse
from kvarn.store_disk import NAME, PAUSE_SECONDS, DiskStore
from kvarn.store_index import MARKER
from kvarn.store_shared import BusyError

ROOT = hashlib.sha256(b"ours").digest()
MIB = 1 << 20
Block = tuple[BlockMeta, bytes]

# Run by a process of its own, which must know how to make the blocks.
MAKE_BLOCKS = """
import hashlib, os, random, signal, sys, time
from pathlib import Path
import numpy as np
from kvarn.backend import Record
from kvarn.keys import block_key
from kvarn.record import BlockMeta, build
from kvarn.store_disk import DiskStore

ROOT = hashlib.sha256(b"ours").digest()

def block(number, parent=ROOT):
    tokens = (number, number + 1)
    meta = BlockMeta(key=block_key(parent, tokens), parent=parent, tokens=tokens, fingerprint=ROOT, format="test")
    tiles = np.random.default_rng(number).integers(0, 256, (1, 1, 8000), np.uint8)
    return meta, build(meta, Record(dtype="float32", tiles=tiles, flags=np.zeros((1, 1), np.uint8), exact={}))

blocks = []
for number in range(300):
    blocks.append(block(number, blocks[-1][0].key if number % 10 else ROOT))
"""

KILL = (
    MAKE_BLOCKS
    + """
folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
chance = random.Random(7)
for turn in range(rounds):
    start = chance.randrange(300)
    ready, say = os.pipe()
    child = os.fork()
    if child == 0:
        code = 3
        try:
            store = DiskStore(folder, 1 << 20, fingerprint=ROOT)
            report = store.verify()
            if report.bad or report.unreadable or store.stats().quarantined or store.paused:
                print("round", turn, report, store.quarantined(), store.paused, flush=True)
                os._exit(4)
            os.write(say, b"r")
            write = os.write  # in pieces, so that a kill comes in the middle of a file
            os.write = lambda file, data: write(file, data[:500])
            while True:
                for meta, data in blocks[start:] + blocks[:start]:
                    store.put(meta, data)
                    store.get(meta.key)
        finally:
            os._exit(code)
    os.close(say)
    if os.read(ready, 1) == b"r":
        time.sleep(chance.uniform(0.005, 0.05))
        os.kill(child, signal.SIGKILL)
    os.close(ready)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        sys.exit(f"round {turn}: the child ended by itself with {status}")
"""
)

WRITE = (
    MAKE_BLOCKS
    + """
store = DiskStore(Path(sys.argv[1]), 2 << 20, fingerprint=ROOT)
print("ready", flush=True)
stored = sum(store.put(meta, data) for meta, data in blocks)
print(stored, store.paused, flush=True)
store.close()
"""
)


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def block(number: int, parent: bytes = ROOT, *, size: int = 1000) -> Block:
    tokens = (number, number + 1)
    meta = BlockMeta(key=block_key(parent, tokens), parent=parent, tokens=tokens, fingerprint=ROOT, format="test")
    tiles = np.random.default_rng(number).integers(0, 256, (1, 1, size), np.uint8)
    return meta, build(meta, Record(dtype="float32", tiles=tiles, flags=np.zeros((1, 1), np.uint8), exact={}))


def path_of(folder: Path, key: bytes) -> Path:
    return folder / NAME / key.hex()[:2] / f"{key.hex()}.safetensors"


def disk_bytes(folder: Path) -> int:
    return sum(file.lstat().st_size for file in (folder / NAME).rglob("*") if file.is_file())


def assert_whole(store: DiskStore, folder: Path) -> None:
    """Every file reads back right, the index lists the files and no others, and the budget holds."""
    files = {file.stem: file for file in (folder / NAME).glob("??/*.safetensors")}
    entries = store.entries()
    assert {entry.key.hex(): entry.size for entry in entries} == {k: f.stat().st_size for k, f in files.items()}
    for entry in entries:
        data = store.get(entry.key)
        assert data is not None
        meta, _ = parse(data)
        assert (meta.key, meta.parent, meta.fingerprint) == (entry.key, entry.parent, entry.fingerprint)
        assert [child.key for child in store.children(entry.key)] == [e.key for e in entries if e.parent == entry.key]
    index = store._shared._index
    assert index is not None
    for key, children in index._writer.execute("SELECT key, children FROM blocks"):
        assert children == sum(entry.parent == key for entry in entries)
    stats = store.stats()
    assert stats.total_bytes == disk_bytes(folder) <= stats.budget_bytes


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path, 50 * MIB, fingerprint=ROOT, clock=clock)
    yield store
    store.close()


def test_killed_in_the_middle_of_a_save_a_hundred_times(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", KILL, str(tmp_path), "100"], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr
    store = DiskStore(tmp_path, MIB, fingerprint=ROOT)
    assert store.stats().blocks > 20
    assert store.stats().quarantined == 0
    assert_whole(store, tmp_path)
    assert not list((tmp_path / NAME).rglob("*.tmp"))
    store.close()


def test_one_process_writes_while_another_evicts(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, MIB, fingerprint=ROOT)
    hits = 0
    with subprocess.Popen(
        [sys.executable, "-c", WRITE, str(tmp_path)], stdout=subprocess.PIPE, text=True, bufsize=1
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        while other.poll() is None:
            for entry in store.entries()[-20:]:
                data = store.get(entry.key)
                hits += data is not None
                assert data is None or parse(data)[0].key == entry.key
            store.prune(300_000)
        stored, _, paused = other.stdout.read().strip().partition(" ")
    assert (other.returncode, paused) == (0, "None")
    assert int(stored) > 100
    assert hits > 0
    assert store.paused is None
    store.prune(300_000)
    assert 0 < disk_bytes(tmp_path) <= 300_000
    assert_whole(store, tmp_path)
    store.close()


def test_threads_share_a_store(store: DiskStore, tmp_path: Path) -> None:
    blocks = [block(number) for number in range(30)]
    wrong: list[object] = []

    def work(offset: int) -> None:
        try:
            for meta, data in blocks[offset:] + blocks[:offset]:
                if not store.put(meta, data) or store.get(meta.key) != data:
                    wrong.append(meta)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in (0, 10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert_whole(store, tmp_path)


def test_a_hit_does_not_wait_for_a_process_that_writes(store: DiskStore, tmp_path: Path, clock: Clock) -> None:
    meta, data = block(0)
    store.put(meta, data)
    with (tmp_path / NAME / MARKER).open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        clock.now += 100  # the time of use is due to be written, and cannot be
        assert store.get(meta.key) == data
        assert store.contains(meta.key)
        with pytest.raises(BusyError):
            store._shared.change(lambda index: None, timeout=0.01)
    assert store.paused is None
    assert store.put(*block(1))
    assert max(entry.used for entry in store.entries() if entry.key == meta.key) == clock.now


# The index.


def overwrite(at: float, count: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        raw = bytearray(file.read_bytes())
        start = int(at * len(raw))
        raw[start : start + count] = random.Random(1).randbytes(count)
        file.write_bytes(raw)

    return damage


def other_version(file: Path) -> None:
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


def empty_of_all(file: Path) -> None:
    connection = sqlite3.connect(file)
    connection.executescript("DROP TABLE blocks; DROP TABLE others;")
    connection.close()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "gone": Path.unlink,
    "empty": lambda file: os.truncate(file, 0),
    "cut": lambda file: os.truncate(file, 5000),
    "all rubbish": overwrite(0, 1 << 20),
    "rubbish at the start": overwrite(0, 50),
    "rubbish in a table": overwrite(0.3, 3000),
    "rubbish at the end": overwrite(0.9, 2000),
    "another version": other_version,
    "other tables": empty_of_all,
    "another's database": lambda file: (file.unlink(), sqlite3.connect(file).close()),  # type: ignore[dict-item,func-returns-value]
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_made_anew_at_the_start(damage: str, tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 50 * MIB, fingerprint=ROOT)
    blocks = [block(number) for number in range(12)]
    blocks.append(block(99, blocks[0][0].key))
    for meta, data in blocks:
        store.put(meta, data)
    store.close()
    DAMAGES[damage](tmp_path / NAME / "index.sqlite")
    again = DiskStore(tmp_path, 50 * MIB, fingerprint=ROOT)
    assert [again.get(meta.key) for meta, _ in blocks] == [data for _, data in blocks]
    assert again.put(*block(50))
    assert again.paused is None
    assert_whole(again, tmp_path)
    again.close()


@pytest.mark.parametrize("name", ["index.sqlite-wal", "index.sqlite-shm"])
def test_a_damaged_log_loses_nothing(name: str, tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 50 * MIB, fingerprint=ROOT)
    blocks = [block(number) for number in range(5)]
    for meta, data in blocks:
        store.put(meta, data)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / NAME, copy / NAME)  # as a killed process leaves it: the log is not in the file yet
    store.close()
    assert (copy / NAME / name).stat().st_size > 0
    overwrite(0.2, 4000)(copy / NAME / name)
    again = DiskStore(copy, 50 * MIB, fingerprint=ROOT)
    assert [again.get(meta.key) for meta, _ in blocks] == [data for _, data in blocks]
    assert_whole(again, copy)
    again.close()


@pytest.mark.parametrize("damage", ["gone", "all rubbish", "rubbish at the start", "cut", "other tables"])
def test_a_damaged_index_is_made_anew_while_the_store_is_open(damage: str, store: DiskStore, tmp_path: Path) -> None:
    blocks = [block(number) for number in range(12)]
    for meta, data in blocks:
        store.put(meta, data)
    store._shared.trim(timeout=1)  # all is in the file now
    DAMAGES[damage](tmp_path / NAME / "index.sqlite")
    late = block(50)
    assert store.put(*late)
    assert store.paused is None
    assert [store.get(meta.key) for meta, _ in [*blocks, late]] == [data for _, data in [*blocks, late]]
    store.close()
    again = DiskStore(tmp_path, 50 * MIB, fingerprint=ROOT)
    assert_whole(again, tmp_path)
    assert len(again.entries()) == 13
    again.close()


def test_an_index_that_one_process_made_anew_is_seen_by_the_other(store: DiskStore, tmp_path: Path) -> None:
    other = DiskStore(tmp_path, 50 * MIB, fingerprint=ROOT)
    first, second, third = block(0), block(1), block(2)
    store.put(*first)
    (tmp_path / NAME / "index.sqlite").unlink()
    assert store.put(*second)
    assert other.contains(second[0].key)
    assert other.put(*third)
    assert store.contains(third[0].key)
    assert_whole(store, tmp_path)
    other.close()


def test_a_lock_on_a_marker_that_was_cleared_meanwhile_is_taken_again(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, calls = fcntl.flock, []

    def clear_first(file: int, how: int) -> None:
        flock(file, how)
        calls.append(how)
        if len(calls) == 1:
            shutil.rmtree(tmp_path / NAME)

    monkeypatch.setattr(fcntl, "flock", clear_first)
    assert store.put(*block(0))
    assert len(calls) == 2
    assert (tmp_path / NAME / MARKER).is_file()
    assert_whole(store, tmp_path)


def test_an_index_that_cannot_be_made_anew_pauses_and_reading_goes_on(
    store: DiskStore, tmp_path: Path, clock: Clock
) -> None:
    meta, data = block(0)
    store.put(meta, data)
    index = tmp_path / NAME / "index.sqlite"
    index.unlink()
    index.mkdir()
    assert not store.put(*block(1))
    assert store.paused is not None
    assert "not a plain file" in store.paused
    assert store.get(meta.key) == data
    store.stats()
    index.rmdir()
    assert not store.put(*block(1))
    clock.now += PAUSE_SECONDS
    assert store.put(*block(1))
    assert store.paused is None
    assert_whole(store, tmp_path)


def test_the_folder_deleted_under_an_open_store_is_an_empty_store(store: DiskStore, tmp_path: Path) -> None:
    meta, data = block(0)
    store.put(meta, data)
    shutil.rmtree(tmp_path / NAME)
    assert store.get(meta.key) is None
    assert store.put(meta, data)
    assert_whole(store, tmp_path)


# The files.


def test_a_file_missing_in_the_middle_of_a_chain_is_a_miss_until_it_comes_again(
    store: DiskStore, tmp_path: Path
) -> None:
    blocks = [block(0)]
    for number in range(1, 5):
        blocks.append(block(number, blocks[-1][0].key))
    for meta, data in blocks:
        store.put(meta, data)
    path_of(tmp_path, blocks[2][0].key).unlink()
    assert store.contains(blocks[2][0].key), "the index does not know yet"
    assert store.get(blocks[2][0].key) is None
    assert [store.contains(meta.key) for meta, _ in blocks] == [True, True, False, True, True]
    assert store.children(blocks[1][0].key) == []
    assert_whole(store, tmp_path)
    assert store.put(*blocks[2])
    assert [store.get(meta.key) for meta, _ in blocks] == [data for _, data in blocks]
    path_of(tmp_path, blocks[3][0].key).unlink()
    assert store.put(*blocks[3]), "a put looks for the file"
    assert store.get(blocks[3][0].key) == blocks[3][1]
    assert_whole(store, tmp_path)


def test_a_budget_below_what_lies_there_is_kept_from_the_start(store: DiskStore, tmp_path: Path) -> None:
    blocks = [block(0, size=60_000)]
    for number in range(1, 20):
        blocks.append(block(number, blocks[-1][0].key, size=60_000))
    for meta, data in blocks:
        store.put(meta, data)
    store.close()
    assert disk_bytes(tmp_path) > MIB
    again = DiskStore(tmp_path, MIB // 2, fingerprint=ROOT)
    assert_whole(again, tmp_path)
    held = [again.contains(meta.key) for meta, _ in blocks]
    assert held == sorted(held, reverse=True)
    assert sum(held) >= 4
    again.close()
    none = DiskStore(tmp_path, 0, fingerprint=ROOT)
    assert none.entries() == []
    assert not none.put(*blocks[0])
    none.close()


@pytest.mark.parametrize("name", ["write", "fsync", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_write_that_fails_pauses_writing_for_a_while(
    name: str, code: int, store: DiskStore, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = block(0), block(1), block(2)
    store.put(*first)
    before = {file for file in (tmp_path / NAME).rglob("*") if file.is_file()}

    def fail(*args: Any, **kwargs: Any) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        assert not store.put(*second)
    assert store.paused == os.strerror(code)
    assert {file for file in (tmp_path / NAME).rglob("*") if file.is_file()} == before, "nothing half-written is left"
    clock.now += PAUSE_SECONDS - 1
    assert not store.put(*second), "still paused"
    store.describe(ROOT, "{}")
    assert store.descriptions() == {}
    assert store.put(*first), "what is there is there"
    assert store.get(first[0].key) == first[1]
    clock.now += 1
    assert store.paused is None
    assert store.put(*second)
    assert store.put(*third)
    assert_whole(store, tmp_path)


def test_a_file_is_on_disk_before_it_has_its_name(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta, data = block(0)
    (tmp_path / NAME / meta.key.hex()[:2]).mkdir()
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os,
        "fsync",
        lambda file: (calls.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file"), fsync(file)),
    )
    monkeypatch.setattr(os, "rename", lambda *args, **kwargs: (calls.append("rename"), rename(*args, **kwargs)))
    assert store.put(meta, data)
    assert calls == ["file", "rename", "folder"]


def test_a_block_that_came_again_is_not_forgotten(store: DiskStore) -> None:
    meta, data = block(0)
    store.put(meta, data)
    store._shared.change(lambda index: store._forget(index, meta.key), timeout=1)
    assert store.get(meta.key) == data


def test_a_write_that_the_system_splits_is_whole(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    meta, data = block(0)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, part: write(file, part[:100]))
    assert store.put(meta, data)
    assert store.get(meta.key) == data


def test_a_read_that_fails_is_a_miss(store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta, data = block(0)
    store.put(meta, data)

    def fail(*args: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", fail)
        assert store.get(meta.key) is None
        assert store.verify().unreadable == {meta.key: os.strerror(errno.EIO)}
    assert store.paused is None
    assert store.get(meta.key) == data
    assert_whole(store, tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("no tmpfs can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(file: Path) -> None:
    """Fill the file system that a file lies on."""
    with suppress(OSError), file.open("wb", buffering=0) as filler:
        while True:
            filler.write(b"x" * 4096)


def test_a_disk_that_is_really_full_pauses_and_reading_goes_on(small_disk: Path, clock: Clock) -> None:
    store = DiskStore(small_disk, 50 * MIB, fingerprint=ROOT, clock=clock)
    blocks = [block(number, size=50_000) for number in range(30)]
    stored = [store.put(meta, data) for meta, data in blocks]
    count = sum(stored)
    assert 8 < count < 20
    assert stored == sorted(stored, reverse=True)
    assert store.paused == os.strerror(errno.ENOSPC)
    assert [store.get(meta.key) for meta, _ in blocks[:count]] == [data for _, data in blocks[:count]]
    store.close()
    for file in (small_disk / NAME).glob("index*"):
        file.unlink()
    fill(small_disk / "filler")
    again = DiskStore(small_disk, 50 * MIB, fingerprint=ROOT, clock=clock)
    assert again.paused is not None
    assert [again.get(meta.key) for meta, _ in blocks[:count]] == [data for _, data in blocks[:count]]
    again.close()


def test_a_disk_that_is_full_at_the_start_pauses(small_disk: Path, clock: Clock) -> None:
    filler = small_disk / "filler"
    fill(filler)
    store = DiskStore(small_disk, 50 * MIB, fingerprint=ROOT, clock=clock)
    assert store.paused is not None
    assert not store.put(*block(0))
    assert store.get(block(0)[0].key) is None
    assert store.stats().blocks == 0
    filler.unlink()
    clock.now += PAUSE_SECONDS
    assert store.put(*block(0))
    assert_whole(store, small_disk)
    store.close()
