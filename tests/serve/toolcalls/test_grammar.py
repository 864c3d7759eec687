"""What may be written under a grammar of calls: what the template itself writes, and nothing that the reader loses."""

import dataclasses
import json
import random
from typing import Any

import pytest
from chat_templates import PLAIN, TEMPLATES, TemplateText
from json_answers import is_valid
from scripted import character_tokenizer
from tool_answers import call, calls_of, collected, read, reader, said

from kvarn.constraint import ConstraintMaker
from kvarn.errors import UsageError
from kvarn.serve.http.parts import Text
from kvarn.serve.structured import Structured
from kvarn.serve.tokenizer import Tokenizer
from kvarn.serve.toolcalls.grammar import Marks, Signature, calls, no_calls, text_or_calls, thought
from kvarn.serve.toolcalls.learn import ChatFormat, learn
from kvarn.serve.toolcalls.syntax import JsonCalls, PythonCalls, TaggedCalls, ThoughtMarks

ALL = {name: TemplateText(text) for name, text in (TEMPLATES | {"plain": PLAIN}).items()}
SPECIAL = [
    *("<|tool_call_start|>", "<|tool_call_end|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|python_tag|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"], "type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "at": {"type": "array", "items": {"$ref": "#/$defs/hour"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "$defs": {"hour": {"enum": [1, 2, 3]}},
    "additionalProperties": False,
}
FUNCTIONS = [
    Signature(name="look", parameters=LOOK, strict=True),
    Signature(name="wait", parameters={}, strict=False),
]
SCALARS = {**LOOK, "properties": {name: x for name, x in LOOK["properties"].items() if name != "at"}}
SCHEMAS = {function.name: function.parameters for function in FUNCTIONS}
ANSWERS: list[tuple[str, Any]] = [
    ("look", {"city": "Köln", "unit": "C", "days": 3, "at": [1, 2]}),
    ("look", {"city": "", "days": 0}),
    ("wait", {}),
]


def functions_of(name: str) -> list[Signature]:
    """Gemma's own notation is enforced for strings, numbers and booleans alone."""
    look, wait = FUNCTIONS
    return [dataclasses.replace(look, parameters=SCALARS), wait] if name == "gemma" else FUNCTIONS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return character_tokenizer(tmp_path_factory.mktemp("characters"), PLAIN, special=SPECIAL, added=ADDED)


@pytest.fixture(scope="module")
def structured(tokenizer: Tokenizer) -> Structured:
    return Structured(tokenizer, len(tokenizer._inner))


@pytest.fixture(scope="module")
def marks(tokenizer: Tokenizer) -> Marks:
    return Marks(special=tokenizer.special_tokens)


def allowed(mask: bytes) -> list[int]:
    return [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]


def fits(tokenizer: Tokenizer, make: ConstraintMaker, text: str) -> bool:
    """Whether a text is a whole answer under a constraint."""
    constraint = make()
    for token in tokenizer.encode_more(text):
        if token not in allowed(constraint.allowed()):
            return False
        constraint.accept(token)
    return constraint.may_end


def drawn(tokenizer: Tokenizer, make: ConstraintMaker, seed: int) -> str:
    """A whole answer that a constraint allows, drawn with a liking for its end; empty if it does not come to one."""
    chance, constraint, ids = random.Random(seed), make(), []
    ends = [t for t in range(len(tokenizer._inner)) if set(tokenizer.spell([t])) & set('"}])<|\\/_arguen=:>\n')]
    for _ in range(600):
        may = allowed(constraint.allowed())
        if constraint.may_end and (not may or chance.random() < 0.5):
            return tokenizer.spell(ids)
        liked = [t for t in may if t in ends]
        ids.append(chance.choice(liked if liked and chance.random() < 0.8 else may))
        constraint.accept(ids[-1])
    return ""


