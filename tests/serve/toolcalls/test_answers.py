"""Answers as models write them, in any pieces: thoughts, text and calls come out as they were meant."""

import itertools
import json
import re
from typing import Any

import pytest
from chat_templates import OPENED, PLAIN, TEMPLATES, TemplateText
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_answers import call, calls_of, collected, read, reader, said

from kvarn.errors import UsageError
from kvarn.serve.http.parts import CallArguments, CallStart, Text, Thought
from kvarn.serve.toolcalls.harmony import HarmonyReader
from kvarn.serve.toolcalls.learn import FALLBACK, ChatFormat, learn
from kvarn.serve.toolcalls.syntax import JsonCalls, NamedCalls, PythonCalls, QuotedCalls, TaggedCalls, ThoughtMarks

ALL = {name: TemplateText(text) for name, text in (TEMPLATES | {"plain": PLAIN}).items()}
FORMS = {name: learn(template) for name, template in ALL.items()}
ANY = ["string", "integer", "number", "boolean", "object", "array", "null"]
FUNCTIONS = {
    "look": {"properties": {"city": {"type": "string"}, "n": {"type": "integer"}, "deep": {"type": "object"}}},
    "walk": {"properties": {}},
}
ARGUMENTS = [
    {"city": "Köln", "n": 3},
    {"city": 'a </tool_call> "x" [TOOL_CALLS] {\n</x> \\', "deep": {"a": [1.5, {"b": None}], "t": True}},
    {},
]
THINK = ThoughtMarks(open="<think>", close="</think>")
MARKED = ["hermes", "qwen3", "deepseek", "mistral", "mistral_named", "qwen_coder", "glm", "plain"]
"""Formats with a mark before a call."""


def text_of(name: str, content: str, calls: list[tuple[str, Any]]) -> str:
    form = FORMS[name]
    made = [call(function, json.dumps(arguments, ensure_ascii=False)) for function, arguments in calls]
    return said(ALL[name], form, content, made)


def every_cut_gives(name: str, text: str, **options: Any) -> Any:
    form = FORMS[name]
    parts = read(lambda: reader(form, FUNCTIONS, **options), text)
    for cuts in [*([i] for i in range(len(text))), range(len(text))]:
        assert read(lambda: reader(form, FUNCTIONS, **options), text, list(cuts)) == parts
    return parts


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["plain", "nasty", "none"])
@pytest.mark.parametrize("name", ALL)
def test_a_call_as_the_template_writes_it_is_read_back(name: str, arguments: Any) -> None:
    parts = every_cut_gives(name, text_of(name, "", [("look", arguments)]))
    assert calls_of(parts) == [("look", arguments)]
    assert collected(parts).text == ""


@pytest.mark.parametrize("name", [name for name in ALL if name != "llama3"])
def test_several_calls_have_ids_and_indices_of_their_own(name: str) -> None:
    calls = [("look", ARGUMENTS[0]), ("walk", {}), ("look", ARGUMENTS[1])]
    parts = every_cut_gives(name, text_of(name, "", calls))
    assert calls_of(parts) == calls
    assert [(p.index, p.id) for p in parts if isinstance(p, CallStart)] == [(0, "0"), (1, "1"), (2, "2")]


def test_a_template_of_single_calls_refuses_several() -> None:
    with pytest.raises(UsageError, match="single"):
        text_of("llama3", "", [("look", {}), ("walk", {})])


@pytest.mark.parametrize("name", ["hermes", "qwen3", "mistral_named", "qwen_coder", "glm", "plain"])
def test_text_before_calls_stays_without_the_space_between(name: str) -> None:
    parts = every_cut_gives(name, text_of(name, "Let me see.", [("look", ARGUMENTS[0]), ("walk", {})]))
    assert collected(parts).text == "Let me see."
    assert calls_of(parts) == [("look", ARGUMENTS[0]), ("walk", {})]


@pytest.mark.parametrize("name", MARKED)
def test_text_around_calls_stays_text(name: str) -> None:
    one = text_of(name, "", [("look", ARGUMENTS[0])]).replace("<think></think>", "")
    parts = every_cut_gives(name, f"Well. {one}\nDone <tool")
    assert isinstance(parts[0], Text)
    assert isinstance(parts[1], CallStart)
    assert collected(parts).text.split() == ["Well.", "Done", "<tool"]


