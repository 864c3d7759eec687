"""The store behind the prefix cache: what was computed comes back whole, and nothing else ever does."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence

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
