"""Many requests on the real model: each gets the text that it gets alone, whatever runs beside it."""

import random
from pathlib import Path

import pytest

from kvarn.engine import Engine, EngineConfig
from kvarn.format import Preset
from kvarn.request import Request, RequestParams
from kvarn.sampling import SamplingParams

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvarn.backend import LoadOptions  # noqa: E402
from kvarn.backends.triton.backend import TorchBackend, load  # noqa: E402
from kvarn.serve.tokenizer import Tokenizer  # noqa: E402

QUESTIONS = [
    "What is the capital of {}?",
    "Name three rivers in {}.",
    "Write a short poem about {}.",
    "Is {} larger than Portugal? Explain why.",
]
PLACES = ["France", "Japan", "Brazil", "Kenya", "Canada", "India", "Egypt", "Peru"]


@pytest.fixture(scope="module")
def backend(demo_dir: Path) -> TorchBackend:
    return load(demo_dir, Preset(tile_tokens=64), LoadOptions(dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def requests(demo_dir: Path) -> list[RequestParams]:
    """32 requests of mixed lengths: some longer than several tiles, some that begin alike, some sampled."""
    tokenizer = Tokenizer(demo_dir)
    made = []
    for i in range(32):
        question = QUESTIONS[i % 4].format(PLACES[i // 4])
        if i % 5 == 0:
            question = "Read this list of numbers: " + " ".join(map(str, range(15 * (i // 5 + 1)))) + ". " + question
        sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=i) if i % 4 == 3 else SamplingParams()
        ids = tokenizer.encode_chat([{"role": "user", "content": question}])
        made.append(RequestParams(prompt=tuple(ids), max_tokens=8 + i % 7, sampling=sampling))
    return made


def run(
    backend: TorchBackend, params: list[RequestParams], places: int, cancel_longest: bool = False
) -> list[list[int]]:
    """The answers of all requests through one engine."""
    engine = Engine(
        backend,
        EngineConfig(context=1024, max_sequences=places, prefill_chunk=128, blocks=15 * places, slots=3 * places),
    )
    live = [engine.add(p) for p in params]
    steps = 0
    while engine.scheduler.has_work:
        engine.step()
        steps += 1
        if cancel_longest and steps == 12:
            longest = max(engine.scheduler.running, key=lambda request: request.num_computed_tokens)
            assert engine.cancel(longest)
    assert engine.bytes_held == 0
    return [request.answer for request in live]


@pytest.fixture(scope="module")
def alone(backend: TorchBackend, requests: list[RequestParams]) -> list[list[int]]:
    return [run(backend, [params], places=1)[0] for params in requests]


@pytest.mark.parametrize("order", ["as made", "reversed", "shuffled"])
def test_eight_at_a_time_give_each_request_what_it_gets_alone(
    backend: TorchBackend, requests: list[RequestParams], alone: list[list[int]], order: str
) -> None:
    indices = list(range(len(requests)))
    if order == "reversed":
        indices.reverse()
    if order == "shuffled":
        random.Random(4).shuffle(indices)
    got = run(backend, [requests[i] for i in indices], places=8)
    assert got == [alone[i] for i in indices]


def test_removing_the_longest_row_leaves_the_others_as_they_were(
    backend: TorchBackend, requests: list[RequestParams], alone: list[list[int]]
) -> None:
    got = run(backend, requests[:12], places=8, cancel_longest=True)
    different = [i for i in range(12) if got[i] != alone[i]]
    assert len(different) == 1, "the cancelled one, and no other"
    [cancelled] = different
    assert got[cancelled] == alone[cancelled][: len(got[cancelled])]


def test_several_answers_of_one_prompt_are_those_of_its_seeds(
    backend: TorchBackend, requests: list[RequestParams]
) -> None:
    prompt = requests[0].prompt
    sampling = SamplingParams(temperature=1.0, seed=11)
    engine = Engine(backend, EngineConfig(context=1024, max_sequences=4, blocks=60, slots=12))
    engine.add(RequestParams(prompt=prompt, max_tokens=10, n=4, sampling=sampling))
    seen: dict[int, Request] = {}
    while engine.scheduler.has_work:
        for event in engine.step():
            seen[event.request.choice] = event.request
    assert len({tuple(request.answer) for request in seen.values()}) == 4
    first = run(backend, [RequestParams(prompt=prompt, max_tokens=10, sampling=sampling)], places=1)
    assert seen[0].answer == first[0]
