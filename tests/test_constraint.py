"""An answer under a constraint: what its next token may be, how it ends, and that nothing else notices."""

from collections.abc import Iterable, Sequence

import pytest
from fake_backend import VOCAB, FakeBackend, next_token
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarn.constraint import Guide
from kvarn.engine import Engine, EngineConfig
from kvarn.errors import BackendError, ConstraintError, KvarnError
from kvarn.format import Preset
from kvarn.request import Event, Request, RequestParams
from kvarn.sampling import SamplingParams
from kvarn.step import SamplingRow, SpanOutput, StepPlan, StepResult

STOP = 5
STOPS = frozenset({STOP})


def mask(tokens: Iterable[int]) -> bytes:
    bits = bytearray(-(-VOCAB // 8))
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


def members(bits: bytes) -> set[int]:
    return {token for token in range(8 * len(bits)) if bits[token // 8] >> token % 8 & 1}


class Steps:
    """A grammar as a list: the tokens allowed at each place; complete after any number of tokens in `ends`."""

    def __init__(self, steps: Sequence[Iterable[int]], ends: Iterable[int] = (), fault: int | None = None) -> None:
        self.steps = [set(step) for step in steps]
        self.ends = {*ends, len(steps)}
        self.fault = fault
        self.tokens: list[int] = []

    def allowed(self) -> bytes:
        if len(self.tokens) == self.fault:
            raise ConstraintError("too much to follow")
        return mask(self.steps[len(self.tokens)] if len(self.tokens) < len(self.steps) else ())

    def accept(self, token: int) -> None:
        assert token in self.steps[len(self.tokens)]
        self.tokens.append(token)

    @property
    def may_end(self) -> bool:
        return len(self.tokens) in self.ends


# The guide.


def test_a_stop_token_is_allowed_exactly_where_the_grammar_may_end() -> None:
    guide = Guide(lambda: Steps([{1, STOP}, {2}, {3}], ends={1}), STOPS, ())
    assert members(guide.mask) == {1}
    guide.accept(1)
    assert members(guide.mask) == {2, STOP}
    guide.accept(2)
    assert members(guide.mask) == {3}
    guide.accept(3)
    assert guide.ended
    assert not guide.empty
    assert guide.mask == b""
    assert guide.error is None


def test_a_stop_token_is_not_told_to_the_grammar() -> None:
    made = Steps([{1}, {2}], ends={1})
    guide = Guide(lambda: made, STOPS, ())
    guide.accept(1)
    guide.accept(STOP)
    assert made.tokens == [1]
    assert guide.error is None


def test_a_grammar_of_the_empty_answer_is_empty() -> None:
    guide = Guide(lambda: Steps([]), STOPS, ())
    assert guide.empty
    guide.accept(7)  # whatever was sampled is no part of the answer
    assert guide.error is None


@pytest.mark.parametrize(
    ("constraint", "forbidden", "words"),
    [
        (Steps([set()], ends=()), (), "not complete"),
        (Steps([{1}], fault=0), (), "too much to follow"),
        (Steps([{1, 2}]), (1, 2, 90), "logit_bias forbids every token"),
    ],
)
def test_a_beginning_without_a_token_is_an_error(constraint: Steps, forbidden: tuple[int, ...], words: str) -> None:
    constraint.ends.discard(0)
    guide = Guide(lambda: constraint, STOPS, forbidden)
    assert isinstance(guide.error, ConstraintError)
    assert words in str(guide.error)
    guide.accept(1)
    assert words in str(guide.error)


def test_a_fault_of_the_maker_is_the_answers_own() -> None:
    def make() -> Steps:
        raise ZeroDivisionError("oh")

    error = Guide(make, STOPS, ()).error
    assert isinstance(error, ConstraintError)
    assert "ZeroDivisionError('oh')" in str(error)


def test_bits_beyond_the_mask_are_not_allowed_and_stop_tokens_there_do_no_harm() -> None:
    guide = Guide(lambda: Steps([{1}, {2}], ends={1}), frozenset({STOP, 5000}), (4000,))
    guide.accept(1)
    assert members(guide.mask) == {2, STOP}
    guide.accept(5000)
    assert isinstance(guide.error, BackendError)


def test_a_token_against_the_grammar_is_an_error() -> None:
    guide = Guide(lambda: Steps([{1}]), STOPS, ())
    guide.accept(2)
    assert isinstance(guide.error, BackendError)
    assert "token 2" in str(guide.error)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.sets(st.integers(0, VOCAB - 1).filter(lambda t: t != STOP), min_size=1), min_size=1, max_size=6),
    ends=st.sets(st.integers(0, 5)),
    data=st.data(),
)
def test_any_way_through_a_grammar(steps: list[set[int]], ends: set[int], data: st.DataObject) -> None:
    guide = Guide(lambda: Steps(steps, ends), STOPS, ())
    for i, allowed in enumerate(steps):
        assert members(guide.mask) == allowed | ({STOP} if i in ends else set())
        guide.accept(data.draw(st.sampled_from(sorted(allowed))))
    assert guide.ended
    assert guide.error is None


# In the engine.


def engine(backend: FakeBackend | None = None, **config: int) -> Engine:
    base = {"context": 1024, "prefill_chunk": 128, "max_sequences": 8, "blocks": 64, "slots": 48}
    return Engine(
        backend or FakeBackend(Preset(tile_tokens=64)),
        EngineConfig(**(base | config)),
        clock=iter(range(10**9)).__next__,
    )


def drain(run: Engine) -> dict[Request, list[Event]]:
    events: dict[Request, list[Event]] = {}
    while run.scheduler.has_work:
        for event in run.step():
            events.setdefault(event.request, []).append(event)
    return events


def tokens(events: list[Event]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def params(
    prompt: Sequence[int], steps: Sequence[Iterable[int]], *, fault: int | None = None, **more: int
) -> RequestParams:
    def make() -> Steps:
        return Steps(steps, fault=fault)

    kept = {"max_tokens": 500} | more
    return RequestParams(prompt=tuple(prompt), constraint=make, stop_token_ids=STOPS, **kept)  # type: ignore[arg-type]


def ways(seed: int, length: int) -> list[set[int]]:
    """Three tokens to choose from at each place."""
    return [{(seed * 31 + i * 7 + k * 13) % VOCAB for k in range(3)} - {STOP} for i in range(length)]


def test_an_answer_keeps_to_its_grammar_and_ends_with_it() -> None:
    run = engine()
    request = run.add(params([1, 2, 3], ways(1, 9)))
    events = drain(run)[request]
    answer = tokens(events)
    assert len(answer) == 9
    assert all(token in allowed for token, allowed in zip(answer, ways(1, 9), strict=True))
    assert events[-1].finish_reason == "stop"


def test_length_comes_after_stop_where_both_are_true() -> None:
    run = engine()
    exact, cut = run.add(params([1], ways(1, 9), max_tokens=9)), run.add(params([1], ways(1, 9), max_tokens=8))
    events = drain(run)
    assert events[exact][-1].finish_reason == "stop"
    assert events[cut][-1].finish_reason == "length"


def test_the_empty_answer_is_empty() -> None:
    run = engine()
    request = run.add(params([1], []))
    events = drain(run)[request]
    assert tokens(events) == []
    assert events[-1].finish_reason == "stop"


def test_mixed_rows_preempted_or_not_get_what_they_get_alone() -> None:
    """A pool that is too small makes answers start over; their grammars do not, and lose nothing."""
    jobs = [params([n], ways(n, 200)) for n in range(1, 5)]
    jobs += [RequestParams(prompt=(n,), max_tokens=200) for n in range(5, 9)]
    alone = []
    for job in jobs:
        run = engine()
        request = run.add(job)
        alone.append(tokens(drain(run)[request]))
    for small in ({}, {"blocks": 15, "slots": 16, "token_budget": 136}):
        run = engine(**small)
        requests = [run.add(job) for job in jobs]
        events = drain(run)
        assert [tokens(events[request]) for request in requests] == alone
        assert (sum(request.num_preemptions for request in requests) > 0) == bool(small)


def test_each_of_several_answers_has_a_grammar_of_its_own() -> None:
    run = engine(max_sequences=3)  # the others wait, and compute the prompt themselves
    made: list[Steps] = []

    def make() -> Steps:
        made.append(Steps(ways(3, 20)))
        return made[-1]

    run.add(RequestParams(prompt=tuple(range(70)), max_tokens=100, n=5, constraint=make))
    events = drain(run)
    assert len(events) == len(made) == 5
    assert sorted(tokens(x) for x in events.values()) == sorted(grammar.tokens for grammar in made)
    assert all(len(grammar.tokens) == 20 for grammar in made)


def test_a_grammar_that_fails_ends_its_answer_and_no_other() -> None:
    run = engine()
    bad = run.add(params([1], ways(1, 9), fault=4))
    good = run.add(params([2], ways(2, 9)))
    plain = run.add(RequestParams(prompt=(3,), max_tokens=20))
    events = drain(run)
    assert isinstance(events[bad][-1].error, ConstraintError)
    assert events[bad][-1].finish_reason == "error"
    assert len(tokens(events[bad])) == 3
    assert len(tokens(events[good])) == 9
    history = [3]
    for _ in range(20):
        history.append(next_token(history))
    assert tokens(events[plain]) == history[1:]
    assert run.bytes_held == 0


def test_a_grammar_that_allows_no_beginning_is_refused_at_once() -> None:
    run = engine()
    with pytest.raises(ConstraintError, match="too much to follow"):
        run.add(params([1], ways(1, 9), fault=0))
    assert not run.scheduler.has_work


def test_a_fork_whose_grammar_cannot_be_made_ends_alone() -> None:
    run = engine()
    left = [1]

    def make() -> Steps:
        if not left:
            raise KvarnError("no memory for a grammar")
        left.pop()
        return Steps(ways(1, 9))

    run.add(RequestParams(prompt=(1, 2), max_tokens=100, n=2, constraint=make))
    events = {request.choice: own for request, own in drain(run).items()}
    assert len(tokens(events[0])) == 9
    assert str(events[1][-1].error) == "no memory for a grammar"
    assert tokens(events[1]) == []


def test_a_bias_that_forbids_what_a_grammar_asks_for_is_an_error_when_it_comes_to_that() -> None:
    run = engine()
    request = run.add(
        RequestParams(
            prompt=(1,),
            max_tokens=100,
            constraint=lambda: Steps([{1, 2}, {3}]),
            sampling=SamplingParams(logit_bias={3: -100.0, 1: -99.0}),
        )
    )
    events = drain(run)[request]
    assert "logit_bias" in str(events[-1].error)
    assert tokens(events) == []


class Deaf(FakeBackend):
    """Samples without looking at the mask, as one would whose logits are not finite."""

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        outputs = [SpanOutput(token=96, logprob=-1.0) if x.token is not None else x for x in result.outputs]
        return StepResult(outputs=tuple(outputs), failures=result.failures)


def test_a_token_against_the_grammar_never_comes_out() -> None:
    run = engine(Deaf(Preset(tile_tokens=64)))
    request = run.add(params([1], [{2, 3}]))
    events = drain(run)[request]
    assert tokens(events) == []
    assert isinstance(events[-1].error, BackendError)


def test_the_mask_goes_into_the_row_and_only_there() -> None:
    allowed = mask({1, 2})
    row = SamplingParams(temperature=1.0, seed=4).row((1,), (2,), 0, allowed)
    assert row.allowed == allowed
    assert row.uniform == SamplingParams(temperature=1.0, seed=4).row((1,), (2,)).uniform
    assert SamplingRow().allowed is None
