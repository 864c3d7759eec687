"""The official anthropic client against a real server: answers, events, tools, thoughts, errors, and hanging up."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from agent_model import ANSWER, CALLS, SAID, THOUGHT, agent_model, write_call
from chat_templates import OPENED

from kvarn.serve.http.messages_events import NO_JSON, UNSIGNED
from kvarn.serve.http.security import Security
from kvarn.serve.http.service import Limits

MODEL = "org/fake"
USER: Any = [{"role": "user", "content": "hi"}]
CHAT = "<user>hi\n<assistant>"
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
ASK: Any = {"role": "user", "content": "What is the weather?"}


def client_of(run: Any, **fields: Any) -> anthropic.Anthropic:
    http = anthropic.DefaultHttpxClient(trust_env=False, timeout=20)
    fields = {"api_key": "unused", "max_retries": 0, "http_client": http} | fields
    return anthropic.Anthropic(base_url=run.url, **fields)


@pytest.fixture
def client(server: Any) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as made:
        yield made


@pytest.fixture(scope="module")
def agent(serve: Any, tmp_path_factory: Any) -> Iterator[Any]:
    with serve(script=agent_model(tmp_path_factory.mktemp("agent")), context=2048) as run:
        yield run


@pytest.fixture
def asking(agent: Any) -> Iterator[anthropic.Anthropic]:
    with client_of(agent) as made:
        yield made


@pytest.fixture
def prompts(agent: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the prompts that reach the engine."""
    return watch(agent, monkeypatch)


def watch(run: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    submit = run.service.submit
    spell = run.service.served.tokenizer.spell
    monkeypatch.setattr(
        run.service, "submit", lambda params: (seen.extend(spell(p.prompt) for p in params), submit(params))[1]
    )
    return seen


def post(run: Any, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": USER, "max_tokens": 4, "temperature": 0} | fields
    return run.http.post(path, json=body)


def ask(asking: anthropic.Anthropic, *messages: Any, **fields: Any) -> Any:
    fields = {"model": MODEL, "max_tokens": 400, "tools": [WEATHER]} | fields
    return asking.messages.create(messages=list(messages), **fields)


# Text.


def test_a_whole_answer(client: anthropic.Anthropic, expected: Any) -> None:
    message = client.messages.create(model=MODEL, messages=USER, max_tokens=6)
    (block,) = message.content
    assert (block.type, block.text) == ("text", expected(CHAT, 6))  # type: ignore[union-attr]
    assert (message.role, message.type, message.model) == ("assistant", "message", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(CHAT), 6)


def test_a_stream_has_anthropics_events_in_order(client: anthropic.Anthropic, expected: Any) -> None:
    events = list(client.messages.create(model=MODEL, messages=USER, max_tokens=3, stream=True))
    kinds = [event.type for event in events]
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    with client.messages.stream(model=MODEL, messages=USER, max_tokens=3) as stream:
        assert "".join(stream.text_stream) == expected(CHAT, 3)
        final = stream.get_final_message()
    whole = client.messages.create(model=MODEL, messages=USER, max_tokens=3)
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens == 3


def test_every_event_is_named_as_its_type(server: Any) -> None:
    lines = post(server, stream=True).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    types = [json.loads(line.removeprefix("data: "))["type"] for line in lines if line.startswith("data: ")]
    assert names == types


def test_a_stop_sequence_ends_the_answer_and_is_named(client: anthropic.Anthropic, expected: Any) -> None:
    text = expected(CHAT, 8)
    fields: Any = {"model": MODEL, "messages": USER, "max_tokens": 8}
    message = client.messages.create(stop_sequences=["never", text[3:5]], **fields)
    assert message.content[0].text == text[:3]  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[3:5])
    with client.messages.stream(stop_sequences=[text[3:5]], **fields) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", text[3:5])


def test_an_answer_that_ends_by_itself(asking: anthropic.Anthropic) -> None:
    message = ask(asking, *USER)
    assert (message.content[0].text, message.stop_reason) == ("You said: hi", "end_turn")


def test_an_answer_that_fills_the_context(serve: Any) -> None:
    with serve(context=64) as own:
        message = post(own, max_tokens=500).json()
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["usage"]["output_tokens"] == 64 - len(CHAT)


def test_no_tokens_only_read_the_prompt(server: Any) -> None:
    message = post(server, max_tokens=0).json()
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    kinds = [line for line in post(server, max_tokens=0, stream=True).text.splitlines() if line.startswith("event")]
    assert kinds == ["event: message_start", "event: message_delta", "event: message_stop"]


def test_a_last_message_of_the_assistant_is_continued(client: anthropic.Anthropic, expected: Any) -> None:
    messages: Any = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "so"}]}]
    message = client.messages.create(model=MODEL, messages=messages, max_tokens=4)
    assert message.content[0].text == expected(CHAT + "so", 4)  # type: ignore[union-attr]


