"""The disk store: blocks come back, stay within the budget, and leave in the right order; what is not ours stays."""

import errno
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvarn.backend import Record
from kvarn.errors import UsageError
from kvarn.keys import block_key
from kvarn.record import BlockMeta, build
from kvarn.store import ByteStore
from kvarn.store_disk import NAME, DiskStore, default_budget
from kvarn.store_index import MARKER

OURS = hashlib.sha256(b"ours").digest()
THEIRS = hashlib.sha256(b"theirs").digest()
MIB = 1 << 20


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def block(number: int, parent: bytes = OURS, *, fingerprint: bytes = OURS, size: int = 1000) -> tuple[BlockMeta, bytes]:
    """A block of about `size` bytes, and its file."""
    tokens = (number, number + 1)
    meta = BlockMeta(
        key=block_key(parent, tokens), parent=parent, tokens=tokens, fingerprint=fingerprint, format="test"
    )
    tiles = np.random.default_rng(number).integers(0, 256, (1, 1, size), np.uint8)
    record = Record(dtype="float32", tiles=tiles, flags=np.zeros((1, 1), np.uint8), exact={})
    return meta, build(meta, record)


def chain(count: int, *, start: int = 0, fingerprint: bytes = OURS, size: int = 1000) -> list[tuple[BlockMeta, bytes]]:
    blocks: list[tuple[BlockMeta, bytes]] = []
    for number in range(start, start + count):
        parent = blocks[-1][0].key if blocks else fingerprint
        blocks.append(block(number, parent, fingerprint=fingerprint, size=size))
    return blocks


def path_of(folder: Path, key: bytes) -> Path:
    return folder / NAME / key.hex()[:2] / f"{key.hex()}.safetensors"


def disk_bytes(folder: Path) -> int:
    return sum(file.lstat().st_size for file in (folder / NAME).rglob("*") if file.is_file())


def held(store: DiskStore, blocks: list[tuple[BlockMeta, bytes]]) -> list[bool]:
    return [store.contains(meta.key) for meta, _ in blocks]


def evict_one(store: DiskStore) -> None:
    """Evict one file; cutting the index's log may be enough at first."""
    before = store.stats()
    while (store.stats().blocks, store.stats().quarantined) == (before.blocks, before.quarantined):
        assert store.prune(store.stats().total_bytes - 1) > 0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path, 50 * MIB, fingerprint=OURS, clock=clock)
    yield store
    store.close()


def test_blocks_come_back_and_outlive_the_process(store: DiskStore, tmp_path: Path) -> None:
    as_protocol: ByteStore = store
    blocks = chain(3)
    for meta, data in blocks:
        assert as_protocol.get(meta.key) is None
        assert as_protocol.put(meta, data)
        assert as_protocol.put(meta, data)
        assert as_protocol.get(meta.key) == data
    assert store.children(OURS) == [blocks[0][0]]
    assert store.children(blocks[1][0].key) == [blocks[2][0]]
    assert store.children(blocks[2][0].key) == []
    store.close()
    again = DiskStore(tmp_path, 50 * MIB, fingerprint=THEIRS)
    assert [again.get(meta.key) for meta, _ in blocks] == [data for _, data in blocks]
    again.close()


def test_a_closed_store_misses(store: DiskStore) -> None:
    meta, data = block(0)
    store.put(meta, data)
    store.close()
    store.close()
    assert not store.contains(meta.key)
    assert store.get(meta.key) is None
    assert not store.put(*block(1))
    assert store.entries() == []
    store.quarantine(meta.key, "late")
    store.describe(OURS, "{}")


def test_everything_is_private(store: DiskStore, tmp_path: Path) -> None:
    store.put(*block(0))
    store.describe(OURS, "{}")
    for path in (tmp_path / NAME, *(tmp_path / NAME).rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} has {mode:o}"
    assert (tmp_path / NAME / MARKER).is_file()


