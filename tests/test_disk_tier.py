"""The store behind the prefix cache: what was computed comes back whole, and nothing else ever does."""

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fake_backend import VOCAB, FakeBackend, next_token

from kvarn import disk_tier
from kvarn.disk_tier import DiskTier
from kvarn.engine import Engine, EngineConfig
from kvarn.format import Preset
from kvarn.keys import Fingerprint, format_name, layer_names
from kvarn.record import parse
from kvarn.request import Request, RequestParams
from kvarn.store import BlockMeta, MemoryStore
from kvarn.store_disk import DiskStore

SMALL = Preset(tile_tokens=64)
PRESETS = [SMALL, None]


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB), k=length))


def continuation(tokens: Sequence[int], count: int) -> list[int]:
    history = list(tokens)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(tokens) :]


def fingerprint(preset: Preset | None = SMALL, **parts: object) -> Fingerprint:
    plan = FakeBackend(preset).info.plan
    known = {
        "format": format_name(plan),
        "algorithm": 1,
        "layers": layer_names(plan),
        "dtype": "float32",
        "weights": "w",
        "config": {"model_type": "fake"},
        "tokenizer": "t",
        "rope": {"rope_type": "default"},
        "adapter": "",
    }
    return Fingerprint(**(known | parts))  # type: ignore[arg-type]


class Kept(MemoryStore):
    """A store that outlives the tier which closes it, as a folder does."""

    def close(self) -> None: ...


