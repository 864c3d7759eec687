"""Answers under schemas, regular expressions and grammars, drawn at random and by the demo model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from grammar_walk import END, VOCAB, Walker, allowed_ids, closes, is_space
from json_answers import is_valid, load
from schema_maker import FORMATS, SchemaMaker, closed, keywords

from kvarn.backend import LoadOptions
from kvarn.backends.triton.backend import load as load_backend
from kvarn.engine import Engine, EngineConfig
from kvarn.errors import UsageError
from kvarn.request import Event, Request, RequestParams
from kvarn.serve.schemas import check_schema
from kvarn.serve.structured import Structured, json_rule, literal, special
from kvarn.serve.tokenizer import Tokenizer

ENFORCED = {
    *("type", "const", "enum", "required", "$ref", "$defs", "properties", "patternProperties", "additionalProperties"),
    *("minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems", "anyOf", "oneOf", "allOf"),
    *("minLength", "maxLength", "pattern", "format", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
SCHEMAS = 200


@pytest.fixture(scope="module")
def tokenizer(demo_dir: Path) -> Tokenizer:
    return Tokenizer(demo_dir)


@pytest.fixture(scope="module")
def structured(tokenizer: Tokenizer) -> Structured:
    return Structured(tokenizer, VOCAB)


@pytest.fixture(scope="module")
def walker(tokenizer: Tokenizer) -> Walker:
    return Walker(tokenizer, closes, 0.3)


def test_every_finished_answer_to_two_hundred_generated_schemas_validates(
    structured: Structured, walker: Walker
) -> None:
    finished, seen = 0, set()
    for seed in range(SCHEMAS):
        schema = SchemaMaker(seed).make()
        seen |= keywords(schema)
        text = walker.answer(structured.json_schema(schema), seed)
        if text is not None:
            finished += 1
            assert is_valid(schema, text), (seed, text, schema)
    assert seen >= ENFORCED
    assert finished >= 0.9 * SCHEMAS


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_a_format_are_of_that_format(structured: Structured, walker: Walker, name: str) -> None:
    schema = {"type": "string", "format": name, "maxLength": 60}
    make = structured.json_schema(schema)
    texts = {walker.answer(make, seed) for seed in range(60)}
    assert len(texts) >= 30
    for text in texts:
        assert text is not None
        assert is_valid(schema, text), text


@pytest.mark.parametrize(("name", "bits"), [("int32", 31), ("int64", 63)])
def test_integers_of_a_format_fit(structured: Structured, walker: Walker, name: str, bits: int) -> None:
    make = structured.json_schema({"type": "integer", "format": name})
    numbers = [int(text) for seed in range(300) if (text := walker.answer(make, seed)) is not None]
    assert len(numbers) > 200
    assert all(-(2**bits) <= number < 2**bits for number in numbers)
    assert max(numbers) > 2 ** (bits - 20)


@pytest.mark.parametrize(
    ("bounds", "inside"),
    [
        ({"exclusiveMinimum": 40, "exclusiveMaximum": 40.5}, (40, 40.5)),
        ({"exclusiveMinimum": 99, "maximum": 99.01}, (99, 99.02)),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, (0, 0.51)),
        ({"exclusiveMinimum": -40.5, "exclusiveMaximum": -40}, (-40.5, -40)),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, (-0.51, 0)),
        ({"allOf": [{"exclusiveMinimum": 7}, {"maximum": 7.25}]}, (7, 7.26)),
    ],
)
def test_an_exclusive_bound_is_never_reached(
    structured: Structured, walker: Walker, bounds: dict[str, Any], inside: tuple[float, float]
) -> None:
    make = structured.json_schema({"type": "number", **bounds})
    numbers = [float(text) for seed in range(100) if (text := walker.answer(make, seed)) is not None]
    assert len(numbers) > 50
    assert all(inside[0] < number < inside[1] for number in numbers)


def test_a_model_that_likes_white_space_ends_its_answer(structured: Structured, tokenizer: Tokenizer) -> None:
    schema = closed({"a": {"type": "integer", "maximum": 9}, "b": {"type": "array", "items": {"type": "null"}}})
    spacious = Walker(tokenizer, is_space, 1.0)
    make = structured.json_schema(schema | {"properties": schema["properties"] | {"b": {"const": [1, {"c": None}]}}})
    for seed in range(10):
        text = spacious.answer(make, seed)
        assert text is not None
        assert re.fullmatch(r'\{"a": ?-?[0-9]+, ?"b": ?\[1, ?\{"c": ?null\}\]\}', text), text
    free = spacious.answer(structured.json_object(), 0)
    assert free is None or not re.search(r"\s{2}", re.sub(r'"(?:[^"\\]|\\.)*"', '""', free))


def test_any_object_is_an_object(structured: Structured, walker: Walker) -> None:
    texts = [walker.answer(structured.json_object(), seed) for seed in range(20)]
    finished = [load(text) for text in texts if text is not None]
    assert len(finished) >= 10
    assert all(isinstance(value, dict) for value in finished)
    assert any(finished)


@pytest.mark.parametrize(
    "pattern",
    [r"[a-f]{4,8}(-[0-9]{2}){2}", "(yes|no)( indeed)?", r"[^a-z\\]/[0-9]+", "naïve|日本", r"\[x\]\n\.", "a|b|"],
)
def test_a_regular_expression_matches_the_whole_answer(structured: Structured, walker: Walker, pattern: str) -> None:
    make = structured.regex(pattern)
    for seed in range(20):
        text = walker.answer(make, seed)
        assert text is not None
        assert re.fullmatch(pattern, text), text


def test_a_grammar_with_rules_and_recursion(structured: Structured, walker: Walker) -> None:
    make = structured.grammar('start: sum\nsum: term ("+" term)*\nterm: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,2}/')
    texts = [walker.answer(make, seed) for seed in range(20)]
    finished = [text for text in texts if text is not None]
    assert len(finished) >= 15
    for text in finished:
        assert re.fullmatch(r"[(]*[0-9]{1,2}([)]*[+][(]*[0-9]{1,2})*[)]*", text)
        assert text.count("(") == text.count(")")


def test_text_is_free_until_a_trigger_asks_for_something(structured: Structured, walker: Walker) -> None:
    schema = closed({"n": {"type": "integer", "minimum": 0, "maximum": 9}})
    rule = f"start: head call\nhead[suffix={literal('<call>')}]: /[a-z ]{{0,20}}/\ncall: {json_rule(schema)}"
    make = structured.lark(rule)
    for seed in range(20):
        text = walker.answer(make, seed)
        assert text is not None
        free, _, call = text.partition("<call>")
        assert re.fullmatch("[a-z ]{0,20}", free)
        assert is_valid(schema, call)


def test_tokens_of_no_text_are_allowed_only_by_name(structured: Structured, tokenizer: Tokenizer) -> None:
    first = set(allowed_ids(structured.regex(r"(?s:.)*")().allowed()))
    assert len(first) > 49_000
    assert max(first) < VOCAB - 64
    assert not any(tokenizer.is_special(int(token)) for token in first)
    (start,) = tokenizer.encode("<|im_start|>")
    assert tokenizer.is_special(start)
    named = structured.lark(f'start: {special(start)} "a"')()
    assert list(allowed_ids(named.allowed())) == [start]
    named.accept(start)
    assert not named.may_end
    assert all(tokenizer.token_bytes(int(token)) == b"a" for token in allowed_ids(named.allowed()))


def test_answers_from_one_maker_do_not_share_their_state(structured: Structured) -> None:
    make = structured.regex("ab")
    one, other = make(), make()
    before = other.allowed()
    one.accept(int(allowed_ids(one.allowed())[0]))
    assert other.allowed() == before
    assert make().allowed() == before


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (False, "accepts nothing"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum (3) is greater than maximum (2)"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "Regex is empty"),
        ({"enum": []}, "is empty"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "cannot be"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "anyOf"),
    ],
)
def test_a_schema_that_cannot_be_met_is_refused_at_once(structured: Structured, schema: Any, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        structured.json_schema(schema)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda s: s.regex("("), "unclosed group"),
        (lambda s: s.regex(""), "is empty"),
        (lambda s: s.regex("()"), "nothing but the empty answer"),
        (lambda s: s.grammar('root ::= "a"'), "GBNF"),
        (lambda s: s.grammar("start: other"), "other"),
        (lambda s: s.grammar('x: "a"'), "start"),
        (lambda s: s.grammar("start: a\n" + "a: /b/\n" * 1001), "1000 lines"),
    ],
)
def test_a_pattern_or_a_grammar_that_is_wrong_is_refused_at_once(structured: Structured, make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        make(structured)


def test_the_demo_model_fills_in_schemas(tokenizer: Tokenizer, structured: Structured, demo_dir: Path) -> None:
    name = {"type": "string", "maxLength": 20}
    asked: list[tuple[str, Any]] = [
        ("Describe a cat as JSON.", closed({"name": name, "age": {"type": "integer", "minimum": 0, "maximum": 30}})),
        ("Is Paris in France?", {"enum": ["yes", "no"]}),
        ("List three colours.", {"type": "array", "items": {"enum": ["red", "green", "blue", "grey"]}, "minItems": 3,
                                 "maxItems": 3}),
        ("When was the French revolution?", closed({"day": {"type": "string", "format": "date"}})),
        ("Name a town or a number.", {"anyOf": [closed({"town": name}), closed({"number": {"type": "integer",
                                                                                         "maximum": 10**6}})]}),
    ]  # fmt: skip
    backend = load_backend(demo_dir, None, LoadOptions(dtype="float32", device="cpu"))
    engine = Engine(backend, EngineConfig(context=256, prefill_chunk=128, max_sequences=5, blocks=20, slots=20))
    requests = {}
    for question, schema in asked:
        prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
        params = RequestParams(
            prompt=tuple(prompt),
            max_tokens=80,
            stop_token_ids=frozenset({END}),
            text=tokenizer.stream,
            constraint=structured.json_schema(schema),
        )
        requests[engine.add(params)] = schema
    texts = dict.fromkeys(requests, "")
    reasons: dict[Request, str | None] = {}
    while engine.scheduler.has_work:
        for event in engine.step():
            _take(event, texts, reasons)
    assert set(reasons.values()) == {"stop"}
    for request, schema in requests.items():
        assert is_valid(schema, texts[request]), texts[request]


def _take(event: Event, texts: dict[Request, str], reasons: dict[Request, str | None]) -> None:
    assert event.error is None, event.error
    texts[event.request] += event.text
    if event.finish_reason is not None:
        reasons[event.request] = event.finish_reason


def test_the_rule_of_a_schema_is_one_line(structured: Structured) -> None:
    rule = json_rule({"type": "string", "pattern": "a\nb", "title": "not\nneeded"})
    assert "\n" not in rule
    assert "title" not in rule
    assert json.loads(rule.removeprefix("%json "))["pattern"] == check_schema({"pattern": "a\nb"})["pattern"]