def without_thought(form: ChatFormat, text: str) -> str:
    """GLM writes an empty one before every call."""
    return text.replace("<think></think>\n", "").lstrip("\n") if isinstance(form.syntax, TaggedCalls) else text


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("answer", ANSWERS, ids=["all", "some", "none"])
def test_what_the_template_writes_is_allowed(
    name: str, answer: tuple[str, Any], tokenizer: Tokenizer, structured: Structured, marks: Marks
) -> None:
    form = learn(ALL[name])
    make = structured.lark(calls(form.syntax, functions_of(name), marks, several=True))
    function, arguments = answer
    if name == "gemma":
        arguments = {key: x for key, x in arguments.items() if key != "at"}
    one = call(function, json.dumps(arguments, ensure_ascii=False))
    text = without_thought(form, said(ALL[name], form, "", [one]))
    if name == "mistral":  # an id is written by the template alone
        text = text.replace(', "id": "abcdefgh1"', "")
    assert fits(tokenizer, make, text)
    assert not fits(tokenizer, make, text[:-1])
    assert not fits(tokenizer, make, "Well. " + text)
    assert not fits(tokenizer, make, text.replace(function, "walk"))


@pytest.mark.parametrize("name", [name for name in ALL if name != "llama3"])
def test_several_calls_are_allowed_where_they_are_asked_for(
    name: str, tokenizer: Tokenizer, structured: Structured, marks: Marks
) -> None:
    form = learn(ALL[name])
    text = without_thought(form, said(ALL[name], form, "", [call("wait", "{}"), call("wait", "{}")]))
    text = text.replace(', "id": "abcdefgh1"', "")
    for several in (True, False):
        make = structured.lark(calls(form.syntax, functions_of(name), marks, several=several))
        assert fits(tokenizer, make, text) == several


@pytest.mark.parametrize("name", ALL)
def test_whatever_is_drawn_is_read_as_calls_that_fit(
    name: str, tokenizer: Tokenizer, structured: Structured, marks: Marks
) -> None:
    form = learn(ALL[name])
    make = structured.lark(calls(form.syntax, functions_of(name), marks, several=True))
    finished = 0
    for seed in range(25):
        text = drawn(tokenizer, make, seed)
        if not text:
            continue
        finished += 1
        parts = read(lambda: reader(form, SCHEMAS, thoughts=None), text)
        assert collected(parts).text == ""
        found = calls_of(parts)
        assert found, text
        for function, arguments in found:
            assert is_valid(SCHEMAS[function] | {"type": "object"}, json.dumps(arguments)), text
    assert finished >= 5


@pytest.mark.parametrize("name", ALL)
def test_with_strict_functions_text_is_free_and_calls_fit(
    name: str, tokenizer: Tokenizer, structured: Structured, marks: Marks
) -> None:
    form = learn(ALL[name])
    make = structured.lark(text_or_calls(form.syntax, functions_of(name), marks, several=True))
    one = without_thought(form, said(ALL[name], form, "", [call("look", '{"city": "x", "days": 3}')]))
    one = one.replace(', "id": "abcdefgh1"', "")
    assert fits(tokenizer, make, "")
    assert fits(tokenizer, make, "Well, {} and [1] <b>")
    assert fits(tokenizer, make, one)
    assert not fits(tokenizer, make, one.replace("3", "30"))
    assert not fits(tokenizer, make, one.replace("look", "walk"))
    if not (isinstance(form.syntax, JsonCalls | PythonCalls) and form.syntax.bare):
        assert fits(tokenizer, make, "Well.\n" + one)
        assert not fits(tokenizer, make, "Well.\n" + one.replace("3", "30"))


@pytest.mark.parametrize("name", ALL)
def test_without_calls_any_other_text_is_allowed(
    name: str, tokenizer: Tokenizer, structured: Structured, marks: Marks
) -> None:
    form = learn(ALL[name])
    text = no_calls(form.syntax, marks)
    if text is None:
        assert isinstance(form.syntax, JsonCalls | PythonCalls)
        assert form.syntax.bare
        return
    make = structured.lark(text)
    assert fits(tokenizer, make, "Well, {} [x] <tool \n <b>")
    one = without_thought(form, said(ALL[name], form, "", [call("look", "{}")]))
    assert not fits(tokenizer, make, one)
    assert not fits(tokenizer, make, "Well. " + one)