Start = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start an engine with empty pools over a store: a process of its own."""
    engines: list[Engine] = []

    def begin(store: MemoryStore, preset: Preset | None = SMALL, **parts: object) -> Engine:
        backend = FakeBackend(preset)
        tier = DiskTier(store, backend, fingerprint(preset, **parts))
        config = EngineConfig(context=1024, prefill_chunk=128, max_sequences=4, blocks=64, slots=48)
        engines.append(Engine(backend, config, tier=tier))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def answer(engine: Engine, tokens: tuple[int, ...], count: int = 5, tenant: str = "") -> Request:
    request = engine.add(RequestParams(prompt=tokens, max_tokens=count, tenant=tenant))
    while engine.scheduler.has_work:
        for event in engine.step():
            assert event.error is None
    assert request.answer == continuation(tokens, count)
    return request


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("length", [64, 65, 128, 129, 500, 640, 641])
def test_a_restart_computes_the_rest_only(start: Start, preset: Preset | None, length: int) -> None:
    store = Kept()
    first = start(store, preset)
    answer(first, prompt(length))
    first.close()
    again = start(store, preset)
    g = again.scheduler.config.tile_tokens
    warm = answer(again, prompt(length))
    assert warm.num_cached_tokens == (length - 1) // g * g
    assert again.scheduler.counters.computed_tokens == length - warm.num_cached_tokens + 4
    assert again.cache_report()["tokens"]["from_disk"] == warm.num_cached_tokens


def test_what_is_written_says_what_it_is(start: Start) -> None:
    store = Kept()
    engine = start(store)
    answer(engine, prompt(300))
    engine.close()
    assert len(store.blocks) == 4
    by_parent = {meta.parent: meta for meta, _ in store.blocks.values()}
    parent, tokens = fingerprint().root(), prompt(300)
    for tile in range(4):
        meta = by_parent[parent]
        assert meta.tokens == tokens[tile * 64 : tile * 64 + 64]
        assert (meta.fingerprint, meta.format) == (fingerprint().root(), "KVarN-1 kvarn_k4v2_g64")
        stored, record = parse(store.blocks[meta.key][1])
        assert stored == meta
        assert (record.tiles is None) == (tile == 0), "the sink is stored exact"
        parent = meta.key
    assert store.texts[fingerprint().root()] == fingerprint().text()


def test_a_tile_is_written_once(start: Start) -> None:
    class Counting(Kept):
        puts: list[bytes] = []  # noqa: RUF012

        def put(self, meta: BlockMeta, data: bytes) -> bool:
            self.puts.append(meta.key)
            return super().put(meta, data)

    store = Counting()
    for _ in range(2):
        engine = start(store)
        answer(engine, prompt(300))
        answer(engine, (*prompt(300), *continuation(prompt(300), 5), *prompt(100, 4)))
        engine.close()
    assert len(store.puts) == len(set(store.puts)) == 6, "a conversation appends new blocks only"


@pytest.mark.parametrize(
    "parts",
    [
        {"format": "KVarN-1 kvarn_k4v4_g64"},
        {"algorithm": 2},
        {"layers": ("sealed 2x64", "exact 2x64")},
        {"dtype": "bfloat16"},
        {"weights": "others"},
        {"config": {"model_type": "fake", "rope_theta": 1.0}},
        {"tokenizer": "another"},
        {"rope": {"rope_type": "linear", "factor": 2.0}},
        {"adapter": "a"},
    ],
    ids=lambda parts: next(iter(parts)),
)
def test_any_other_part_of_the_salt_never_hits(start: Start, parts: dict[str, object]) -> None:
    store = Kept()
    first = start(store)
    answer(first, prompt(300))
    first.close()
    assert answer(start(store, **parts), prompt(300)).num_cached_tokens == 0
    assert answer(start(store), prompt(300)).num_cached_tokens == 256


def test_another_tenant_never_hits(start: Start) -> None:
    store = Kept()
    first = start(store)
    answer(first, prompt(300), tenant="a")
    first.close()
    engine = start(store)
    assert answer(engine, prompt(300), tenant="b").num_cached_tokens == 0
    assert answer(engine, prompt(300)).num_cached_tokens == 0
    assert answer(start(store), prompt(300), tenant="a").num_cached_tokens == 256


def _damage(store: MemoryStore, tile: int, change: Callable[[bytes], bytes]) -> bytes:
    parent = fingerprint().root()
    for _ in range(tile + 1):
        [meta] = store.children(parent)
        parent = meta.key
    store.blocks[parent] = (meta, change(store.blocks[parent][1]))
    return parent


@pytest.mark.parametrize("tile", [0, 1, 2])
@pytest.mark.parametrize(
    "change",
    [lambda x: b"", lambda x: x[:20], lambda x: x[:-1], lambda x: x[:-9] + bytes([x[-9] ^ 1]) + x[-8:]],
    ids=["empty", "header", "short", "flipped"],
)
def test_a_damaged_record_costs_time_only(start: Start, tile: int, change: Callable[[bytes], bytes]) -> None:
    store = Kept()
    first = start(store)
    answer(first, prompt(300))
    first.close()
    key = _damage(store, tile, change)
    again = start(store)
    assert answer(again, prompt(300)).num_cached_tokens == tile * 64
    assert key in store.quarantined
    assert again.cache_report()["disk"]["misses"]["damaged"] == 1
    again.close()
    assert answer(start(store), prompt(300)).num_cached_tokens == 256, "it was computed and stored again"


def test_a_record_under_another_key_is_not_taken(start: Start) -> None:
    store = Kept()
    first = start(store)
    answer(first, prompt(300))
    first.close()
    second, third = _damage(store, 1, lambda x: x), _damage(store, 2, lambda x: x)
    store.blocks[second] = (store.blocks[second][0], store.blocks[third][1])
    assert answer(start(store), prompt(300)).num_cached_tokens == 64
    assert second in store.quarantined


def test_a_store_that_writes_nothing_changes_nothing(start: Start) -> None:
    store = Kept(budget_bytes=10)
    engine = start(store)
    answer(engine, prompt(300))
    engine.close()
    assert not store.blocks
    assert engine.cache_report()["disk"]["tiles_dropped"] == 4


def test_fetching_that_takes_longer_than_computing_is_skipped_but_for_a_probe(start: Start) -> None:
    store = Kept()
    first = start(store)
    for seed in range(40):
        answer(first, prompt(70, seed), 1)
    first.close()
    engine = start(store)
    tier = engine._tier
    assert isinstance(tier, DiskTier)
    tier._read.add(10.0)
    tier._compute.add(0.001)
    cached = []
    for seed in range(40):
        cached.append(answer(engine, prompt(70, seed), 1).num_cached_tokens)
        tier._compute.value = 0.001
        tier._read.value = 10.0
    assert 1 <= cached.count(64) <= 4
    assert engine.cache_report()["disk"]["misses"]["computing is faster"] >= 36


def test_read_ahead_is_bounded_and_serves_a_request_that_runs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Kept()
    first = start(store)
    prompts = [prompt(700, seed) for seed in range(8)]
    for one in prompts:
        answer(first, one)
    first.close()
    monkeypatch.setattr(disk_tier, "READ_AHEAD", 1)
    engine = start(store)
    tier = engine._tier
    assert isinstance(tier, DiskTier)
    requests = [engine.add(RequestParams(prompt=one, max_tokens=3)) for one in prompts]
    while engine.scheduler.has_work:
        engine.step()
        assert all(len(fetch.arrived) <= 1 for fetch in tier._fetches)
    assert [request.num_cached_tokens for request in requests] == [640] * 8
    assert tier.buffered == 0


def test_cancelled_fetches_leave_nothing_behind(start: Start) -> None:
    store = Kept()
    first = start(store)
    answer(first, prompt(900))
    first.close()
    for _ in range(20):
        engine = start(store)
        request = engine.add(RequestParams(prompt=prompt(900), max_tokens=3))
        engine.step()
        engine.cancel(request)
        tier = engine._tier
        assert isinstance(tier, DiskTier)
        with tier.changed:
            assert tier.changed.wait_for(lambda tier=tier: tier.buffered == 0, 5)  # type: ignore[misc]
        engine.close()


def test_closing_ends_both_threads(start: Start) -> None:
    before = threading.active_count()
    engine = start(Kept())
    assert threading.active_count() == before + 2
    engine.close()
    assert threading.active_count() == before


# Over a real folder.


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Start an engine with empty pools over the same folder."""
    engines: list[Engine] = []

    def begin(budget: int = 1 << 30) -> Engine:
        backend = FakeBackend(SMALL)
        store = DiskStore(tmp_path, budget, fingerprint=fingerprint().root())
        config = EngineConfig(context=1024, prefill_chunk=128, max_sequences=4, blocks=64, slots=48)
        engines.append(Engine(backend, config, tier=DiskTier(store, backend, fingerprint())))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