def test_the_input_tokens_add_up_to_what_was_counted(serve: Any) -> None:
    with serve() as own, client_of(own) as client:
        messages: Any = [{"role": "user", "content": "x" * 200}]
        count = client.messages.count_tokens(model=MODEL, messages=messages, system="be brief").input_tokens
        for cached in (0, 192):
            message = client.messages.create(model=MODEL, messages=messages, system="be brief", max_tokens=2)
            assert message.usage.cache_read_input_tokens == cached
            assert message.usage.input_tokens + cached == count
            with client.messages.stream(model=MODEL, messages=messages, system="be brief", max_tokens=2) as stream:
                started = next(iter(stream)).message  # type: ignore[union-attr]
                usage = stream.get_final_message().usage
            assert started.usage.cache_read_input_tokens == usage.cache_read_input_tokens == 192


# Tools and thoughts.


def test_a_thought_a_text_and_two_calls_are_blocks_in_order(asking: anthropic.Anthropic) -> None:
    whole = ask(asking, ASK)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, *calls = whole.content
    assert (thought.thinking, thought.signature, text.text) == (THOUGHT, UNSIGNED, SAID)
    assert [(call.name, call.input) for call in calls] == [(name, json.loads(text)) for name, text in CALLS]
    assert len({call.id for call in calls}) == 2
    assert whole.stop_reason == "tool_use"
    assert 0 < whole.usage.output_tokens_details.thinking_tokens < whole.usage.output_tokens


def test_a_stream_gives_the_same_blocks(asking: anthropic.Anthropic) -> None:
    whole = ask(asking, ASK)
    with asking.messages.stream(model=MODEL, messages=[ASK], tools=[WEATHER], max_tokens=400) as stream:
        final = stream.get_final_message()
    for got, want in zip(final.content, whole.content, strict=True):
        assert got.model_dump(exclude={"id"}, warnings=False) == want.model_dump(exclude={"id"}, warnings=False)
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)


def test_the_events_of_thoughts_and_calls(asking: anthropic.Anthropic) -> None:
    events = list(ask(asking, ASK, stream=True))
    order: list[Any] = []
    for event in events:
        kind = event.delta.type if event.type == "content_block_delta" else event.type
        name = (kind, getattr(event, "index", None))
        if not order or order[-1] != name:
            order.append(name)
    assert order == [
        ("message_start", None),
        *[(k, 0) for k in ("content_block_start", "thinking_delta", "signature_delta", "content_block_stop")],
        *[(k, 1) for k in ("content_block_start", "text_delta", "content_block_stop")],
        *[(k, 2) for k in ("content_block_start", "input_json_delta", "content_block_stop")],
        *[(k, 3) for k in ("content_block_start", "input_json_delta", "content_block_stop")],
        ("message_delta", None),
        ("message_stop", None),
    ]
    deltas = [e.delta for e in events if e.type == "content_block_delta" and e.index == 3]
    assert "".join(delta.partial_json for delta in deltas) == CALLS[1][1]


def test_calls_and_results_go_back(asking: anthropic.Anthropic, prompts: list[str]) -> None:
    first = ask(asking, ASK)
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "21 degrees"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1].id,
            "content": [{"type": "text", "text": "no"}, IMAGE],
            "is_error": True,
        },
    ]
    conversation: Any = [ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = ask(asking, *conversation)
    assert [block.type for block in second.content] == ["thinking", "text"]
    assert (second.content[1].text, second.stop_reason) == (ANSWER, "end_turn")
    asked, answered = prompts
    told = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{write_call(*CALLS[0])}"
    assert answered.startswith(asked + told)
    assert "<tool_response>\n21 degrees\n</tool_response>" in answered
    note = "[image: it cannot be shown to this model, which reads text only]"
    assert f"<tool_response>\nError: no\n{note}\n</tool_response>" in answered
    counted = asking.messages.count_tokens(model=MODEL, messages=conversation, tools=[WEATHER])
    assert counted.input_tokens == second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)