# Schemas.

STRICT = Signature(name="f", parameters={}, strict=True)


@pytest.mark.parametrize("name", ["hermes", "qwen_coder", "llama4"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "array", "uniqueItems": True}}},
        {"properties": {"a": {"not": {}}}, "required": ["a"]},
    ],
)
def test_a_schema_that_is_not_understood_binds_nothing_unless_it_is_strict(
    name: str, parameters: Any, tokenizer: Tokenizer, structured: Structured, marks: Marks
) -> None:
    syntax = learn(ALL[name]).syntax
    function = dataclasses.replace(STRICT, parameters=parameters)
    with pytest.raises(UsageError, match="'f' cannot be enforced"):
        calls(syntax, [function], marks, several=False)
    loose = dataclasses.replace(function, strict=False)
    make = structured.lark(calls(syntax, [loose], marks, several=False))
    assert any(allowed(make().allowed()))


@pytest.mark.parametrize(
    ("name", "parameters", "fault"),
    [
        ("qwen_coder", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
        ("qwen_coder", {"properties": {"a": {"type": ["string", "integer"]}}}, "of no type, or of several"),
        ("qwen_coder", {"properties": {"a": {}}}, "of no type, or of several"),
        ("gemma", {"properties": {"a": {"type": "array"}}}, "'a' is something else"),
        ("glm", {"properties": {}, "minProperties": 1}, "minProperties"),
        ("llama4", {"anyOf": [{"required": ["a"]}]}, "anyOf"),
    ],
)
def test_what_cannot_be_enforced_in_a_format_is_refused_by_name(
    name: str, parameters: Any, fault: str, marks: Marks
) -> None:
    with pytest.raises(UsageError, match=fault):
        calls(learn(ALL[name]).syntax, [dataclasses.replace(STRICT, parameters=parameters)], marks, several=False)


@pytest.mark.parametrize("required", [[], ["a"], ["b"], ["c"], ["a", "c"], ["a", "b", "c"]])
def test_optional_arguments_of_python_calls_have_their_commas(
    required: list[str], tokenizer: Tokenizer, structured: Structured, marks: Marks
) -> None:
    parameters = {"properties": {key: {"type": "integer"} for key in "abc"}, "required": required}
    function = dataclasses.replace(STRICT, parameters=parameters)
    make = structured.lark(calls(learn(ALL["llama4"]).syntax, [function], marks, several=False))
    for there in ("", "a", "b", "c", "ab", "ac", "bc", "abc"):
        text = "[f(" + ", ".join(f"{key}=1" for key in there) + ")]"
        assert fits(tokenizer, make, text) == (set(required) <= set(there)), text


# Thoughts.


@pytest.mark.parametrize(
    "thoughts", [ThoughtMarks(open="<think>", close="</think>"), ThoughtMarks(open="[THINK]", close="[/THINK]")]
)
def test_a_thought_ends_where_its_mark_does(
    thoughts: ThoughtMarks, tokenizer: Tokenizer, structured: Structured, marks: Marks
) -> None:
    inner = structured.lark(thought(thoughts, marks, opened=True))
    whole = structured.lark(thought(thoughts, marks, opened=False))
    text = f"\nHm, {{}} <b>\n{thoughts.close}"
    for after in ("", "\n", "\n\n"):
        assert fits(tokenizer, inner, text + after)
        assert fits(tokenizer, whole, thoughts.open + text + after)
    assert not fits(tokenizer, inner, text + "x")
    assert not fits(tokenizer, inner, "Hm")
    assert not fits(tokenizer, whole, text)
    form = ChatFormat(thoughts=thoughts)
    assert collected(read(lambda: reader(form), thoughts.open + text)).text == ""
    assert not [part for part in read(lambda: reader(form), thoughts.open + text) if isinstance(part, Text)]
