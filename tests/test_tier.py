"""Tiles that outlive the memory: taken over when they arrive, and never a different answer for it."""

import random

import pytest
from fake_backend import VOCAB, FakeBackend, next_token
from fake_tier import FakeTier

from kvarn.engine import Engine, EngineConfig
from kvarn.format import Preset
from kvarn.request import Event, Request, RequestParams
from kvarn.tier import NO_TIER

SMALL = Preset(tile_tokens=64)


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB), k=length))


def continuation(tokens: tuple[int, ...], count: int) -> list[int]:
    history = list(tokens)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(tokens) :]


def engine(tier: FakeTier, preset: Preset | None = SMALL, **config: int) -> Engine:
    """An engine with fresh pools: what the last one held in memory is lost, as after a restart."""
    base = {"context": 1024, "prefill_chunk": 128, "max_sequences": 4, "blocks": 64, "slots": 48}
    backend = FakeBackend(preset)
    tier.backend = backend
    return Engine(backend, EngineConfig(**(base | config)), tier=tier)


def drain(run: Engine) -> dict[Request, list[Event]]:
    events: dict[Request, list[Event]] = {}
    while run.scheduler.has_work:
        for event in run.step():
            events.setdefault(event.request, []).append(event)
    return events


def answer(run: Engine, tokens: tuple[int, ...], count: int = 5, tenant: str = "") -> Request:
    request = run.add(RequestParams(prompt=tokens, max_tokens=count, tenant=tenant))
    events = drain(run)[request]
    assert [e.token for e in events if e.token is not None] == continuation(tokens, count)
    return request


@pytest.mark.parametrize("preset", [SMALL, None])
@pytest.mark.parametrize("pace", [0, 1, 3, 100])
@pytest.mark.parametrize("length", [1, 64, 65, 128, 129, 192, 500, 576, 577])
def test_after_a_restart_only_the_rest_is_computed(preset: Preset | None, pace: int, length: int) -> None:
    tier = FakeTier(pace)
    cold = answer(engine(tier, preset), prompt(length))
    again = engine(tier, preset)
    warm = answer(again, prompt(length))
    g = again.scheduler.config.tile_tokens
    reused = (length - 1) // g * g
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, reused)
    assert again.scheduler.counters.restored_tokens == reused
    assert again.scheduler.counters.computed_tokens == length - reused + 4


def test_another_question_after_the_same_text_restores_the_shared_tiles() -> None:
    tier = FakeTier()
    answer(engine(tier), prompt(600))
    warm = answer(engine(tier), (*prompt(600)[:450], *prompt(100, 2)))
    assert warm.num_cached_tokens == 448


def test_the_answer_of_the_last_turn_is_restored_too() -> None:
    tier = FakeTier()
    first = answer(engine(tier), prompt(100), 200)
    second = answer(engine(tier), (*first.tokens, *prompt(20, 3)))
    assert second.num_cached_tokens == 256


def test_a_tile_is_handed_down_once() -> None:
    tier = FakeTier()
    run = engine(tier)
    answer(run, prompt(300))
    answer(run, prompt(300))
    answer(engine(tier), prompt(300))
    assert len(tier.computed_keys) == len(set(tier.computed_keys)) == 4


def test_a_gap_in_the_chain_ends_the_restore_there() -> None:
    tier = FakeTier()
    run = engine(tier)
    answer(run, prompt(600))
    del tier.records[tier.computed_keys[3]]
    warm = answer(engine(tier), prompt(600))
    assert warm.num_cached_tokens == 192


def test_an_adoption_that_fails_costs_time_only() -> None:
    tier = FakeTier()
    answer(engine(tier), prompt(600))
    tier.broken = True
    again = engine(tier)
    warm = answer(again, prompt(600))
    assert warm.num_cached_tokens == 0
    assert again.bytes_held == 0


def test_nothing_is_shared_between_tenants() -> None:
    tier = FakeTier()
    answer(engine(tier), prompt(600), tenant="a")
    run = engine(tier)
    assert answer(run, prompt(600), tenant="b").num_cached_tokens == 0
    assert answer(run, prompt(600), tenant="").num_cached_tokens == 0
    assert answer(run, prompt(600), tenant="a").num_cached_tokens == 576
    assert answer(run, prompt(600), tenant="b").num_cached_tokens == 576


def test_running_answers_go_on_while_tiles_arrive() -> None:
    tier = FakeTier(pace=0)
    answer(engine(tier), prompt(900))
    run = engine(tier)
    short = run.add(RequestParams(prompt=prompt(10, 2), max_tokens=60))
    run.step()
    long = run.add(RequestParams(prompt=prompt(900), max_tokens=3))
    tokens_before_long = 0
    while long.num_generated_tokens == 0:
        events = run.step()
        tokens_before_long += sum(e.request is short for e in events)
    assert tokens_before_long >= 20
    assert long.num_cached_tokens == 896
    assert tier.waits == 0
    drain(run)
    assert short.answer == continuation(prompt(10, 2), 60)
    assert long.answer == continuation(prompt(900), 3)


def test_the_engine_sleeps_when_all_wait_for_tiles() -> None:
    tier = FakeTier(pace=0)
    answer(engine(tier), prompt(300))
    answer(engine(tier), prompt(300))
    assert tier.waits > 0


@pytest.mark.parametrize("when", range(8))
def test_a_request_can_be_cancelled_while_its_tiles_arrive(when: int) -> None:
    tier = FakeTier(pace=0)
    answer(engine(tier), prompt(600))
    run = engine(tier)
    request = run.add(RequestParams(prompt=prompt(600), max_tokens=3))
    for _ in range(when):
        run.step()
    assert run.cancel(request)
    assert all(fetch.cancelled or fetch.done for fetch in tier.fetches)
    assert not run.scheduler.has_work
    assert run.bytes_held == 0
    answer(run, prompt(600))


def test_several_answers_fork_from_a_restored_prompt() -> None:
    tier = FakeTier()
    answer(engine(tier), prompt(320))
    run = engine(tier)
    run.add(RequestParams(prompt=prompt(321), max_tokens=30, n=3))
    tier.records.clear()
    events = drain(run)
    assert len(events) == 3
    for request in events:
        assert request.answer == continuation(prompt(321), 30)
        assert request.num_cached_tokens == 320


def test_two_requests_restore_one_prefix_once() -> None:
    tier = FakeTier()
    answer(engine(tier), prompt(600))
    run = engine(tier)
    requests = [run.add(RequestParams(prompt=prompt(600), max_tokens=3)) for _ in range(3)]
    drain(run)
    assert run.scheduler.counters.restored_tokens == 576
    assert [request.num_cached_tokens for request in requests] == [576] * 3


def test_scoring_reuses_nothing_and_no_tier_keeps_nothing() -> None:
    tier = FakeTier()
    answer(engine(tier), prompt(300))
    run = engine(tier)
    run.add(RequestParams(prompt=prompt(300), max_tokens=0, return_logits=True))
    drain(run)
    assert run.scheduler.counters.computed_tokens == 300
    assert NO_TIER.fetch(b"", [b""], 0) is None
    assert NO_TIER.report() == {}