@pytest.mark.parametrize("name", ALL)
def test_text_that_only_looks_like_a_call_is_text(name: str) -> None:
    for text in (
        "",
        "  \n",
        "No call: {}, [1, 2], <b>, f(x=1)",
        '{"a": 1}',
        '[{"name": "x"}]',
        "[f(x=1)]",
        "<tool_cal",
    ):
        parts = every_cut_gives(name, text)
        assert collected(parts).text == text
        assert not collected(parts).calls


@pytest.mark.parametrize("name", ALL)
def test_an_answer_cut_anywhere_keeps_what_came(name: str) -> None:
    text = text_of(name, "", [("look", ARGUMENTS[1])])
    form = FORMS[name]
    whole = collected(read(lambda: reader(form, FUNCTIONS), text))
    for end in range(len(text)):
        got = collected(read(lambda: reader(form, FUNCTIONS), text[:end]))
        for one, full in zip(got.calls, whole.calls, strict=False):
            assert one.name == full.name
            if isinstance(form.syntax, QuotedCalls):  # JSON when it is whole, before as it came
                assert one.arguments == full.arguments or one.arguments in text
                continue
            half = r"(\\n|\n)?(<[^>]*)?$" if isinstance(form.syntax, TaggedCalls) else "$"  # of a mark in the value
            assert full.arguments.startswith(re.sub(half, "", one.arguments))
        assert bool(got.text) <= (not got.calls), "either the text of half a mark, or half a call"
        assert got.text in text


@pytest.mark.parametrize("name", MARKED)
def test_calls_of_unknown_functions_are_calls(name: str) -> None:
    parts = read(lambda: reader(FORMS[name], {}), text_of(name, "", [("look", ARGUMENTS[0])]))
    assert [one.name for one in collected(parts).calls] == ["look"]


@pytest.mark.parametrize("name", ["llama3", "llama4"])
def test_bare_calls_of_unknown_functions_are_text(name: str) -> None:
    text = text_of(name, "", [("look", ARGUMENTS[0])])
    parts = read(lambda: reader(FORMS[name], {"walk": {}}), text)
    assert collected(parts).text == text
    assert not collected(parts).calls


@pytest.mark.parametrize("name", [name for name in ALL if name != "llama3"])
def test_without_parallel_calls_the_first_one_is_all(name: str) -> None:
    text = text_of(name, "", [("look", ARGUMENTS[0]), ("walk", {})])
    parts = every_cut_gives(name, text + "\nmore", parallel=False)
    assert calls_of(parts) == [("look", ARGUMENTS[0])]
    assert collected(parts).text == ""


def test_without_a_syntax_calls_are_text() -> None:
    text = text_of("hermes", "a", [("look", {})])
    assert read(lambda: reader(FORMS["hermes"], syntax=None), text) == [Text(text)]


JSON = JsonCalls(begin="<tool_call>", end="</tool_call>", lead="\n")


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ('{"name": "look", "arguments": {"a": 1,}}', "look", '{"a": 1,}'),
        ('{"name": "look", "arguments": {\'a\': 1}}', "look", "{'a': 1}"),
        ('{"name": "look", "arguments": {"a": {"b": 1}', "look", '{"a": {"b": 1}\n'),
        ('{"name": "look", "arguments": "{\\"a\\": 1}"}', "look", '{"a": 1}'),
        ('{"name": "look", "arguments": null}', "look", "{}"),
        ('{"name": "look", "arguments": 5}', "look", "5"),
        ('{"name": "look", "parameters": {"a": 1}}', "look", '{"a": 1}'),
        ('{"arguments": {"a": 1}, "name": "look"}', "look", '{"a": 1}'),
        ('{"name": "look"}', "look", "{}"),
        ('{"id": [1, {"x": "}"}], "name": "l\\u00f6ok", "arguments": {}}', "löok", "{}"),
        ('{"name": "look", "arguments": {}, "note": "x"}', "look", "{}"),
    ],
)
def test_json_that_is_not_quite_right_is_passed_on(body: str, name: str, arguments: str) -> None:
    form = ChatFormat(syntax=JSON)
    text = f"<tool_call>\n{body}\n</tool_call>"
    parts = read(lambda: reader(form), text)
    assert [(one.name, one.arguments) for one in collected(parts).calls] == [(name, arguments)]
    assert collected(parts).text == ""
    assert read(lambda: reader(form), text, range(len(text))) == parts


