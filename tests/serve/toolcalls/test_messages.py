"""Messages as a template takes them; where it knows no tools, as texts that any template takes."""

import json
from typing import Any

import pytest
from tool_answers import call

from kvarn.serve.tokenizer import JsonText, MarkedText
from kvarn.serve.toolcalls.learn import ChatFormat, sample_tool
from kvarn.serve.toolcalls.messages import for_template, written
from kvarn.serve.toolcalls.syntax import JsonCalls, PythonCalls

USER: Any = {"role": "user", "content": "Weather?"}
CALLED: Any = {"role": "assistant", "content": "", "tool_calls": [call("look", '{"a":1}', "call_1")]}
RESULT: Any = {"role": "tool", "content": "20", "tool_call_id": "call_1"}
NATIVE = ChatFormat(native=True)
PLAIN = ChatFormat()


def native(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    return for_template(messages, [], ChatFormat(native=True, **fields), parallel=True)[0]


def plain(*messages: Any, tools: Any = (), parallel: bool = True) -> list[dict[str, Any]]:
    found, left = for_template(messages, tools, PLAIN, parallel=parallel)
    assert left == []
    return found


def test_arguments_are_an_object_that_keeps_its_text() -> None:
    _, message, _ = native(USER, CALLED, RESULT)
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": JsonText('{"a":1}', {"a": 1})}
    _, message, _ = native(USER, CALLED, RESULT, arguments_as_text=True)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a":1}'


@pytest.mark.parametrize(("text", "value"), [("", {}), ("{", "{"), ("[1]", "[1]"), ("5", "5")])
def test_arguments_that_are_no_object_stay_text(text: str, value: Any) -> None:
    (message,) = native({"role": "assistant", "content": "", "tool_calls": [call("look", text)]})
    assert message["tool_calls"][0]["function"]["arguments"].value == value


@pytest.mark.parametrize(
    ("content", "fields", "want"),
    [
        ("", {"empty": None}, None),
        ("", {"empty": ""}, ""),
        ("I look.", {"empty": None}, "I look."),
        ("I look.", {"empty": None, "calls_alone": True}, None),
    ],
)
def test_content_beside_calls(content: str, fields: Any, want: Any) -> None:
    (message,) = native(CALLED | {"content": content}, **fields)
    assert message["content"] == want


def test_results_know_their_functions_and_ids_are_as_the_template_wants_them() -> None:
    _, called, result = native(USER, CALLED, RESULT)
    assert (result["name"], result["tool_call_id"]) == ("look", "call_1")
    _, called, result = native(USER, CALLED, RESULT, short_ids=True)
    short = called["tool_calls"][0]["id"]
    assert len(short) == 9
    assert short.isalnum()
    assert result["tool_call_id"] == short
    (kept,) = native({"role": "assistant", "content": "", "tool_calls": [call("f", "{}", "abcdefgh1")]}, short_ids=True)
    assert kept["tool_calls"][0]["id"] == "abcdefgh1"
    assert native({**RESULT, "tool_call_id": "unknown"})[0].get("name") is None


def test_thoughts_have_the_templates_own_name() -> None:
    message = {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
    assert native(message, thought_field="thinking") == [{"role": "assistant", "content": "So.", "thinking": "Hm."}]


def test_the_caller_keeps_its_messages() -> None:
    before = json.dumps([USER, CALLED, RESULT])
    native(USER, CALLED, RESULT, short_ids=True)
    plain(USER, CALLED, RESULT, tools=[sample_tool("look")])
    assert json.dumps([USER, CALLED, RESULT]) == before


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (
            JsonCalls(begin="<b>", end="<e>", listed=True),
            '[{"name": "look", "arguments": {"a":1}}, {"name": "f", "arguments": {}}]',
        ),
        (PythonCalls(begin="<b>", end="<e>"), "[look(a=1), f()]"),
    ],
)
def test_calls_in_a_messages_text_stand_between_marks(syntax: Any, text: str) -> None:
    message = CALLED | {"content": "I <b> look.", "tool_calls": [*CALLED["tool_calls"], call("f", "")]}
    _, found, result = native(USER, message, RESULT, writes_calls=False, syntax=syntax)
    assert found == {"role": "assistant", "content": MarkedText(("I <b> look.", "<b>", text, "<e>"))}
    assert result["role"] == "tool"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"a": [true, null, {"k": "q\\"s"}], "b": -1.5}', 'f(a=[True, None, {"k": "q\\"s"}], b=-1.5)'),
        ("no JSON", "f(no JSON)"),
    ],
)
def test_arguments_in_python(arguments: str, text: str) -> None:
    made = written("", [call("f", arguments)], PythonCalls(begin="<b>", end="<e>"))
    assert made.pieces[2] == f"[{text}]"


# Templates that know no tools.


def test_calls_and_results_become_texts_of_turns() -> None:
    messages = plain(USER, CALLED | {"content": "I look."}, RESULT, {**RESULT, "content": "30"}, USER)
    assert messages == [
        USER,
        {"role": "assistant", "content": 'I look.\n<tool_call>\n{"name": "look", "arguments": {"a":1}}\n</tool_call>'},
        {
            "role": "user",
            "content": "<tool_response>\n20\n</tool_response>\n<tool_response>\n30\n</tool_response>\nWeather?",
        },
    ]


def test_several_calls_stand_one_after_the_other() -> None:
    (message,) = plain({"role": "assistant", "content": "", "tool_calls": [call("a", "{}"), call("b", "")]})
    assert message["content"].count("<tool_call>\n") == 2
    assert '{"name": "b", "arguments": {}}' in message["content"]


def test_tools_are_described_in_the_system_message() -> None:
    own = {"role": "system", "content": "Be brief."}
    tools = [sample_tool("look"), sample_tool("walk")]
    first, user = plain(own, USER, tools=tools)
    assert user == USER
    assert first["content"].startswith("Be brief.\n\n")
    for tool in tools:
        assert json.dumps(tool["function"]) in first["content"]
    alone, _ = plain(USER, tools=tools)
    assert alone["role"] == "system"
    assert "Several calls" in alone["content"]
    assert "one call at a time" in plain(USER, tools=tools, parallel=False)[0]["content"]
    assert plain(own, USER) == [own, USER]
