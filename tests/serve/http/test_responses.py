"""The official openai client on /v1/responses: answers, events, tools, thoughts, errors, and hanging up."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from agent_model import ANSWER, CALLS, SAID, THOUGHT, agent_model, write_call

from kvarn.serve.http.items import SEALED
from kvarn.serve.http.security import Security
from kvarn.serve.http.service import Limits

MODEL = "org/fake"
CHAT = "<user>hi\n<assistant>"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "strict": False,
}
ASK: Any = {"role": "user", "content": "What is the weather?"}


def client_of(run: Any, **fields: Any) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False, timeout=20)
    fields = {"api_key": "unused", "max_retries": 0, "http_client": http} | fields
    return openai.OpenAI(base_url=f"{run.url}/v1", **fields)


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


@pytest.fixture(scope="module")
def agent(serve: Any, tmp_path_factory: Any) -> Iterator[Any]:
    with serve(script=agent_model(tmp_path_factory.mktemp("agent")), context=2048) as run:
        yield run


@pytest.fixture
def asking(agent: Any) -> Iterator[openai.OpenAI]:
    with client_of(agent) as made:
        yield made


@pytest.fixture
def prompts(agent: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the prompts that reach the engine."""
    seen: list[str] = []
    submit, spell = agent.service.submit, agent.service.served.tokenizer.spell
    monkeypatch.setattr(
        agent.service, "submit", lambda params: (seen.extend(spell(p.prompt) for p in params), submit(params))[1]
    )
    return seen