@pytest.mark.parametrize("body", ["look", "{look: 1}", '{"arguments": {}}', "[]", '{"name": 5}', '{"name": "'])
def test_what_has_no_name_is_text(body: str) -> None:
    text = f"<tool_call>\n{body}\n</tool_call>"
    parts = read(lambda: reader(ChatFormat(syntax=JSON)), text)
    assert parts == [Text(text)]


def test_a_list_within_one_pair_of_marks() -> None:
    text = '<tool_call>[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]</tool_call>'
    assert calls_of(read(lambda: reader(ChatFormat(syntax=JSON)), text)) == [("a", {"x": 1}), ("b", {})]


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "true", "true"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"$ref": "#/x"}, "5", 5),
        ({}, "text", "text"),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "object"}, "{'a': [True, None]}", {"a": [True, None]}),
        ({"type": "string"}, "{'a': 1}", "{'a': 1}"),
        ({"type": "object"}, "{open}", "{open}"),
        ({"type": "string"}, "two\n\nlines ", "two\n\nlines "),
    ],
)
def test_values_in_tags_have_the_types_of_the_schema(schema: Any, written: str, value: Any) -> None:
    form = FORMS["qwen_coder"]
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
    parts = read(lambda: reader(form, {"f": {"properties": {"x": schema}}}), text)
    assert calls_of(parts) == [("f", {"x": value})]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (
            '{a:<|"|>x, {y}:[z]<|"|>,b:[1,{c:true,d:null}],e:-2.5}',
            {"a": "x, {y}:[z]", "b": [1, {"c": True, "d": None}], "e": -2.5},
        ),
        ("{}", {}),
        ('{a: <|"|>"q"\n<|"|>, b : word}', {"a": '"q"\n', "b": "word"}),
        ('{"a":1}', {"a": 1}),
    ],
)
def test_bare_keys_and_quoted_strings_become_json(written: str, arguments: Any) -> None:
    parts = every_cut_gives("gemma", f"<|tool_call>call:look{written}<tool_call|>")
    assert calls_of(parts) == [("look", arguments)]


def test_a_key_says_whether_its_value_is_a_string() -> None:
    one = '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" string="{}">5</｜DSML｜parameter>\n</｜DSML｜invoke>'
    for said_so, value in (("true", "5"), ("false", 5)):
        assert calls_of(every_cut_gives("deepseek_tags", one.format(said_so))) == [("f", {"x": value})]


def test_python_values_become_json() -> None:
    text = "[look(a=True, b=None, c=[1, 'x'], d={'k': -1.5}, e='q\\'s )]'), mcp.look()]"
    parts = read(lambda: reader(FORMS["llama4"], {"look": {}, "mcp.look": {}}), text)
    want = {"a": True, "b": None, "c": [1, "x"], "d": {"k": -1.5}, "e": "q's )]"}
    assert calls_of(parts) == [("look", want), ("mcp.look", {})]
    for bad in ("[look(1)]", "[look(**x)]", "[look(a=open)]", "[look(a=b())]", "look(a=1)", "[" * 500 + "look()"):
        assert read(lambda: reader(FORMS["llama4"], {"look": {}}), bad) == [Text(bad)]


def test_python_calls_of_names_with_dashes() -> None:
    parts = read(lambda: reader(FORMS["llama4"], {"my-server_look": {}}), '[my-server_look(a="my-server_look")]')
    assert calls_of(parts) == [("my-server_look", {"a": "my-server_look"})]


# Thoughts.


@pytest.mark.parametrize("opened", [False, True])
def test_a_thought_is_apart_from_the_answer(opened: bool) -> None:
    text = "\nHm, <b> </thin\n\nso.\n</think>\n\nYes."
    text = text if opened else "<think>" + text
    form = ChatFormat(thoughts=THINK)
    parts = read(lambda: reader(form, opened=opened), text)
    assert parts == [Thought("Hm, <b> </thin\n\nso."), Text("Yes.")]
    for cuts in [*([i] for i in range(len(text))), range(len(text))]:
        assert read(lambda: reader(form, opened=opened), text, list(cuts)) == parts


def test_a_thought_that_is_cut_is_a_thought() -> None:
    form = ChatFormat(thoughts=THINK)
    assert read(lambda: reader(form), "<think>Hm, </thi") == [Thought("Hm, </thi")]
    assert read(lambda: reader(form, opened=True), "Hm") == [Thought("Hm")]
    assert read(lambda: reader(form), "<thi") == [Text("<thi")]
    assert read(lambda: reader(form), "<think></think>") == []


