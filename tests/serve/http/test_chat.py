"""Chats: whole and streamed, as the fake model answers them, in OpenAI's form."""

import json
from typing import Any

import pytest

CHAT = "<user>hi\n<assistant>"


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_whole_answer_has_every_field(server: Any, expected: Any) -> None:
    got = server.chat().json()
    assert got["id"].startswith("chatcmpl-")
    assert (got["object"], got["model"]) == ("chat.completion", "org/fake")
    (choice,) = got["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected(CHAT, 5), "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert got["usage"] == {
        "prompt_tokens": len(CHAT),
        "completion_tokens": 5,
        "total_tokens": len(CHAT) + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stream_gives_the_same_text_then_the_usage_then_done(server: Any, expected: Any) -> None:
    response = server.chat(stream=True, stream_options={"include_usage": True}, max_tokens=7)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == expected(CHAT, 7)
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 7
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_without_include_usage_no_chunk_has_it(server: Any) -> None:
    assert all("usage" not in chunk for chunk in events(server.chat(stream=True).text))


def test_every_role_reaches_the_template_and_parts_are_joined(server: Any, expected: Any) -> None:
    messages = [
        {"role": "developer", "content": "a"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c", "cache_control": {}}],
        },
        {"role": "assistant", "content": "d", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "tool", "content": "e", "tool_call_id": "1"},
    ]
    got = server.chat(messages=messages).json()
    prompt = "<system>a\n<user>b\nc\n<assistant>d\n<tool>e\n<assistant>"
    assert got["choices"][0]["message"]["content"] == expected(prompt, 5)


def test_a_trailing_assistant_message_is_continued(server: Any, expected: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    got = server.chat(messages=messages).json()
    assert got["choices"][0]["message"]["content"] == expected("<user>hi\n<assistant>Well, ", 5)


def test_logprobs_have_every_token_with_its_bytes_and_rivals(server: Any, expected: Any) -> None:
    got = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in got) == expected(CHAT, 5)
    for entry in got:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] == -1.0
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-1.0, -2.0]
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    streamed = events(server.chat(logprobs=True, top_logprobs=2, stream=True).text)
    parts = [c["choices"][0]["logprobs"]["content"] for c in streamed if c["choices"][0]["logprobs"]]
    assert [entry for part in parts for entry in part] == got
    none = server.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert none[0]["top_logprobs"] == []


def test_n_answers_come_apart(server: Any, expected: Any) -> None:
    got = server.chat(n=3).json()
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in got["choices"]} == {expected(CHAT, 5)}
    assert got["usage"]["completion_tokens"] == 15
    assert got["usage"]["prompt_tokens"] == len(CHAT)
    texts = ["", "", ""]
    for chunk in events(server.chat(n=3, stream=True).text):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [expected(CHAT, 5)] * 3


@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_string_ends_the_answer_before_it(server: Any, expected: Any, as_list: bool) -> None:
    whole = expected(CHAT, 9)
    stop = whole[5:7]
    cut = whole[: whole.index(stop)]
    got = server.chat(max_tokens=9, stop=[stop, "never"] if as_list else stop).json()["choices"][0]
    assert (got["message"]["content"], got["finish_reason"]) == (cut, "stop")
    chunks = events(server.chat(max_tokens=9, stop=stop, stream=True).text)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == cut


def test_every_sampling_field_reaches_the_backend(server: Any) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 2, "7": -1.5},
        "seed": 42,
    }
    assert server.chat(**fields).status_code == 200
    first = next(s.sampling for s in server.backend.plans[-5].spans)
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ):
        assert getattr(first, name) == fields[name]
    assert first.logit_bias == ((5, 2.0), (7, -1.5))
    server.chat(**fields)
    assert server.backend.plans[-5].spans[0].sampling.uniform == first.uniform
    server.chat(**(fields | {"seed": 43}))
    assert server.backend.plans[-5].spans[0].sampling.uniform != first.uniform
    drawn = set()
    for _ in range(3):
        server.chat(temperature=1)
        drawn.add(server.backend.plans[-1].spans[0].sampling.uniform)
    assert len(drawn) == 3, "without a seed every request draws its own"


def test_max_completion_tokens_is_the_newer_name(server: Any) -> None:
    body = {"model": "org/fake", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 3}
    got = server.http.post("/v1/chat/completions", json=body).json()
    assert got["usage"]["completion_tokens"] == 3


def test_without_a_limit_the_answer_ends_at_the_context(serve: Any) -> None:
    with serve(context=128) as own:
        got = own.chat(max_tokens=None).json()
        assert got["usage"]["total_tokens"] == 128
        assert got["choices"][0]["finish_reason"] == "length"


def test_an_end_token_ends_the_answer_and_is_no_part_of_it(serve: Any, expected: Any) -> None:
    text = expected(CHAT, 4)
    with serve(eos=(ord(text[3]) - 32,)) as own:
        got = own.chat(max_tokens=50).json()["choices"][0]
        assert got["finish_reason"] == "stop"
        assert got["message"]["content"] == text[: text.index(text[3])]


def test_cached_tokens_are_what_was_reused(serve: Any) -> None:
    with serve() as own:
        messages = [{"role": "user", "content": "x" * 300}]
        first, second = (own.chat(messages=messages).json()["usage"] for _ in range(2))
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] // 64 * 64 > 0


def test_a_template_that_refuses_is_a_400(server: Any) -> None:
    response = server.chat(messages=[{"role": "user", "content": "refuse me"}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
