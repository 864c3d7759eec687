"""Sixteen requests that ask for different things, in one batch: each gets exactly what it gets alone."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from json_answers import is_valid
from small_models import build

from kvarn.backend import Backend
from kvarn.engine import Engine, EngineConfig
from kvarn.request import Event, Request, RequestParams
from kvarn.sampling import SamplingParams
from kvarn.serve.structured import Structured
from kvarn.serve.tokenizer import Tokenizer
from kvarn.serve.toolcalls.grammar import Marks, Signature, calls
from kvarn.serve.toolcalls.syntax import JsonCalls

VOCAB = 49_152 + 64  # the demo's tokens, and rows of padding that no token has
END = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", 3, None]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "number"}]}, "minItems": 2, "maxItems": 4}
REGEX = r"[a-f]{4,8}(-[0-9]{2}){2}"
GRAMMAR = 'start: ("yes" | "no") ", " word\nword: /[a-z]{3,6}/'
CALLS = JsonCalls(begin="<call>", end="</call>")


@dataclass(frozen=True)
class Row:
    """One request, and whether a text is what it asked for."""

    params: RequestParams
    fits: Callable[[str], bool] = bool


def build_model(folder: Path) -> Path:
    """A small llama with random weights and the demo's vocabulary, as sure of its tokens as a real model.

    Batches of another size round otherwise. Where 50,000 tokens are about as probable, that moves two neighbours in the
    order in which they stand, and a draw between them.
    """
    model = build(folder, "llama", vocab_size=VOCAB, hidden_size=64, num_key_value_heads=2, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    model.save_pretrained(folder)
    return folder


def rows(tokenizer: Tokenizer) -> list[Row]:
    """Schemas, a regular expression, a grammar, calls, penalties, seeds, biases, log-probabilities, and nothing."""
    structured = Structured(tokenizer, VOCAB)
    person, array = structured.json_schema(PERSON), structured.json_schema(LIST)
    regex, grammar = structured.regex(REGEX), structured.grammar(GRAMMAR)
    tools = [Signature(name="keep", parameters=PERSON, strict=True)]
    call = structured.lark(calls(CALLS, tools, Marks(special={}), several=False))
    is_person, is_list = partial(is_valid, PERSON), partial(is_valid, LIST)
    is_code, is_said = partial(matches, REGEX), partial(matches, "(yes|no), [a-z]{3,6}")

    def row(at: int, constraint: Any = None, fits: Callable[[str], bool] = bool, **sampling: Any) -> Row:
        length = (3, 70, 20, 129)[at % 4]
        prompt = tuple(np.random.default_rng(at).integers(3, 49_000, length).tolist())
        params = RequestParams(
            prompt=prompt,
            max_tokens=200 if constraint else 40,
            sampling=SamplingParams(**sampling),
            stop_token_ids=frozenset({END}),
            text=tokenizer.stream,
            constraint=constraint,
        )
        return Row(params, fits)

    return [
        row(0),
        row(1, person, is_person),
        row(2, temperature=1.0, seed=7),
        row(3, regex, is_code, temperature=1.5, seed=3),
        row(4, repetition_penalty=1.3, frequency_penalty=0.5),
        row(5, array, is_list, temperature=1.0, seed=5, logprobs=3),
        row(6, call, is_call, temperature=1.0, seed=4, logprobs=5),
        row(7, grammar, is_said, temperature=0.7, seed=9, top_p=0.9),
        row(8, person, is_person, temperature=1.0, seed=1, presence_penalty=1.0, frequency_penalty=0.3),
        row(9, temperature=0.8, seed=2, top_k=20, min_p=0.01),
        row(10, regex, is_code, repetition_penalty=1.5),
        row(11, person, is_person, temperature=1.0, seed=2, logit_bias={tokenizer.encode_more("9")[0]: 4.0}),
        row(12, logit_bias={500: 12.0}),
        row(13, call, is_call, frequency_penalty=0.2),
        row(14, grammar, is_said, logprobs=2),
        row(15, temperature=1.0, seed=8, presence_penalty=0.5, logprobs=1),
    ]


def matches(pattern: str, text: str) -> bool:
    """Whether a text matches as a whole."""
    return re.fullmatch(pattern, text) is not None


def is_call(text: str) -> bool:
    """Whether a text is one call of the tool, with arguments that fit."""
    found = re.fullmatch("<call>(.*)</call>", text)
    called = json.loads(found[1]) if found else {}
    return called.get("name") == "keep" and is_valid(PERSON, json.dumps(called["arguments"]))


def assert_mixed_rows_get_what_they_get_alone(backend: Backend, tokenizer: Tokenizer) -> None:
    """In one batch, where all run at once, and in one so small that some wait."""
    asked = rows(tokenizer)
    assert len(asked) == 16
    alone = [answers(backend, [row.params])[0] for row in asked]
    for row, events in zip(asked, alone, strict=True):
        text = "".join(event.text for event in events)
        assert row.fits(text), text
        assert events[-1].finish_reason == ("stop" if row.params.constraint else "length")
    for places in (16, 5):
        together = answers(backend, [row.params for row in asked], places)
        for want, got in zip(alone, together, strict=True):
            assert [event.token for event in got] == [event.token for event in want]
            assert [event.text for event in got] == [event.text for event in want]
            assert got[-1].finish_reason == want[-1].finish_reason
            for x, y in zip(got, want, strict=True):
                assert [token for token, _ in x.top_logprobs] == [token for token, _ in y.top_logprobs]
                if y.logprob is not None:
                    np.testing.assert_allclose(x.logprob, y.logprob, rtol=1e-3)


def answers(backend: Backend, asked: Sequence[RequestParams], places: int = 1) -> list[list[Event]]:
    """Run requests to their ends; the events of each that brought a token, text or the end."""
    run = Engine(backend, EngineConfig(context=512, prefill_chunk=64, max_sequences=places, blocks=80, slots=80))
    requests = [run.add(params) for params in asked]
    events: dict[Request, list[Event]] = {request: [] for request in requests}
    while run.scheduler.has_work:
        for event in run.step():
            assert event.error is None, event.error
            if event.token is not None or event.finish_reason is not None:
                events[event.request].append(event)
    assert run.bytes_held == 0
    return [events[request] for request in requests]
