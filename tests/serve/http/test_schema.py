"""Every field is supported, accepted, or refused by name with 400 in OpenAI's shape; nothing is ignored in silence."""

from pathlib import Path
from typing import Any

import pytest

from kvarn.serve.http import schema

USER = {"role": "user", "content": "hi"}
REFUSED = [
    ("functions", [{}]),
    ("function_call", "auto"),
    ("guided_json", {"type": "object"}),
    ("guided_regex", "a"),
    ("structured_outputs", {"regex": "a"}),
    ("json_schema", {}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("reasoning", {"effort": "low"}),
    ("verbosity", "low"),
    ("web_search_options", {}),
    ("suffix", "x"),
]
REFUSED_FOR_COMPLETIONS = [
    ("tools", [{"type": "function"}]),
    ("tool_choice", "auto"),
    ("reasoning_effort", "low"),
    ("chat_template_kwargs", {"thinking": True}),
]
TOOL = {"type": "function", "function": {"name": "look"}}
DEEP: Any = {}
for _ in range(70):
    DEEP = {"items": DEEP}
WRONG_TOOLS = [
    ({"tools": {}}, "tools"),
    ({"tools": [TOOL] * 513}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].custom"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "colour": 1}}]}, "tools[0].function.colour"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": DEEP}}]}, "tools[0].function.parameters"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": ["auto"]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "look"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "walk"}}}, "tool_choice"),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"colour": [1]}}, "chat_template_kwargs"),
]
NEUTRAL = {
    "chat_template_kwargs": {},
    "reasoning_effort": "none",
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "functions": [],
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "verbosity": "medium",
}
WRONG = [
    ("response_format", "json"),
    ("response_format", {}),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "text", "schema": {}}),
    ("response_format", {"type": "json_object", "strict": True}),
    ("response_format", {"type": "json_object", "schema": []}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "style": 1}}),
    ("regex", ""),
    ("regex", "(a"),
    ("grammar", "start: nothing"),
    ("temperature", -1),
    ("temperature", 101),
    ("temperature", "1"),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("presence_penalty", 101),
    ("frequency_penalty", -101),
    ("repetition_penalty", 0),
    ("n", 0),
    ("n", 129),
    ("n", True),
    ("seed", "x"),
    ("seed", 2**70),
    ("max_tokens", 0),
    ("max_tokens", "5"),
    ("stop", 5),
    ("stop", ["x"] * 17),
    ("stop", [""]),
    ("stop", "x" * 257),
    ("logit_bias", {"97": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"5": 2000}),
    ("logit_bias", {"5": None}),
    ("logit_bias", [1]),
    ("top_logprobs", 2),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("messages", []),
    ("messages", "hi"),
    ("model", None),
    ("model", 5),
]
WRONG_MESSAGES = [
    ({"role": "robot", "content": "x"}, "messages[0].role"),
    ({"role": "user"}, "messages[0].content"),
    ({"role": "user", "content": None}, "messages[0].content"),
    ({"role": "user", "content": []}, "messages[0].content"),
    ({"role": "user", "content": 5}, "messages[0].content"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content"),
    ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content"),
    ({"role": "user", "content": [{"type": "text", "text": "x", "colour": 1}]}, "messages[0].content"),
    ({"role": "user", "content": ["x"]}, "messages[0].content"),
    ({"role": "user", "content": "\ud800"}, "messages[0].content"),
    ({"role": "assistant", "content": "x", "tool_calls": [{"id": 1}]}, "messages[0].tool_calls[0].id"),
    (
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}, "messages"),
    ({"role": "assistant", "tool_calls": [], "reasoning": "hm"}, "messages[0].content"),
    (
        {"role": "user", "content": "x", "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
        "messages[0].tool_calls",
    ),
    ({"role": "tool", "content": "x", "reasoning_content": "hm"}, "messages[0].reasoning_content"),
    ({"role": "assistant", "content": "x", "reasoning_details": [{}]}, "messages[0].reasoning_details"),
    ({"role": "assistant", "content": "x", "function_call": {}}, "messages[0].function_call"),
    ({"role": "assistant", "content": "x", "audio": {"id": "x"}}, "messages[0].audio"),
    ({"role": "user", "content": "x", "colour": "red"}, "messages[0].colour"),
]


def refused(response: Any, param: str) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    return error


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_field_that_would_change_the_answer_is_refused_by_name(server: Any, name: str, value: Any) -> None:
    error = refused(server.chat(**{name: value}), name)
    assert name in error["message"]
    assert error["code"] == "unsupported_parameter"
    refused(server.complete(**{name: value}), name)


@pytest.mark.parametrize(("name", "value"), REFUSED_FOR_COMPLETIONS)
def test_what_goes_with_chats_is_refused_for_completions(server: Any, name: str, value: Any) -> None:
    assert "chat" in refused(server.complete(**{name: value}), name)["message"]
    assert server.complete(**{name: None}).status_code == 200


@pytest.mark.parametrize(("fields", "param"), WRONG_TOOLS, ids=lambda x: str(x)[:60])
def test_wrong_tools_and_choices_are_refused_at_their_place(server: Any, fields: dict[str, Any], param: str) -> None:
    refused(server.chat(**fields), param)


def test_the_values_of_such_a_field_that_ask_for_nothing_are_taken(server: Any) -> None:
    assert server.chat(**NEUTRAL).status_code == 200
    assert server.complete(suffix="", best_of=1).status_code == 200
    refused(server.complete(best_of=2), "best_of")


@pytest.mark.parametrize("name", schema.ChatBody.accepted)
def test_a_field_that_cannot_change_the_answer_is_taken(server: Any, name: str) -> None:
    want = server.chat().json()["choices"]
    for value in ("x", {"a": ["b"]}, True, None):
        assert server.chat(**{name: value}).json()["choices"] == want


def test_nulls_are_as_good_as_nothing(server: Any) -> None:
    names = [*schema.ChatBody.model_fields, *schema._REFUSED]
    nulls = dict.fromkeys(name for name in names if name not in ("model", "messages"))
    response = server.http.post(
        "/v1/chat/completions", json={"model": "org/fake", "messages": [USER], **nulls, "max_tokens": 1}
    )
    assert response.status_code == 200


@pytest.mark.parametrize("name", ["colour", "max_token", "ignore_eos", "tool"])
def test_an_unknown_field_is_refused_by_name(server: Any, name: str) -> None:
    assert refused(server.chat(**{name: 1}), name)["code"] == "unknown_parameter"
    refused(server.complete(**{name: 1}), name)


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda x: str(x)[:20])
def test_a_wrong_value_is_refused_by_name(server: Any, name: str, value: Any) -> None:
    assert server.chat(**{name: value}).status_code == 400
    refused(server.chat(**{name: value}), name)