def post(run: Any, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 4, "temperature": 0} | fields
    return run.http.post("/v1/responses", json=body)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose names and numbers are checked."""
    lines = response.text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events: list[dict[str, Any]] = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events] == names
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def ask(asking: openai.OpenAI, *items: Any, **fields: Any) -> Any:
    fields = {"model": MODEL, "tools": [WEATHER]} | fields
    return asking.responses.create(input=list(items), **fields)


# Text.


def test_a_whole_answer(client: openai.OpenAI, expected: Any) -> None:
    response = client.responses.create(model=MODEL, input="hi", max_output_tokens=6)
    assert response.output_text == expected(CHAT, 6)
    (message,) = response.output
    assert (message.type, message.status) == ("message", "incomplete")  # type: ignore[union-attr]
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(CHAT), 6)
    assert response.usage.total_tokens == len(CHAT) + 6
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert (response.object, response.model, response.max_output_tokens) == ("response", MODEL, 6)


def test_a_stream_has_openais_events_in_order(server: Any, client: openai.OpenAI, expected: Any) -> None:
    events = events_of(post(server, max_output_tokens=3, stream=True))
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 3,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1
    assert events[-1]["response"]["output"][0] == events[-2]["item"]
    assert events[0]["response"]["status"] == "in_progress"
    with client.responses.stream(model=MODEL, input="hi", max_output_tokens=3) as stream:
        seen = list(stream)
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == expected(CHAT, 3)
    assert seen[-1].type == "response.incomplete"
    assert seen[-1].response.usage is not None


def test_an_answer_that_ends_by_itself_is_completed(asking: openai.OpenAI) -> None:
    response = ask(asking, {"role": "user", "content": "hi"})
    assert (response.status, response.output_text, response.incomplete_details) == ("completed", "You said: hi", None)
    with asking.responses.stream(model=MODEL, input="hi") as stream:
        assert [event.type for event in stream][-1] == "response.completed"


def test_nothing_is_stored_and_the_answer_says_so(server: Any) -> None:
    got = post(server, store=True, metadata={"a": "b"}, instructions="Be brief.", top_p=0.5).json()
    assert (got["store"], got["metadata"], got["instructions"]) == (False, {"a": "b"}, "Be brief.")
    assert (got["temperature"], got["top_p"], got["truncation"]) == (0, 0.5, "disabled")


def test_options_of_a_stream_change_nothing(server: Any) -> None:
    options = {"reasoning_summary_delivery": "sequential_cutoff", "include_obfuscation": False}
    streamed = [events_of(post(server, stream=True, **fields)) for fields in ({}, {"stream_options": options})]
    texts = ["".join(event.get("delta", "") for event in events) for events in streamed]
    assert texts[0] == texts[1] != ""


def test_cached_tokens_are_reported(serve: Any) -> None:
    with serve() as own, client_of(own) as client:
        for cached in (0, 192):
            response = client.responses.create(model=MODEL, input="x" * 200, max_output_tokens=2)
            assert response.usage is not None
            assert response.usage.input_tokens_details.cached_tokens == cached


# Items.


def test_instructions_items_and_parts_become_turns(asking: openai.OpenAI, prompts: list[str]) -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
        {"role": "user", "content": "c"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "phase": "final_answer",
            "content": [{"type": "output_text", "text": "d", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "e"},
    ]
    ask(asking, *items, instructions="You help.", tools=[])
    turns = ["system\nYou help.\n\nBe brief.", "user\na\nb\n\nc", "assistant\nd", "user\ne", "assistant\n"]
    assert prompts[0] == "<|im_end|>\n".join(f"<|im_start|>{turn}" for turn in turns)


def test_a_last_message_of_the_assistant_is_continued(server: Any, expected: Any) -> None:
    items = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    (message,) = post(server, input=items).json()["output"]
    assert message["content"][0]["text"] == expected(CHAT + "so", 4)


# Tools and thoughts.


def test_a_thought_a_text_and_two_calls_are_items_in_order(asking: openai.OpenAI) -> None:
    whole = ask(asking, ASK)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, message, *calls = whole.output
    assert (thought.content[0].text, thought.summary, thought.encrypted_content) == (THOUGHT, [], None)
    assert message.content[0].text == SAID
    assert [(call.name, call.arguments) for call in calls] == list(CALLS)
    assert len({call.call_id for call in calls}) == 2
    assert {item.status for item in whole.output} == {"completed"}
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert whole.tools[0].name == "weather"


def test_a_stream_gives_the_same_items_in_official_order(agent: Any, asking: openai.OpenAI) -> None:
    events = events_of(post(agent, input=[ASK], tools=[WEATHER], stream=True, max_output_tokens=None))
    order: list[tuple[str, int | None]] = []
    for event in events:
        name = (event["type"].removeprefix("response."), event.get("output_index"))
        if not order or order[-1] != name:
            order.append(name)
    call = ("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done")
    assert order == [
        ("created", None),
        ("in_progress", None),
        *[(k, 0) for k in ("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done")],
        *[(k, 0) for k in ("content_part.done", "output_item.done")],
        *[(k, 1) for k in ("output_item.added", "content_part.added", "output_text.delta", "output_text.done")],
        *[(k, 1) for k in ("content_part.done", "output_item.done")],
        *[(k, 2) for k in call],
        *[(k, 3) for k in call],
        ("completed", None),
    ]
    final = events[-1]["response"]
    assert final["output"] == [event["item"] for event in events if event["type"] == "response.output_item.done"]
    whole = ask(asking, ASK).model_dump(mode="json", warnings=False)
    assert [item["type"] for item in final["output"]] == [item["type"] for item in whole["output"]]
    assert [item.get("arguments") for item in final["output"]] == [item.get("arguments") for item in whole["output"]]
    with asking.responses.stream(model=MODEL, input=[ASK], tools=[WEATHER]) as stream:
        parsed = stream.get_final_response()
    assert [item.arguments for item in parsed.output if item.type == "function_call"] == [text for _, text in CALLS]


def test_calls_thoughts_and_results_go_back(asking: openai.OpenAI, prompts: list[str]) -> None:
    first = ask(asking, ASK)
    calls = [item for item in first.output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": calls[0].call_id, "output": "21 degrees"},
        {
            "type": "function_call_output",
            "call_id": calls[1].call_id,
            "output": [{"type": "input_text", "text": "snow"}, {"type": "input_image", "image_url": "data:,"}],
        },
    ]
    second = ask(asking, ASK, *first.output, *results)
    assert second.output_text == ANSWER
    asked, answered = prompts
    told = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{write_call(*CALLS[0])}\n{write_call(*CALLS[1])}<|im_end|>\n"
    assert answered.startswith(asked + told), "the model's own text, for the prefix cache"
    assert "<tool_response>\n21 degrees\n</tool_response>" in answered
    note = "[image: it cannot be shown to this model, which reads text only]"
    assert f"<tool_response>\nsnow\n{note}\n</tool_response>" in answered
    whole = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens == whole // 64 * 64, "all of the first turn, to the tile"


def test_a_thought_goes_back_sealed_as_codex_sends_it(asking: openai.OpenAI, prompts: list[str]) -> None:
    first = ask(asking, ASK, include=["reasoning.encrypted_content"], store=False)
    sealed = first.output[0].encrypted_content
    assert sealed.startswith(SEALED)
    call = first.output[2]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    for text, seen in ((sealed, True), ("gAAAAA", False), (SEALED + "???", False)):
        thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": text}
        assert ask(asking, ASK, thought, call, result).output_text == ANSWER
        assert (f"<think>\n{THOUGHT}\n</think>" in prompts[-1]) is seen


def test_one_call_at_a_time_and_none(asking: openai.OpenAI) -> None:
    single = ask(asking, ASK, parallel_tool_calls=False)
    assert [item.type for item in single.output] == ["reasoning", "message", "function_call"]
    none = ask(asking, ASK, tool_choice="none")
    assert [item.type for item in none.output] == ["reasoning", "message"]


def test_calls_are_forced(asking: openai.OpenAI) -> None:
    fields: Any = {"reasoning": {"effort": "none"}, "max_output_tokens": 200}
    for choice in ("required", {"type": "function", "name": "weather"}):
        forced = ask(asking, {"role": "user", "content": "hi"}, tool_choice=choice, **fields)
        assert {item.type for item in forced.output} == {"function_call"}
        assert {item.name for item in forced.output} == {"weather"}
    assert forced.tool_choice.model_dump() == {"type": "function", "name": "weather"}


def test_effort_none_switches_thoughts_off(asking: openai.OpenAI, prompts: list[str]) -> None:
    ask(asking, ASK, reasoning={"effort": "none"})
    ask(asking, ASK, reasoning={"effort": "medium", "summary": "auto"})
    assert [prompt.endswith("<think>\n\n</think>\n\n") for prompt in prompts] == [True, False]


def test_a_model_that_does_not_think_takes_any_effort(server: Any) -> None:
    for effort in ("none", "low", "xhigh"):
        assert post(server, reasoning={"effort": effort, "summary": "detailed"}).status_code == 200


PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "***" /.+/'},
}


def test_a_custom_tool_is_a_function_with_one_text(agent: Any, asking: openai.OpenAI, prompts: list[str]) -> None:
    told = {"role": "user", "content": "write " + write_call("apply_patch", '{"input": "*** a\\n+\\u00e9"}')}
    first = ask(asking, told, tools=[PATCH])
    (call,) = first.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", "*** a\n+é")
    assert 'start: \\"***\\"' in prompts[0]
    events = events_of(post(agent, input=[told], tools=[PATCH], stream=True, max_output_tokens=None))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[2:-1] == [
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
    ]
    assert events[4]["input"] == events[3]["delta"] == call.input
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    assert ask(asking, told, call, result, tools=[PATCH]).output_text == ANSWER
    assert '"arguments": {"input": "*** a\\n+é"}' in prompts[-1]


def test_what_is_no_call_of_a_custom_tool_is_its_text(asking: openai.OpenAI) -> None:
    told = {"role": "user", "content": "write " + write_call("apply_patch", '{"patch": 1}')}
    (call,) = ask(asking, told, tools=[PATCH]).output
    assert call.input == '{"patch": 1}'


def test_a_namespace_is_told_apart_for_the_client_only(asking: openai.OpenAI, prompts: list[str]) -> None:
    spaces: Any = [
        {"type": "namespace", "name": name, "description": "Orders.", "tools": [WEATHER | {"name": "look"}, PATCH]}
        for name in ("mcp__shop__", "crm")
    ]
    told = {"role": "user", "content": "write " + write_call("crm__look", "{}") + write_call("mcp__shop__look", "{}")}
    first = ask(asking, told, tools=spaces)
    calls = [(call.namespace, call.name) for call in first.output]
    assert calls == [("crm", "look"), ("mcp__shop__", "look")]
    results = [{"type": "function_call_output", "call_id": c.call_id, "output": "1"} for c in first.output]
    ask(asking, told, *first.output, *results, tools=spaces)
    assert write_call("crm__look", "{}") + "\n" + write_call("mcp__shop__look", "{}") in prompts[-1]
    assert "mcp__shop__apply_patch" in prompts[0]


def test_a_name_that_the_model_made_up_and_arguments_that_were_cut_stay_as_they_are(asking: openai.OpenAI) -> None:
    told = {"role": "user", "content": "write " + write_call("nobody", '{"a": 1}')}
    assert ask(asking, told).output[0].name == "nobody"
    cut = write_call("weather", '{"city": "Ro').split("}")[0]
    response = ask(asking, {"role": "user", "content": "write " + cut})
    assert response.output[0].arguments.startswith('{"city": "Ro')
    short = ask(asking, ASK, max_output_tokens=len(f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n<tool_call>\n") + 50)
    assert (short.status, short.output[-1].type, short.output[-1].status) == (
        "incomplete",
        "function_call",
        "incomplete",
    )


# The form of an answer.


def test_a_json_schema_binds_the_answer(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    response = client.responses.create(model=MODEL, input="hi", max_output_tokens=60, text=form)
    assert 0 <= json.loads(response.output_text)["age"] <= 99
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    whole = client.responses.create(
        model=MODEL, input="hi", max_output_tokens=20, text={"format": {"type": "json_object"}}
    )
    assert whole.output_text.startswith("{")
    assert whole.text is not None
    assert whole.text.format is not None
    assert whole.text.format.type == "json_object"


# Errors.


def wrong(response: httpx.Response, status: int) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert (response.status_code, set(error)) == (status, {"message", "type", "param", "code"}), error
    return error


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input[0]"),
    ({"input": [{"id": "rs_1"}]}, "input[0]"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "image_generation"}]}, "tools[0].type"),
    ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]}, "tools[0].tools[0].type"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]}, "tools[0].tools[0].type"),
    ({"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [WEATHER | {"name": ""}]}, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [PATCH | {"format": {"type": "grammar"}}]}, "tools[0].format.definition"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"messages": []}, "messages"),
    ({"stop": "x"}, "stop"),
]
ACCEPTED: list[dict[str, Any]] = [
    {"store": True},
    {"store": False},
    {"input": [{"role": "user", "content": "hi", "metadata": {"turn_id": "t"}}]},
    {"background": False},
    {"previous_response_id": None},
    {"client_metadata": {"a": "b"}},
    {"prompt_cache_key": "k"},
    {"safety_identifier": "s"},
    {"service_tier": "priority"},
    {"user": "u"},
    {"metadata": {"a": "b"}},
    {"truncation": "disabled"},
    {"max_tool_calls": 3},
    {"top_logprobs": 0},
    {"text": {"verbosity": "medium", "format": {"type": "text"}}},
    {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]},
    {"reasoning": None},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda x: x if isinstance(x, str) else None)
def test_what_cannot_be_done_is_refused_by_name(server: Any, fields: dict[str, Any], param: str) -> None:
    assert wrong(post(server, **fields), 400)["param"] == param


@pytest.mark.parametrize("fields", ACCEPTED, ids=lambda x: "-".join(x))
def test_what_cannot_change_the_answer_is_taken(server: Any, fields: dict[str, Any]) -> None:
    got, want = post(server, **fields).json()["output"][0], post(server).json()["output"][0]
    assert got["content"] == want["content"]


def test_errors_come_as_the_clients_own_exceptions(serve: Any, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="gpt-5", input="hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(model=MODEL, input="x" * 2000)
    assert long.value.code == "context_length_exceeded"
    with serve(security=Security(keys=("k",)), limits=Limits(max_queue=0)) as own:
        with client_of(own) as stranger, pytest.raises(openai.AuthenticationError):
            stranger.responses.create(model=MODEL, input="hi")
        with client_of(own, api_key="k") as known:
            assert known.responses.create(model=MODEL, input="hi", max_output_tokens=1).output_text


def test_a_stream_that_fails_ends_with_an_error_and_the_failed_response(serve: Any) -> None:
    with serve(poison=33) as own:
        events = events_of(post(own, input="A" * 200, stream=True))
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert "poisoned" in events[-2]["message"]
        assert events[-1]["response"]["status"] == "failed"
        assert events[-1]["response"]["error"]["message"] == events[-2]["message"]
        with client_of(own) as client, pytest.raises(openai.InternalServerError, match="poisoned"):
            client.responses.create(model=MODEL, input="A" * 200)


def test_closing_a_stream_frees_the_server(server: Any, client: openai.OpenAI, until: Any) -> None:
    server.backend.close_gate()
    server.backend.gate.release(3)
    stream = client.responses.create(model=MODEL, input="hi", max_output_tokens=900, stream=True)
    next(iter(stream))
    stream.close()
    until(lambda: server.service.in_flight == 0)
    server.backend.open_gate()
    until(server.idle)