def test_marks_of_a_thought_later_on_are_text() -> None:
    text = "A tag is <think>like this</think>."
    assert read(lambda: reader(ChatFormat(thoughts=THINK)), text) == [Text(text)]


def test_calls_within_a_thought_are_thought_and_those_after_it_are_calls() -> None:
    one = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    parts = read(lambda: reader(FORMS["qwen3"]), f"<think>\nMaybe {one}\n</think>\n\n{one}")
    assert parts == [Thought(f"Maybe {one}"), CallStart(0, "0", "look"), CallArguments(0, "{}")]


def test_in_thought_says_where_the_next_token_belongs() -> None:
    own = reader(ChatFormat(thoughts=THINK))
    assert not own.in_thought
    seen = []
    for piece in ("<think>", "\n", "Hm", "</think>", "\n\n", "Yes"):
        own.add(piece)
        seen.append(own.in_thought)
    assert seen == [True, True, True, False, False, False]
    assert reader(ChatFormat(thoughts=THINK), opened=True).in_thought


@pytest.mark.parametrize("name", ["opened", "qwen3", "glm", "mistral_named"])
def test_marks_of_thoughts_are_found_in_the_template(name: str) -> None:
    form = learn(TemplateText(TEMPLATES.get(name, OPENED)))
    assert form.thoughts is not None
    text = f"{form.thoughts.open}a{form.thoughts.close}b"
    assert read(lambda: reader(form), text) == [Thought("a"), Text("b")]


# Harmony.


def harmony(parallel: bool = True) -> HarmonyReader:
    count = itertools.count()
    return HarmonyReader(parallel=parallel, new_id=lambda: str(next(count)))


HARMONY_CALL = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            [Thought("Hm."), Text("Yes.")],
        ),
        (
            f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY_CALL}" + '{"a": "<|x|>"}',
            [Thought("Hm."), CallStart(0, "0", "look"), CallArguments(0, '{"a": "<|x|>"}')],
        ),
        (
            " to=functions.look<|channel|>commentary json<|message|>{}",
            [CallStart(0, "0", "look"), CallArguments(0, "{}")],
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            [Text("I look.\n\nYes.")],
        ),
        ("<|channel|>analysis<|message|>Hm", [Thought("Hm")]),
        ("<|channel|>ana", []),
        ("Plain.", [Text("Plain.")]),
    ],
)
def test_harmony(text: str, parts: Any) -> None:
    assert read(harmony, text) == parts
    for cuts in [*([i] for i in range(len(text))), range(len(text))]:
        assert read(harmony, text, list(cuts)) == parts


# Any text, any cuts.

WORDS = sorted(
    {
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<function=", "look", "</function>"),
        *(
            "<parameter=",
            "</parameter>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<think>",
            "</think>",
        ),
        *(
            '{"name": "look", "arguments": ',
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            ",",
            ":",
            ";",
            "\n",
            " ",
            "a",
            "look(",
            "a=",
            ")",
        ),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "<|python_tag|>",
            "'",
        ),
    }
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(WORDS), max_size=25), st.lists(st.integers(0, 200), max_size=6), st.booleans())
def test_how_any_text_is_cut_changes_nothing(words: list[str], cuts: list[int], parallel: bool) -> None:
    text = "".join(words)
    for form in FORMS.values():
        make = lambda: reader(form, FUNCTIONS, parallel=parallel)  # noqa: B023, E731
        parts = read(make, text)
        assert read(make, text, cuts) == parts
        assert read(make, text, range(len(text))) == parts
    assert read(harmony, text, cuts) == read(harmony, text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=8) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), VALUES, max_size=3), st.integers(0, 400))
def test_any_arguments_in_json_come_back_whole(arguments: dict[str, Any], cut: int) -> None:
    for name in ("hermes", "qwen3", "mistral", "mistral_named", "deepseek", "llama3", "plain"):
        text = text_of(name, "", [("look", arguments)])
        parts = read(lambda: reader(FORMS[name], FUNCTIONS), text, [cut])  # noqa: B023
        assert calls_of(parts) == [("look", arguments)]


def test_every_family_is_among_the_templates() -> None:
    kinds = {type(form.syntax) for form in FORMS.values()}
    assert kinds == {JsonCalls, NamedCalls, TaggedCalls, QuotedCalls, PythonCalls}
    assert FORMS["plain"].syntax is FALLBACK
