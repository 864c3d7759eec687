"""Calls from many threads, cancelled or shut down at any moment, each with its own events."""

import random
import threading
from collections.abc import Iterator

import pytest
from fake_backend import VOCAB, FakeBackend, next_token

from kvarn.engine import Engine, EngineConfig
from kvarn.errors import BackendError, ContextOverflowError, KvarnError
from kvarn.format import Preset
from kvarn.request import Event, RequestParams, TextStream
from kvarn.runner import Call, Runner


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB), k=length))


def continuation(tokens: tuple[int, ...], count: int) -> list[int]:
    history = list(tokens)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(tokens) :]


def engine(places: int = 4) -> Engine:
    config = EngineConfig(context=1024, prefill_chunk=128, max_sequences=places, blocks=40, slots=20)
    return Engine(FakeBackend(Preset(tile_tokens=64), poison=VOCAB + 1), config)


@pytest.fixture
def runner() -> Iterator[Runner]:
    run = Runner(engine())
    yield run
    assert run.shutdown(drain=False, timeout=10)


def answers(call: Call) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for event in call:
        tokens = out.setdefault(event.request.choice, [])
        if event.token is not None:
            tokens.append(event.token)
    return out


def test_every_thread_gets_its_own_answer(runner: Runner) -> None:
    results: dict[int, dict[int, list[int]]] = {}

    def ask(seed: int) -> None:
        results[seed] = answers(runner.submit(RequestParams(prompt=prompt(20 * seed + 1, seed), max_tokens=60, n=2)))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for seed in range(12):
        want = continuation(prompt(20 * seed + 1, seed), 60)
        assert results[seed] == {0: want, 1: want}


def test_a_cancelled_call_ends_and_frees_what_it_held(runner: Runner) -> None:
    call = runner.submit(RequestParams(prompt=prompt(300), max_tokens=700, n=3))
    events = iter(call)
    next(events)
    call.cancel()
    call.cancel()
    rest = list(events)
    assert sum(event.finish_reason == "cancelled" for event in rest) == 3
    again = answers(runner.submit(RequestParams(prompt=prompt(30, 2), max_tokens=5)))
    assert again == {0: continuation(prompt(30, 2), 5)}
    assert runner._engine.bytes_held == 0


def test_what_is_wrong_with_a_call_is_said_at_once(runner: Runner) -> None:
    with pytest.raises(ContextOverflowError, match=r"2000 tokens.*1024"):
        runner.submit(RequestParams(prompt=prompt(2000), max_tokens=5))


def test_an_error_of_one_call_is_its_own(runner: Runner) -> None:
    good = runner.submit(RequestParams(prompt=prompt(200), max_tokens=50))
    bad = runner.submit(RequestParams(prompt=(*prompt(100), VOCAB + 1, *prompt(100)), max_tokens=50))
    assert list(bad)[-1].finish_reason == "error"
    assert answers(good) == {0: continuation(prompt(200), 50)}


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    run = Runner(engine(places=1))
    calls = [run.submit(RequestParams(prompt=prompt(100, seed), max_tokens=200)) for seed in range(3)]
    assert run.shutdown(drain=True, timeout=60)
    with pytest.raises(BackendError, match="shutting down"):
        run.submit(RequestParams(prompt=prompt(10), max_tokens=5))
    for seed, call in enumerate(calls):
        assert answers(call) == {0: continuation(prompt(100, seed), 200)}


def test_stopping_cancels_what_runs_and_what_waits() -> None:
    run = Runner(engine(places=1))
    calls = [run.submit(RequestParams(prompt=prompt(100, seed), max_tokens=900)) for seed in range(3)]
    assert run.shutdown(drain=False, timeout=60)
    for call in calls:
        assert list(call)[-1].finish_reason == "cancelled"


def test_a_fault_of_the_engine_leaves_nobody_waiting() -> None:
    broken = engine()
    broken.step = lambda: [][0]  # type: ignore[method-assign,misc]
    run = Runner(broken)
    call = run.submit(RequestParams(prompt=prompt(10), max_tokens=5))
    with pytest.raises(BackendError, match="the engine stopped: IndexError"):
        list(call)
    run._thread.join(10)
    with pytest.raises(BackendError, match="the engine stopped"):
        run.submit(RequestParams(prompt=prompt(10), max_tokens=5))


def test_events_go_to_a_callback_on_the_engines_thread(runner: Runner) -> None:
    got: list[Event | KvarnError] = []
    threads: set[str] = set()
    done = threading.Event()

    def on_event(event: Event | KvarnError) -> None:
        got.append(event)
        threads.add(threading.current_thread().name)
        if isinstance(event, KvarnError) or event.finish_reason is not None:
            done.set()

    runner.submit(RequestParams(prompt=prompt(70), max_tokens=20), on_event=on_event)
    assert done.wait(10)
    tokens = [event.token for event in got if isinstance(event, Event) and event.token is not None]
    assert tokens == continuation(prompt(70), 20)
    assert threads == {"kvarn-engine"}


def test_a_call_that_cannot_start_fails_alone(runner: Runner) -> None:
    def broken() -> TextStream:
        raise ValueError("no stream")

    bad = runner.submit(RequestParams(prompt=prompt(10), max_tokens=5, text=broken))
    with pytest.raises(BackendError, match="no stream"):
        list(bad)
    bad.cancel()
    assert answers(runner.submit(RequestParams(prompt=prompt(10), max_tokens=5))) == {0: continuation(prompt(10), 5)}


def test_a_fault_of_the_engine_is_told_after_every_call_knows() -> None:
    broken = engine()
    broken.step = lambda: [][0]  # type: ignore[method-assign,misc]
    order: list[str] = []
    told = threading.Event()

    def on_fault(error: KvarnError) -> None:
        order.append(f"fault {error}")
        told.set()

    run = Runner(broken, on_fault=on_fault)
    run.submit(RequestParams(prompt=prompt(10), max_tokens=5), on_event=lambda event: order.append("call"))
    assert told.wait(10)
    assert order == ["call", "fault the engine stopped: IndexError: list index out of range"]
    quiet = Runner(engine(), on_fault=on_fault)
    assert quiet.shutdown(drain=True, timeout=10)
    assert len(order) == 2