@pytest.mark.parametrize("text", ['{"temperature": NaN}', '{"temperature": Infinity}', '{"logit_bias": {"5": NaN}}'])
def test_numbers_that_are_none_are_refused(server: Any, text: str) -> None:
    body = '{"model": "org/fake", "messages": [{"role": "user", "content": "x"}], ' + text[1:]
    response = server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400


@pytest.mark.parametrize(("message", "param"), WRONG_MESSAGES)
def test_a_wrong_message_is_refused_at_its_place(server: Any, message: dict[str, Any], param: str) -> None:
    import json

    body = json.dumps({"model": "org/fake", "messages": [message]})
    response = server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    refused(response, param)


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], ["a", 5], [1.5], [True], {"a": 1}, [["a"]], ["x"] * 129, ["a", [1]] * 65]
)
def test_a_wrong_prompt_is_refused(server: Any, prompt: Any) -> None:
    refused(server.complete(prompt=prompt), "prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 20, "n": 10}, "n"),
        ({"n": 2, "max_tokens": 0}, "n"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_what_does_not_go_together_is_refused(server: Any, fields: dict[str, Any], param: str) -> None:
    refused(server.complete(**fields), param)


def test_differing_limits_are_refused(server: Any) -> None:
    refused(server.chat(max_tokens=3, max_completion_tokens=4), "max_tokens")


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "5",
        "null",
        '"x"',
        "[" * 100_000,
        '{"n": ' + "9" * 5000 + "}",
        '{"model": "\xff"}'.encode("latin-1"),
    ],
)
def test_a_body_that_is_no_object_is_refused(server: Any, body: Any) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        response = server.http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_document_lists_every_field() -> None:
    document = (Path(__file__).resolve().parents[3] / "docs" / "server.md").read_text()
    names = {*schema.ACCEPTED, *schema._REFUSED, *schema._MESSAGE_REFUSED, *schema.ChatBody.model_fields}
    names |= {*schema.CompletionBody.model_fields, *schema.Message.model_fields}
    missing = [name for name in names if f"`{name}`" not in document]
    assert missing == []