def test_one_call_at_a_time_and_none(asking: anthropic.Anthropic) -> None:
    single = ask(asking, ASK, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in single.content] == ["thinking", "text", "tool_use"]
    none = ask(asking, ASK, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["thinking", "text"]


TIME: Any = {"name": "clock", "input_schema": {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}}}


def test_calls_are_forced(asking: anthropic.Anthropic) -> None:
    hello: Any = {"role": "user", "content": "hi"}
    off: Any = {"type": "disabled"}
    for choice in ({"type": "any"}, {"type": "tool", "name": "clock"}):
        forced = ask(asking, hello, tools=[WEATHER, TIME], tool_choice=choice, thinking=off)
        assert {block.type for block in forced.content} == {"tool_use"}
        if choice["type"] == "tool":
            assert {block.name for block in forced.content} == {"clock"}
            assert {block.input.get("zone") for block in forced.content} <= {None, "utc", "cet"}
        if forced.stop_reason != "max_tokens":
            assert forced.stop_reason == "tool_use"


def test_a_strict_tool_gets_what_its_schema_accepts(asking: anthropic.Anthropic) -> None:
    wrong = {"role": "user", "content": "write " + write_call("clock", '{"zone": "mars"}')}
    loose = ask(asking, wrong, tools=[TIME]).content[0]
    assert loose.input == {"zone": "mars"}
    strict = TIME | {"strict": True, "input_schema": TIME["input_schema"] | {"required": ["zone"]}}
    assert ask(asking, wrong, tools=[strict]).content[0].input["zone"] in ("utc", "cet")


def test_what_is_no_json_object_is_passed_on_in_one_property(asking: anthropic.Anthropic) -> None:
    cut = '{"city": "Ro'
    call = ask(asking, {"role": "user", "content": "write " + write_call("weather", cut).split(cut)[0] + cut}).content[
        0
    ]
    assert (call.type, call.input) == ("tool_use", {NO_JSON: cut})


def test_thoughts_are_switched_off(asking: anthropic.Anthropic, prompts: list[str]) -> None:
    ask(asking, ASK, thinking={"type": "disabled"})
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        ask(asking, ASK, max_tokens=1200, thinking=thinking, output_config={"effort": "high"})
    off, *on = (prompt.endswith("<think>\n\n</think>\n\n") for prompt in prompts)
    assert (off, on) == (True, [False, False])


def test_thoughts_that_cannot_be_switched_off_are_refused_by_name(serve: Any, tmp_path: Any) -> None:
    with serve(script=agent_model(tmp_path, OPENED)) as own:
        response = post(own, thinking={"type": "disabled"})
        assert response.status_code == 400
        said = response.json()["error"]["message"]
        assert said.startswith("thinking: ")
        assert "cannot switch thoughts off; leave thinking out" in said
        for thinking in ({"type": "enabled", "budget_tokens": 9}, {"type": "adaptive"}):
            assert post(own, thinking=thinking, output_config={"effort": "high"}).status_code == 200


def test_a_model_that_does_not_think_takes_any_effort(server: Any) -> None:
    for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        assert post(server, thinking=thinking, output_config={"effort": "max"}).status_code == 200


def test_an_omitted_thought_comes_back_sealed(asking: anthropic.Anthropic, prompts: list[str]) -> None:
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    first = ask(asking, ASK, thinking=thinking)
    assert first.content[0].thinking == ""
    with asking.messages.stream(
        model=MODEL, messages=[ASK], tools=[WEATHER], max_tokens=400, thinking=thinking
    ) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].model_dump() == first.content[0].model_dump()
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "21"}
    ask(asking, ASK, {"role": "assistant", "content": first.content[:3]}, {"role": "user", "content": [result]})
    assert f"<think>\n{THOUGHT}\n</think>" in prompts[-1]
    redacted = {"type": "redacted_thinking", "data": "abc"}
    ask(
        asking,
        ASK,
        {"role": "assistant", "content": [redacted, *first.content[2:3]]},
        {"role": "user", "content": [result]},
    )
    assert "<think>" not in prompts[-1].split("weather?")[1]


