"""Many requests share one pool, and every one of them gets what it would get alone."""

import random

import pytest
from fake_backend import VOCAB, FakeBackend, next_token
from fake_tier import FakeTier
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarn.engine import Engine, EngineConfig
from kvarn.errors import CapacityError
from kvarn.format import Preset
from kvarn.request import Event, Request, RequestParams
from kvarn.sampling import SamplingParams
from kvarn.tier import NO_TIER

SMALL = Preset(tile_tokens=64)


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB), k=length))


def continuation(tokens: tuple[int, ...], count: int) -> list[int]:
    history = list(tokens)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(tokens) :]


def engine(preset: Preset | None = SMALL, **config: int) -> Engine:
    base = {"context": 1024, "prefill_chunk": 128, "max_sequences": 8, "blocks": 64, "slots": 48}
    return Engine(FakeBackend(preset), EngineConfig(**(base | config)), clock=iter(range(10**9)).__next__)


def drain(run: Engine) -> dict[Request, list[Event]]:
    events: dict[Request, list[Event]] = {}
    while run.scheduler.has_work:
        for event in run.step():
            events.setdefault(event.request, []).append(event)
    return events


def tokens(events: list[Event]) -> list[int]:
    return [event.token for event in events if event.token is not None]


@pytest.mark.parametrize("preset", [Preset(), SMALL, None])
def test_requests_of_many_lengths_get_what_they_get_alone(preset: Preset | None) -> None:
    run = engine(preset)
    lengths = [1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 385, 500]
    requests = [run.add(RequestParams(prompt=prompt(n, n), max_tokens=70)) for n in lengths]
    events = drain(run)
    for request in requests:
        assert tokens(events[request]) == continuation(request.params.prompt, 70)
    assert run.bytes_held == 0


def test_the_same_arrivals_give_the_same_plans() -> None:
    plans = []
    for _ in range(2):
        run = engine(blocks=15)
        for n in (500, 3, 200, 64, 300):
            run.add(RequestParams(prompt=prompt(n, n), max_tokens=100))
        drain(run)
        plans.append(run.backend.plans)  # type: ignore[attr-defined]
    assert plans[0] == plans[1]


def test_a_long_prompt_holds_running_answers_up_by_one_chunk_at_most() -> None:
    run = engine(token_budget=136)
    short = run.add(RequestParams(prompt=prompt(10), max_tokens=30))
    run.step()
    long = run.add(RequestParams(prompt=prompt(900, 2), max_tokens=1))
    while long in run.scheduler.running or long in run.scheduler.waiting:
        events = run.step()
        if short in run.scheduler.running or any(e.request is short for e in events):
            assert sum(e.request is short for e in events) == 1, "the short answer gets a token in every step"
        plan = run.backend.plans[-1]  # type: ignore[attr-defined]
        assert sum(len(span.tokens) for span in plan.spans) <= 136


def test_a_chunk_that_the_budget_cuts_short_ends_on_the_tile_grid() -> None:
    run = engine(token_budget=100, prefill_chunk=512)
    run.add(RequestParams(prompt=prompt(300), max_tokens=0))
    drain(run)
    plans = run.backend.plans  # type: ignore[attr-defined]
    assert [span.stop for plan in plans for span in plan.spans] == [64, 128, 192, 256, 300]


def test_requests_that_do_not_fit_wait_and_say_for_what() -> None:
    run = engine(blocks=15, max_sequences=2)
    for seed in range(3):
        run.add(RequestParams(prompt=prompt(600, seed), max_tokens=4))
    run.step()
    assert len(run.scheduler.running) == 1
    assert run.scheduler.waits_for == "blocks: needs 8, 7 are free"
    drain(run)
    few = engine(max_sequences=1)
    few.add(RequestParams(prompt=prompt(10), max_tokens=4))
    few.add(RequestParams(prompt=prompt(10), max_tokens=4))
    few.step()
    assert few.scheduler.waits_for == "a place: 1 of 1 sequences run"


