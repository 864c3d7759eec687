"""The loop gives every request the tokens that its own history calls for."""

import pytest
from fake_backend import FakeBackend, next_token

from kvarn.capacity import holding
from kvarn.engine import Engine, EngineConfig
from kvarn.errors import ContextOverflowError, SealError, UsageError
from kvarn.format import Preset
from kvarn.request import RequestParams

PRESETS = [Preset(), Preset(tile_tokens=64), None]


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple((i * seed * 31 + i // 7) % 90 for i in range(length))


def continuation(tokens: tuple[int, ...], count: int) -> list[int]:
    history = list(tokens)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(tokens) :]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("chunk", [1, 64, 100, 128, 129, 1000])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 257, 385])
def test_an_answer_does_not_depend_on_the_chunks(preset: Preset | None, chunk: int, length: int) -> None:
    engine = Engine(FakeBackend(preset), EngineConfig(context=640, prefill_chunk=chunk))
    events = list(engine.stream(RequestParams(prompt=prompt(length), max_tokens=140)))
    assert [e.token for e in events if e.token is not None] == continuation(prompt(length), 140)
    assert events[-1].finish_reason == "length"


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_held_is_what_the_formula_says_and_comes_back(preset: Preset | None) -> None:
    backend = FakeBackend(preset)
    engine = Engine(backend, EngineConfig(context=700, prefill_chunk=100))
    for length in (1, 10, 64, 65, 128, 129, 300, 512, 513):
        engine.peak_bytes_held = 0
        list(engine.stream(RequestParams(prompt=prompt(length), max_tokens=0)))
        assert engine.peak_bytes_held == holding(length, backend.info.plan).nbytes(backend.pool_size)
        assert engine.bytes_held == 0


def test_a_short_chat_holds_no_more_than_an_exact_one() -> None:
    held = []
    for preset in (Preset(), None):
        engine = Engine(FakeBackend(preset), EngineConfig(context=700, prefill_chunk=100))
        list(engine.stream(RequestParams(prompt=prompt(10), max_tokens=5)))
        held.append(engine.peak_bytes_held)
    assert held[0] <= held[1]


def test_the_answer_ends_at_the_context() -> None:
    engine = Engine(FakeBackend(Preset()), EngineConfig(context=300, prefill_chunk=64))
    events = list(engine.stream(RequestParams(prompt=prompt(297), max_tokens=100)))
    assert [e.token for e in events if e.token is not None] == continuation(prompt(297), 3)
    assert events[-1].finish_reason == "length"


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    expected = continuation(prompt(50), 20)
    stop = expected[10]
    engine = Engine(FakeBackend(Preset()), EngineConfig(context=300, prefill_chunk=64))
    params = RequestParams(prompt=prompt(50), max_tokens=20, stop_token_ids=frozenset({stop}))
    events = list(engine.stream(params))
    assert [e.token for e in events if e.token is not None] == expected[: expected.index(stop)]
    assert events[-1].finish_reason == "stop"


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers() -> None:
    engine = Engine(FakeBackend(Preset()), EngineConfig(context=300, prefill_chunk=64))
    with pytest.raises(ContextOverflowError, match=r"300 tokens.*context of 300"):
        engine.add(RequestParams(prompt=prompt(300), max_tokens=1))
    list(engine.stream(RequestParams(prompt=prompt(300), max_tokens=0)))


def test_a_tile_that_cannot_be_sealed_ends_its_request_by_name_and_frees_everything() -> None:
    engine = Engine(FakeBackend(Preset(), poison=95), EngineConfig(context=600, prefill_chunk=64))
    bad = (*prompt(200), 95, *prompt(100))
    with pytest.raises(SealError, match=r"layer 1, kv head 0: poisoned.*--kv-cache-dtype exact"):
        list(engine.stream(RequestParams(prompt=bad, max_tokens=5)))
    assert engine.bytes_held == 0
    events = list(engine.stream(RequestParams(prompt=prompt(300), max_tokens=5)))
    assert [e.token for e in events if e.token is not None] == continuation(prompt(300), 5)


def test_scoring_returns_the_logits_of_every_prompt_token() -> None:
    engine = Engine(FakeBackend(Preset()), EngineConfig(context=300, prefill_chunk=70))
    events = list(engine.stream(RequestParams(prompt=prompt(200), max_tokens=0, return_logits=True)))
    rows = [int(row.argmax()) for e in events if e.logits is not None for row in e.logits]
    assert rows == [next_token(prompt(200)[: i + 1]) for i in range(200)]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        RequestParams(prompt=(), max_tokens=1)