# The form of an answer.


def test_a_json_schema_binds_the_answer(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "schema": schema}
    message = client.messages.create(model=MODEL, messages=USER, max_tokens=60, output_config={"format": form})
    assert 0 <= json.loads(message.content[0].text)["age"] <= 99  # type: ignore[union-attr]
    old = client.messages.create(model=MODEL, messages=USER, max_tokens=60, extra_body={"output_format": form})
    assert list(json.loads(old.content[0].text)) == ["age"]  # type: ignore[union-attr]


# Messages.


def test_system_blocks_are_joined_and_the_billing_block_is_left_out(
    asking: anthropic.Anthropic, prompts: list[str]
) -> None:
    for number in (1, 2):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number};"}
        blocks = [
            {"type": "text", "text": t, "cache_control": {"type": "ephemeral"}} for t in ("You help.", "Be brief.")
        ]
        ask(asking, *USER, system=[billing, *blocks], tools=[])
    assert prompts[0] == prompts[1]
    assert prompts[0].startswith("<|im_start|>system\nYou help.\nBe brief.<|im_end|>\n<|im_start|>user\nhi")


def test_neighbours_of_one_role_are_one_turn(asking: anthropic.Anthropic, prompts: list[str]) -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask(asking, {"role": "user", "content": blocks}, *USER, {"role": "system", "content": "now"}, *USER, tools=[])
    turns = "user\na\nb\n\nhi<|im_end|>\n<|im_start|>system\nnow<|im_end|>\n<|im_start|>user\nhi<|im_end|>"
    assert prompts[0].startswith("<|im_start|>" + turns)


# Errors.


def wrong(response: httpx.Response, status: int, kind: str) -> str:
    body = response.json()
    assert (response.status_code, set(body), body["type"]) == (status, {"type", "error"}, "error"), body
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    return str(body["error"]["message"])


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED = [
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "'document'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
        "tool_use",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{}]}]}]},
        "messages[0].content[0].content[0]",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
    ({"tools": [WEATHER | {"defer_loading": True}]}, "defer_loading"),
    ({"tools": [WEATHER | {"input_examples": [{"city": "Rome"}]}]}, "input_examples"),
    ({"tools": [WEATHER, WEATHER]}, "weather"),
    ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
    ({"tools": [WEATHER | {"input_schema": {"type": "string"}}]}, "input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "name"),
    ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [WEATHER]}, "tool_choice"),
    ({"thinking": {"type": "always"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format: "),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool_uses_20250919"),
    ({"context_management": 1}, "context_management"),
    ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"safeguards": [{"type": "dangerous_tool_use"}]}, "safeguards"),
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"stop_sequences": [""]}, "stop"),
    ({"temperature": -1}, "temperature"),
    ({"n": 2}, "unknown field 'n'"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, "1024"),
]
ACCEPTED: list[dict[str, Any]] = [
    {"metadata": {"user_id": "u"}},
    {"service_tier": "auto"},
    {"speed": "standard"},
    {"inference_geo": "eu"},
    {"cache_control": {"type": "ephemeral"}},
    {"mcp_servers": []},
    {"container": None},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"context_management": {"edits": []}},
    {"tools": []},
    {"tool_choice": {"type": "auto"}},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
        ]
    },
]


@pytest.mark.parametrize(("fields", "named"), REFUSED, ids=lambda x: x if isinstance(x, str) else None)
def test_what_cannot_be_done_is_refused_by_name(server: Any, fields: dict[str, Any], named: str) -> None:
    assert named in wrong(post(server, **fields), 400, "invalid_request_error")