def test_a_full_pool_preempts_the_youngest_which_ends_as_if_nothing_had_happened() -> None:
    run = engine(blocks=15, max_sequences=4)
    requests = [run.add(RequestParams(prompt=prompt(250, seed), max_tokens=400)) for seed in range(4)]
    events = drain(run)
    assert run.scheduler.counters.preemptions > 0
    assert requests[0].num_preemptions == 0
    for request in requests:
        assert tokens(events[request]) == continuation(request.params.prompt, 400)


def test_all_rows_cross_a_tile_edge_in_one_step_without_room_for_all() -> None:
    run = engine(blocks=15, slots=16, max_sequences=8)
    requests = [run.add(RequestParams(prompt=prompt(120, seed), max_tokens=150)) for seed in range(8)]
    events = drain(run)
    for request in requests:
        assert tokens(events[request]) == continuation(request.params.prompt, 150)


@pytest.mark.parametrize("preset", [SMALL, None])
@pytest.mark.parametrize("length", [64, 65, 128, 129, 192, 300, 320, 321])
def test_the_same_prompt_again_reuses_its_whole_tiles_and_computes_at_least_one_token(
    preset: Preset | None, length: int
) -> None:
    run = engine(preset)
    answers = []
    for _ in range(3):
        request = run.add(RequestParams(prompt=prompt(length), max_tokens=80))
        answers.append(tokens(drain(run)[request]))
    assert answers == [continuation(prompt(length), 80)] * 3
    g = run.scheduler.config.tile_tokens
    assert request.num_cached_tokens == (length - 1) // g * g


def test_a_prompt_that_begins_alike_reuses_the_shared_tiles_only() -> None:
    run = engine()
    first = prompt(400)
    drain_one = run.add(RequestParams(prompt=first, max_tokens=1))
    drain(run)
    other = run.add(RequestParams(prompt=(*first[:200], *prompt(200, 9)), max_tokens=5))
    events = drain(run)
    assert drain_one.num_cached_tokens == 0
    assert other.num_cached_tokens == 192
    assert tokens(events[other]) == continuation(other.params.prompt, 5)


def test_the_answer_is_reused_by_the_next_turn() -> None:
    run = engine()
    first = run.add(RequestParams(prompt=prompt(100), max_tokens=100))
    drain(run)
    second = run.add(RequestParams(prompt=(*first.tokens, *prompt(30, 5)), max_tokens=5))
    events = drain(run)
    assert second.num_cached_tokens == 192
    assert tokens(events[second]) == continuation(second.params.prompt, 5)


def test_running_requests_share_what_one_of_them_has_computed() -> None:
    run = engine()
    first = run.add(RequestParams(prompt=prompt(500), max_tokens=100))
    while first.num_generated_tokens < 5:
        run.step()
    held = run.scheduler.blocks.num_held
    second = run.add(RequestParams(prompt=prompt(500), max_tokens=100))
    run.step()
    assert second.num_cached_tokens == 448
    assert run.scheduler.blocks.num_held == held
    assert second.slots[0] == first.slots[0]
    assert second.slots[1] != first.slots[1]
    drain(run)
    assert second.answer == continuation(prompt(500), 100)


def test_old_prefixes_make_room_for_new_ones() -> None:
    run = engine(blocks=15, slots=4, max_sequences=1)
    for seed in range(12):
        request = run.add(RequestParams(prompt=prompt(500, seed), max_tokens=3))
        assert tokens(drain(run)[request]) == continuation(request.params.prompt, 3)
    assert len(run.scheduler.cache) <= 15 + 4


@pytest.mark.parametrize("preset", [SMALL, None])
@pytest.mark.parametrize("length", [1, 2, 64, 65, 66, 128, 129, 130, 300])
@pytest.mark.parametrize("places", [2, 8])
def test_several_answers_fork_from_one_computation_of_the_prompt(
    preset: Preset | None, length: int, places: int
) -> None:
    run = engine(preset, max_sequences=places)
    first = run.add(RequestParams(prompt=prompt(length), max_tokens=90, n=4))
    events = drain(run)
    assert sorted(request.choice for request in events) == [0, 1, 2, 3]
    assert {request.group for request in events} == {first.group}
    for request in events:
        assert tokens(events[request]) == continuation(prompt(length), 90)
    if places == 8:
        assert run.scheduler.counters.computed_tokens == length - 1 + 4 * 90
    assert run.bytes_held == 0