@pytest.mark.parametrize("where", ["at 0", "in the header", "at n-1", "flipped", "gone"])
def test_every_file_damaged_gives_the_right_answer_all_the_same(
    on_disk: Callable[..., Engine], tmp_path: Path, where: str
) -> None:
    first = on_disk()
    answer(first, prompt(500))
    first.close()
    assert len(files(tmp_path)) == 7
    for file in files(tmp_path):
        data = file.read_bytes()
        cut = {"at 0": b"", "in the header": data[:100], "at n-1": data[:-1]}
        if where == "gone":
            file.unlink()
        else:
            file.write_bytes(cut.get(where, data[:-7] + bytes([data[-7] ^ 8]) + data[-6:]))
    again = on_disk()
    assert answer(again, prompt(500)).num_cached_tokens == 0
    again.close()
    cached = []
    for _ in range(8):  # a block that was not reached by the restore is found out by the next one
        engine = on_disk()
        cached.append(answer(engine, prompt(500)).num_cached_tokens)
        engine.close()
    assert cached == sorted(cached)
    assert cached[-1] == 448


def test_a_missing_file_in_the_middle_of_a_chain_ends_the_restore_there(
    on_disk: Callable[..., Engine], tmp_path: Path
) -> None:
    first = on_disk()
    answer(first, prompt(500))
    keys = list(first.scheduler.cache._places)
    first.close()
    [middle] = [file for file in files(tmp_path) if file.stem == keys[3].hex()]
    middle.unlink()
    assert answer(on_disk(), prompt(500)).num_cached_tokens == 192


def test_the_index_may_go_or_be_rubbish_between_two_runs(on_disk: Callable[..., Engine], tmp_path: Path) -> None:
    for change in (lambda x: x.unlink(), lambda x: x.write_bytes(b"rubbish" * 1000)):
        engine = on_disk()
        answer(engine, prompt(500))
        engine.close()
        [index] = tmp_path.rglob("index.sqlite")
        change(index)
        assert answer(on_disk(), prompt(500)).num_cached_tokens == 448


def test_a_budget_for_two_blocks_is_kept_and_changes_no_answer(on_disk: Callable[..., Engine], tmp_path: Path) -> None:
    big = on_disk()
    for seed in (1, 2, 3):
        answer(big, prompt(900, seed))
    big.close()
    budget = 400_000
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) > budget
    engine = on_disk(budget)
    for seed in range(6):
        answer(engine, prompt(500, seed))
        assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) <= budget
    assert answer(engine, prompt(900)).num_cached_tokens <= 896


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_stops_the_writing_and_nothing_else(
    on_disk: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    engine = on_disk()

    def failing(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", failing)
    answer(engine, prompt(500))
    engine.close()
    monkeypatch.undo()
    assert not files(tmp_path)
    engine = on_disk()
    assert answer(engine, prompt(500)).num_cached_tokens == 0
    engine.close()
    assert answer(on_disk(), prompt(500)).num_cached_tokens == 448


def test_two_engines_on_one_folder_at_once(on_disk: Callable[..., Engine]) -> None:
    engines = [on_disk(1_500_000) for _ in range(2)]
    failed: list[BaseException] = []

    def work(engine: Engine, first: int) -> None:
        try:
            for seed in range(first, first + 12):
                answer(engine, prompt(500, seed % 9))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(engine, i * 5)) for i, engine in enumerate(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