@pytest.mark.parametrize("fields", ACCEPTED, ids=lambda x: "-".join(x))
def test_what_cannot_change_the_answer_is_taken(server: Any, fields: dict[str, Any]) -> None:
    assert post(server, **fields).json()["content"] == post(server).json()["content"]


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN"])
def test_an_input_that_is_no_json_is_refused(server: Any, value: str) -> None:
    turn = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": 7}}]}
    body = json.dumps({"model": MODEL, "max_tokens": 1, "messages": [*USER, turn]}).replace("7", value)
    response = server.http.post("/v1/messages", content=body, headers={"content-type": "application/json"})
    assert "messages[1].content[0].input: " in wrong(response, 400, "invalid_request_error")


def test_tools_may_say_how_they_are_sent(server: Any) -> None:
    tool = WEATHER | {"type": "custom", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}
    told = post(server, tools=[tool | {"allowed_callers": ["direct"], "defer_loading": False}]).json()["content"]
    assert told == post(server, tools=[WEATHER]).json()["content"]


def test_errors_come_as_the_clients_own_exceptions(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'claude-x' is not served here"):
        client.messages.create(model="claude-x", messages=USER, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model=MODEL, messages=USER, max_tokens=1, extra_body={"temperature": -1}, stream=True)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="claude-x", messages=USER)


def test_paths_methods_and_bodies_fail_in_anthropics_shape(server: Any) -> None:
    wrong(server.http.get("/v1/messages"), 405, "invalid_request_error")
    wrong(server.http.post("/v1/messages/batches", json={}), 404, "not_found_error")
    headers = {"content-type": "application/json"}
    wrong(server.http.post("/v1/messages", content=b"{", headers=headers), 400, "invalid_request_error")
    wrong(
        server.http.post("/v1/messages", content=b"{}", headers={"content-type": "text/plain"}),
        400,
        "invalid_request_error",
    )


def test_keys_come_as_x_api_key_or_bearer(serve: Any) -> None:
    with serve(security=Security(keys=("k1",)), limits=Limits(max_body_bytes=300)) as own:
        with client_of(own, api_key="k1") as client:
            assert client.messages.create(model=MODEL, messages=USER, max_tokens=1).content
            with pytest.raises(anthropic.RequestTooLargeError):
                client.messages.create(model=MODEL, messages=[{"role": "user", "content": "x" * 400}], max_tokens=1)
        with client_of(own, api_key=None, auth_token="k1") as client:
            assert client.messages.create(model=MODEL, messages=USER, max_tokens=1).content
        with client_of(own, api_key="k2") as client, pytest.raises(anthropic.AuthenticationError):
            client.messages.create(model=MODEL, messages=USER, max_tokens=1)
        wrong(post(own), 401, "authentication_error")


def test_too_many_requests_and_a_server_that_is_not_ready(serve: Any, until: Any) -> None:
    with serve(limits=Limits(max_queue=0), places=1) as own, client_of(own) as client:
        own.backend.close_gate()
        stream = client.messages.create(model=MODEL, messages=USER, max_tokens=9, stream=True)
        until(lambda: own.service.in_flight == 1)
        with pytest.raises(anthropic.RateLimitError, match="--max-queue"):
            client.messages.create(model=MODEL, messages=USER, max_tokens=1)
        own.backend.open_gate()
        stream.close()
    with serve(ready=False) as own:
        assert "still loading" in wrong(post(own), 529, "overloaded_error")
        with client_of(own) as client, pytest.raises(anthropic.OverloadedError):
            client.messages.create(model=MODEL, messages=USER, max_tokens=1)


def test_an_error_in_the_middle_of_a_stream_is_raised(serve: Any) -> None:
    with serve(poison=33) as own, client_of(own) as client:
        messages: Any = [{"role": "user", "content": "A" * 200}]
        with pytest.raises(anthropic.APIStatusError, match="poisoned"):
            list(client.messages.create(model=MODEL, messages=messages, max_tokens=9, stream=True))
        with pytest.raises(anthropic.InternalServerError, match="poisoned"):
            client.messages.create(model=MODEL, messages=messages, max_tokens=9)


def test_closing_a_stream_frees_the_server(server: Any, client: anthropic.Anthropic, until: Any) -> None:
    server.backend.close_gate()
    server.backend.gate.release(3)
    stream = client.messages.create(model=MODEL, messages=USER, max_tokens=900, stream=True)
    next(iter(stream))
    stream.close()
    until(lambda: server.service.in_flight == 0)
    server.backend.open_gate()
    until(server.idle)