def test_choices_draw_different_random_numbers_and_repeat_them() -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    rows = [params.row([1, 2], [3], choice).uniform for choice in range(3)]
    assert len(set(rows)) == 3
    assert rows == [params.row([9], [8], choice).uniform for choice in range(3)]


@pytest.mark.parametrize("when", range(0, 14))
def test_a_request_can_be_cancelled_at_any_moment(when: int) -> None:
    run = engine(blocks=15, max_sequences=4)
    requests = [run.add(RequestParams(prompt=prompt(300, seed), max_tokens=30)) for seed in range(4)]
    events: dict[Request, list[Event]] = {}
    for step in range(10**6):
        if step == when:
            assert run.cancel(requests[1])
            assert not run.cancel(requests[1])
        if not run.scheduler.has_work:
            break
        for event in run.step():
            events.setdefault(event.request, []).append(event)
    for request in requests:
        if request is not requests[1]:
            assert tokens(events[request]) == continuation(request.params.prompt, 30)
    assert run.bytes_held == 0


def test_a_poisoned_tile_ends_its_request_and_no_other() -> None:
    run = Engine(
        FakeBackend(SMALL, poison=VOCAB + 1),
        EngineConfig(context=1024, prefill_chunk=128, max_sequences=3, blocks=64, slots=12),
    )
    good = [run.add(RequestParams(prompt=prompt(300, seed), max_tokens=40)) for seed in (1, 2)]
    bad = run.add(RequestParams(prompt=(*prompt(150), VOCAB + 1, *prompt(100)), max_tokens=40))
    events = drain(run)
    assert events[bad][-1].finish_reason == "error"
    assert "layer 1, kv head 0" in str(events[bad][-1].error)
    for request in good:
        assert tokens(events[request]) == continuation(request.params.prompt, 40)
    again = run.add(RequestParams(prompt=bad.params.prompt, max_tokens=4))
    assert again.num_cached_tokens == 0
    assert drain(run)[again][-1].finish_reason == "error", "a poisoned tile is never published"


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on() -> None:
    run = engine()
    request = run.add(RequestParams(prompt=prompt(20), max_tokens=5))
    working = run.backend.run

    def broken(plan: object) -> object:
        raise RuntimeError("out of memory")

    run.backend.run = broken  # type: ignore[method-assign,assignment]
    [event] = run.step()
    assert (event.request, event.finish_reason) == (request, "error")
    assert "out of memory" in str(event.error)
    run.backend.run = working  # type: ignore[method-assign]
    again = run.add(RequestParams(prompt=prompt(20), max_tokens=5))
    assert tokens(drain(run)[again]) == continuation(prompt(20), 5)


def test_scored_logits_come_once_even_when_the_request_is_preempted() -> None:
    run = engine(blocks=15, max_sequences=3, prefill_chunk=64)
    older = run.add(RequestParams(prompt=prompt(200), max_tokens=500))
    while older.num_generated_tokens < 200:
        run.step()
    scored = run.add(RequestParams(prompt=prompt(600, 2), max_tokens=0, return_logits=True))
    events = drain(run)[scored]
    rows = [int(row.argmax()) for event in events if event.logits is not None for row in event.logits]
    assert rows == [next_token(prompt(600, 2)[: i + 1]) for i in range(600)]


def test_times_and_counts_are_those_of_the_clock() -> None:
    run = engine()
    request = run.add(RequestParams(prompt=prompt(300), max_tokens=3))
    drain(run)
    times = request.times
    assert times.started is not None
    assert times.first_token is not None
    assert times.finished is not None
    assert times.arrived < times.started < times.first_token < times.finished


def test_a_pool_too_small_for_one_sequence_is_refused_with_the_numbers() -> None:
    with pytest.raises(CapacityError, match="1024 tokens needs 15 blocks, the pool has 14"):
        engine(blocks=14)


class Text:
    """A text stream that spells tokens as letters."""

    def add(self, token: int) -> str:
        return chr(ord("a") + token % 26)

    def finish(self) -> str:
        return ""