def test_a_folder_that_is_not_ours_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=MARKER):
        DiskStore(tmp_path, MIB, fingerprint=OURS)
    assert [path.name for path in (tmp_path / NAME).iterdir()] == ["thesis.tex"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    store = DiskStore(tmp_path, 10 * MIB, fingerprint=OURS)
    assert store.put(*block(0))
    store.close()


@pytest.mark.parametrize("name", [NAME, f"{NAME}/{MARKER}", f"{NAME}/index.sqlite"])
def test_a_link_in_the_place_of_what_is_ours_is_refused(name: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    if name == NAME:
        elsewhere.mkdir()
    else:
        elsewhere.write_text("mine")
        DiskStore(tmp_path, MIB, fingerprint=OURS).close()
        (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(elsewhere)
    with pytest.raises(UsageError, match=r"move it away|no KVARN_CACHE"):
        DiskStore(tmp_path, MIB, fingerprint=OURS)
    assert elsewhere.is_dir() or elsewhere.read_text() == "mine"


def test_a_folder_that_cannot_be_made_names_the_reason_and_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match=r"Not a directory.*--cache-dir.*--no-cache"):
        DiskStore(tmp_path / "file" / "below", MIB, fingerprint=OURS)


def test_a_read_only_folder_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UsageError, match=r"Read-only file system.*--no-cache"):
        DiskStore(tmp_path, MIB, fingerprint=OURS)


def foreign_files(folder: Path) -> dict[Path, bytes]:
    """Files that are not ours, in every place where ours lie, some with names almost like ours."""
    key, other = "ab" * 32, "cd" * 32
    names = [
        "notes.txt",
        "index.sqlite.bak",
        "ab/notes.txt",
        f"ab/{key[:-1]}.safetensors",
        f"ab/{key.upper()}.safetensors",
    ]
    names += [f"ab/{other}.safetensors", f"ab/{key}.safetensors.bak", f"ab/{key}.1-abc.tmp", "quarantine/evidence.bad"]
    names += [f"abc/{key}.safetensors", f"{key}.safetensors", "fingerprints/mine.json", f"ab/deep/{key}.safetensors"]
    files = {folder / name: name.encode() for name in names}
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return files


def test_foreign_files_and_links_are_never_counted_moved_or_deleted(tmp_path: Path) -> None:
    DiskStore(tmp_path, 10 * MIB, fingerprint=OURS).close()
    folder = tmp_path / NAME
    files = foreign_files(folder)
    outside = tmp_path / "outside"
    outside.mkdir()
    target, key = outside / f"{'ef' * 32}.safetensors", "ab" * 31 + "ef"
    target.write_bytes(b"outside")
    links = {folder / "ef": outside, folder / "ab" / f"{key}.safetensors": target, folder / "ab" / "loop": folder}
    for link, to in links.items():
        link.symlink_to(to)
    store = DiskStore(tmp_path, 10 * MIB, fingerprint=OURS)
    assert store.stats().blocks == 0
    assert store.stats().quarantined == 0
    assert store.stats().total_bytes == sum(
        path.stat().st_size
        for path in folder.iterdir()
        if path.name.startswith((MARKER, "index.sqlite")) and path not in files
    )
    below_link = next(n for n in range(5000) if block(n)[0].key[0] == 0xEF)
    assert not store.put(*block(below_link))
    assert store.put(*block(below_link + 1))
    assert store.paused is None
    store.quarantine(bytes.fromhex(key), "a link")
    store.verify(delete=True)
    store.prune(0)
    assert store.clear() > 0
    store.close()
    assert {path: path.read_bytes() for path in files} == files
    assert all(link.is_symlink() for link in links)
    assert [path.name for path in outside.iterdir()] == [target.name]
    ours = {path for path in folder.rglob("*") if not path.is_dir()} - set(files) - set(links)
    assert ours == set()


def test_clear_leaves_nothing_and_the_store_goes_on(store: DiskStore, tmp_path: Path) -> None:
    other = DiskStore(tmp_path, 50 * MIB, fingerprint=THEIRS)
    first = block(0)
    store.put(*first)
    store.describe(OURS, "{}")
    store.put(*block(1))
    store.quarantine(block(1)[0].key, "bad")
    before = disk_bytes(tmp_path)
    assert store.clear() == before
    assert not (tmp_path / NAME).exists()
    assert not store.contains(first[0].key)
    assert not other.contains(first[0].key)
    assert other.put(*first)
    assert store.put(*block(2))
    assert store.get(first[0].key) == first[1]
    assert other.contains(block(2)[0].key)
    other.close()


def test_quarantined_blocks_are_not_read_again_and_count(store: DiskStore, tmp_path: Path, clock: Clock) -> None:
    meta, data = block(0)
    store.put(meta, data)
    store.quarantine(meta.key, "a reason")
    assert store.get(meta.key) is None
    stats = store.stats()
    assert (stats.blocks, stats.block_bytes, stats.quarantined) == (0, 0, 1)
    assert stats.total_bytes == disk_bytes(tmp_path) > len(data)
    assert store.quarantined() == [(meta.key, "a reason")]
    store.close()
    again = DiskStore(tmp_path, 50 * MIB, fingerprint=OURS, clock=clock)
    assert again.quarantined() == [(meta.key, "a reason")]
    assert again.put(meta, data)
    assert again.get(meta.key) == data
    again.close()


def test_verify_finds_what_is_bad(store: DiskStore, tmp_path: Path) -> None:
    blocks = chain(4)
    for meta, data in blocks:
        store.put(meta, data)
    flipped = bytearray(blocks[1][1])
    flipped[-1] ^= 1
    path_of(tmp_path, blocks[1][0].key).write_bytes(flipped)
    path_of(tmp_path, blocks[2][0].key).write_bytes(blocks[3][1])
    path_of(tmp_path, blocks[3][0].key).unlink()
    report = store.verify()
    assert report.good == 1
    assert set(report.bad) == {blocks[1][0].key, blocks[2][0].key}
    assert "checksum" in report.bad[blocks[1][0].key]
    assert "another block's" in report.bad[blocks[2][0].key]
    assert report.unreadable == {blocks[3][0].key: "No such file or directory"}
    assert held(store, blocks) == [True, False, False, False]
    assert store.stats().quarantined == 2
    assert store.verify(delete=True).good == 1
    assert store.stats().quarantined == 0
    assert store.stats().total_bytes == disk_bytes(tmp_path)


def test_descriptions_are_kept_and_the_first_stays(store: DiskStore, tmp_path: Path) -> None:
    store.describe(OURS, '{"model": "ä"}')
    store.describe(OURS, "{}")
    store.describe(THEIRS, "[]")
    (tmp_path / NAME / "fingerprints" / f"{'00' * 32}.json").write_bytes(b"\xff")
    assert store.descriptions() == {OURS: '{"model": "ä"}', THEIRS: "[]"}


def test_stats_and_entries(store: DiskStore, clock: Clock, tmp_path: Path) -> None:
    ours, theirs = chain(2), chain(1, start=50, fingerprint=THEIRS)
    for meta, data in ours + theirs:
        clock.now += 1
        store.put(meta, data)
    clock.now = 2000.0
    store.get(ours[0][0].key)
    stats = store.stats()
    sizes = [len(data) for _, data in ours + theirs]
    assert (stats.blocks, stats.block_bytes, stats.budget_bytes) == (3, sum(sizes), 50 * MIB)
    assert stats.total_bytes == disk_bytes(tmp_path)
    assert stats.fingerprints[OURS].blocks == 2
    assert stats.fingerprints[OURS].used == 2000.0
    assert stats.fingerprints[THEIRS].bytes == sizes[2]
    entries = store.entries()
    assert [entry.key for entry in entries] == [meta.key for meta, _ in (ours[1], theirs[0], ours[0])]
    last = entries[-1]
    assert (last.parent, last.fingerprint, last.num_tokens) == (OURS, OURS, 2)
    assert (last.size, last.created, last.used) == (sizes[0], 1001.0, 2000.0)


# The budget.


def test_the_least_recently_used_leaf_goes_first(store: DiskStore, clock: Clock) -> None:
    first, second = chain(3), chain(3, start=50)
    for meta, data in first + second:
        clock.now += 1
        store.put(meta, data)
    clock.now += 1
    store.get(first[2][0].key)  # the tail alone is used: its parents have no later time, but a child
    order = []
    while store.stats().blocks:
        before = held(store, first + second)
        evict_one(store)
        after = held(store, first + second)
        order += [i for i in range(6) if before[i] and not after[i]]
    assert order == [5, 4, 3, 2, 1, 0]


def test_the_fingerprints_that_a_process_describes_are_its_own(tmp_path: Path, clock: Clock) -> None:
    tenant, foreign = hashlib.sha256(b"a tenant").digest(), THEIRS
    with closing(DiskStore(tmp_path, 4 * MIB, fingerprint=OURS, clock=clock)) as store:
        store.describe(tenant, "{}")
        for number, fingerprint in enumerate((tenant, OURS, foreign)):
            clock.now += 1
            assert store.put(*block(number, fingerprint, fingerprint=fingerprint, size=MIB))
        clock.now += 1
        assert store.put(*block(9, OURS, size=MIB + MIB // 2))
        assert [bool(store.children(root)) for root in (tenant, OURS, foreign)] == [True, True, False]


def test_quarantine_goes_first_then_foreign_fingerprints(store: DiskStore, clock: Clock) -> None:
    ours, theirs, bad = chain(2), chain(2, start=50, fingerprint=THEIRS), block(99)
    for meta, data in [*ours, *theirs, bad]:
        clock.now += 1
        store.put(meta, data)
    store.quarantine(bad[0].key, "bad")
    evict_one(store)
    assert store.stats().quarantined == 0
    assert held(store, ours + theirs) == [True] * 4
    evict_one(store)
    assert held(store, ours + theirs) == [True, True, True, False]
    evict_one(store)
    assert held(store, ours + theirs) == [True, True, False, False]


def test_the_budget_holds_after_every_put_and_counts_everything(tmp_path: Path, clock: Clock) -> None:
    budget = 2 * MIB
    store = DiskStore(tmp_path, budget, fingerprint=OURS, clock=clock)
    store.describe(OURS, "{}")
    blocks = [block(number, size=100_000) for number in range(40)]
    for i, (meta, data) in enumerate(blocks):
        clock.now += 1
        assert store.put(meta, data)
        if i == 5:
            store.quarantine(meta.key, "bad")
        assert disk_bytes(tmp_path) <= budget
        assert store.stats().total_bytes == disk_bytes(tmp_path) <= budget
    assert held(store, blocks) == sorted(held(store, blocks)), "the oldest went first"
    assert 14 <= sum(held(store, blocks)) <= 20
    store.close()


def test_the_index_counts_and_shrinks(tmp_path: Path) -> None:
    """Of blocks this small the index is the larger part."""
    store = DiskStore(tmp_path, 250_000, fingerprint=OURS)
    blocks = [block(number, size=1) for number in range(100)]
    for meta, data in blocks:
        assert store.put(meta, data)
        assert store._shared.change(lambda index: index.held_bytes(), timeout=1) <= 250_000
    assert 20 < sum(held(store, blocks)) < 100
    store._shared.trim(timeout=1)
    full = (tmp_path / NAME / "index.sqlite").stat().st_size
    store.prune(0)
    assert (tmp_path / NAME / "index.sqlite").stat().st_size < full
    store.close()


def test_a_chain_longer_than_the_budget_keeps_its_head(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, MIB, fingerprint=OURS)
    blocks = chain(20, size=100_000)
    stored = [store.put(meta, data) for meta, data in blocks]
    assert held(store, blocks) == sorted(held(store, blocks), reverse=True)
    assert 5 <= sum(stored) == sum(held(store, blocks)) <= 10
    store.close()


def test_a_block_larger_than_the_budget_is_refused_and_nothing_goes_for_it(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, MIB, fingerprint=OURS)
    small = block(0)
    store.put(*small)
    assert not store.put(*block(1, size=2 * MIB))
    assert not store.put(*block(1, size=MIB - 2000))  # with the index beside it, it would not fit
    assert held(store, [small]) == [True]
    assert store.paused is None
    store.close()


def test_descriptions_of_what_is_gone_are_the_last_to_go(store: DiskStore, tmp_path: Path) -> None:
    with closing(DiskStore(tmp_path, 50 * MIB, fingerprint=THEIRS)) as another:
        for one, fingerprint in ((store, OURS), (another, THEIRS)):
            one.describe(fingerprint, "{}")
            one.put(*chain(1, fingerprint=fingerprint)[0])
    store.prune(0)
    assert store.stats().blocks == 0
    assert store.descriptions() == {OURS: "{}"}
    with closing(DiskStore(tmp_path, 50 * MIB, fingerprint=b"")) as of_no_model:
        of_no_model.prune(0)
        assert of_no_model.descriptions() == {}


def test_the_budget_is_chosen_from_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    gib = 1 << 30
    for free, want, words in ((400, 20 * gib, "20 GiB"), (100, 10 * gib, "10 %"), (5, gib // 2, "10 %"), (4, 0, "off")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(0, 0, free * gib))
        budget, text = default_budget(tmp_path / "not" / "there")
        assert budget == want
        assert words in text
    asked: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or usage(0, 0, 0))
    default_budget(tmp_path / "not" / "there")
    assert asked == [tmp_path]


# Opening.


def test_the_index_is_mended_from_the_files(store: DiskStore, tmp_path: Path, clock: Clock) -> None:
    blocks = chain(5)
    for meta, data in blocks[:4]:
        store.put(meta, data)
    store.close()
    keys = [meta.key for meta, _ in blocks]
    path_of(tmp_path, keys[1]).unlink()
    path_of(tmp_path, keys[2]).write_bytes(blocks[2][1][:-1])
    path_of(tmp_path, keys[4]).parent.mkdir(exist_ok=True)
    path_of(tmp_path, keys[4]).write_bytes(blocks[4][1])
    bad = block(77)[0].key
    path_of(tmp_path, bad).parent.mkdir(exist_ok=True)
    path_of(tmp_path, bad).write_bytes(b"rubbish" * 9)
    misplaced, other = block(78), tmp_path / NAME / ("00" if block(78)[0].key[0] else "01")
    other.mkdir(exist_ok=True)
    (other / f"{misplaced[0].key.hex()}.safetensors").write_bytes(misplaced[1])
    again = DiskStore(tmp_path, 50 * MIB, fingerprint=OURS, clock=clock)
    assert held(again, blocks) == [True, False, False, True, True]
    assert held(again, [misplaced]) == [False]
    (other / f"{misplaced[0].key.hex()}.safetensors").unlink()
    reasons = dict(again.quarantined())
    assert "the index says" in reasons[keys[2]]
    assert "not a record" in reasons[bad]
    assert again.stats().total_bytes == disk_bytes(tmp_path)
    assert again.verify().bad == {}
    again.close()


def test_left_temporary_files_go_at_the_start(tmp_path: Path) -> None:
    DiskStore(tmp_path, MIB, fingerprint=OURS).close()
    shard = tmp_path / NAME / "ab"
    shard.mkdir()
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as child:
        gone = child.pid
    dead, young, old = (shard / f"{'ab' * 32}.{pid}-{n * 16}.tmp" for pid, n in ((gone, "0"), (1, "1"), (1, "2")))
    for path in (dead, young, old):
        path.write_bytes(b"x" * 100)
    os.utime(old, (time.time() - 4000,) * 2)
    store = DiskStore(tmp_path, MIB, fingerprint=OURS)
    assert [path.exists() for path in (dead, young, old)] == [False, True, False]
    assert store.stats().total_bytes == disk_bytes(tmp_path)
    store.close()


def test_times_of_use_reach_the_other_process(store: DiskStore, tmp_path: Path, clock: Clock) -> None:
    meta, data = block(0)
    store.put(meta, data)
    other = DiskStore(tmp_path, 50 * MIB, fingerprint=OURS, clock=clock)
    clock.now = 5000.0
    store.get(meta.key)
    assert other.entries()[0].used == 5000.0
    clock.now += 1
    store.get(meta.key)
    assert other.entries()[0].used == 5000.0, "uses are written together"
    store.close()
    assert other.entries()[0].used == 5001.0
    other.close()


def test_thirty_thousand_blocks_are_evicted_by_index(tmp_path: Path) -> None:
    """No query may read all rows to find one: SQLite's own plan says so."""
    store = DiskStore(tmp_path, 50 * MIB, fingerprint=OURS)
    index = store._shared._index
    assert index is not None
    plans: list[str] = []
    queries: list[str] = []
    index._writer.set_trace_callback(queries.append)
    for meta, data in chain(2):
        store.put(meta, data)
    store.prune(0)
    index._writer.set_trace_callback(None)
    for query in set(queries):
        if query.lstrip().startswith(("SELECT", "UPDATE", "DELETE", "INSERT")):
            plans += [row[3] for row in index._writer.execute(f"EXPLAIN QUERY PLAN {query}")]
    scans = {plan for plan in plans if plan.startswith("SCAN") and "CONSTANT" not in plan}
    assert any("blocks_leaves" in plan for plan in plans)
    assert not {plan for plan in scans if "blocks" in plan}, scans
    store.close()