def test_a_stop_string_across_tokens_ends_the_answer_before_it() -> None:
    run = engine()
    expected = "".join(chr(ord("a") + token % 26) for token in continuation(prompt(30), 40))
    stop = expected[10:13]
    request = run.add(RequestParams(prompt=prompt(30), max_tokens=40, stop=(stop,), text=Text))
    events = drain(run)[request]
    assert "".join(event.text for event in events) == expected[: expected.index(stop)]
    assert events[-1].finish_reason == "stop"


class Machine(RuleBasedStateMachine):
    """Arrivals, steps and cancellations in any order over tiny pools, with and without a tier below them."""

    @initialize(
        preset=st.sampled_from([SMALL, None]),
        blocks=st.integers(5, 10),
        slots=st.integers(2, 9),
        places=st.integers(1, 5),
        chunk=st.sampled_from([1, 50, 64, 100, 200]),
        budget=st.integers(0, 200),
        pace=st.sampled_from([None, 0, 1, 3]),
    )
    def start(
        self, preset: Preset | None, blocks: int, slots: int, places: int, chunk: int, budget: int, pace: int | None
    ) -> None:
        backend = FakeBackend(preset)
        self.tier = None if pace is None else FakeTier(pace)
        if self.tier is not None:
            self.tier.backend = backend
        self.engine = Engine(
            backend,
            EngineConfig(
                context=384,
                prefill_chunk=chunk,
                token_budget=places + budget,
                max_sequences=places,
                blocks=blocks,
                slots=slots if preset else slots + 6,
            ),
            tier=self.tier or NO_TIER,
        )
        self.live: list[Request] = []
        self.events: dict[Request, list[Event]] = {}

    @rule(
        length=st.integers(1, 380),
        seed=st.integers(0, 2),
        tail=st.integers(0, 80),
        answer=st.integers(0, 150),
        n=st.integers(1, 3),
    )
    def arrive(self, length: int, seed: int, tail: int, answer: int, n: int) -> None:
        text = (*prompt(380, seed)[: max(length - tail, 0)], *prompt(length, seed + 7)[max(length - tail, 0) :])
        params = RequestParams(prompt=text[:380], max_tokens=answer, n=n if answer else 1)
        self.live.append(self.engine.add(params))

    @rule(steps=st.integers(1, 40))
    def advance(self, steps: int) -> None:
        for _ in range(steps):
            for event in self.engine.step():
                self.events.setdefault(event.request, []).append(event)

    @precondition(lambda self: self.tier is not None and self.tier.records)
    @rule(which=st.integers(0, 100), broken=st.booleans())
    def the_tier_loses_a_tile(self, which: int, broken: bool) -> None:
        assert self.tier is not None
        del self.tier.records[list(self.tier.records)[which % len(self.tier.records)]]
        self.tier.broken = broken

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        request = self.live[which % len(self.live)]
        for other in [*self.engine.scheduler.running, *self.engine.scheduler.waiting]:
            if other.group == request.group:
                assert self.engine.cancel(other)
        self.live.remove(request)
        for other in list(self.events):
            if other.group == request.group:
                del self.events[other]

    @invariant()
    def every_id_has_just_the_owners_that_hold_it(self) -> None:
        scheduler = self.engine.scheduler
        for pool, field in ((scheduler.blocks, "blocks"), (scheduler.slots, "slots")):
            owners = [index for request in scheduler.running for index in getattr(request, field)]
            assert all(pool.references(index) == owners.count(index) for index in range(pool.size))
        for request in scheduler.waiting:
            assert not request.blocks
            assert not request.slots
        private = [r.slots[1] for r in scheduler.running if scheduler.config.sealed and len(r.slots) > 1]
        assert len(private) == len(set(private)), "a tail is never shared"
        assert len(scheduler.running) <= scheduler.config.max_sequences

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(20_000):
            if not self.engine.scheduler.has_work:
                break
            self.advance(1)
        assert not self.engine.scheduler.has_work, "every request ends"
        assert self.engine.bytes_held == 0
        for request, events in self.events.items():
            wanted = min(request.params.max_tokens, 384 - request.num_prompt_tokens)
            assert tokens(events) == continuation(request.params.prompt, wanted)
            assert events[-1].finish_reason == "length"


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestMachine = Machine.TestCase
