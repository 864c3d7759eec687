"""Raw prompts in every form, echo, and log-probabilities in the older form."""

import json
from typing import Any


def test_a_string_and_its_ids_give_the_same(server: Any, expected: Any) -> None:
    text = server.complete(prompt="hello").json()
    ids = server.complete(prompt=[ord(c) - 32 for c in "hello"]).json()
    assert text["object"] == "text_completion"
    assert text["choices"][0]["text"] == ids["choices"][0]["text"] == expected("hello", 5)
    assert text["usage"]["prompt_tokens"] == 5


def test_several_prompts_keep_their_order(server: Any, expected: Any) -> None:
    for prompt in (["a", "bb", "ccc"], [[65], [66, 66], [67] * 3]):
        got = server.complete(prompt=prompt, n=2).json()
        assert [choice["index"] for choice in got["choices"]] == list(range(6))
        want = [expected(p if isinstance(p, str) else "".join(chr(32 + x) for x in p), 5) for p in prompt]
        assert [choice["text"] for choice in got["choices"]] == [want[i // 2] for i in range(6)]
        assert got["usage"]["prompt_tokens"] == 6
        assert got["usage"]["completion_tokens"] == 30


def test_echo_puts_the_prompt_first(server: Any, expected: Any) -> None:
    got = server.complete(prompt=["ab", [33, 34]], echo=True).json()
    assert got["choices"][0]["text"] == "ab" + expected("ab", 5)
    assert got["choices"][1]["text"] == "AB" + expected("AB", 5)
    only = server.complete(prompt="ab", echo=True, max_tokens=0).json()
    assert only["choices"][0]["text"] == "ab"
    assert only["usage"]["completion_tokens"] == 0
    text = server.complete(prompt="ab", echo=True, stream=True).text
    parts = [json.loads(line[6:]) for line in text.split("\n\n") if line and "[DONE]" not in line]
    assert "".join(part["choices"][0]["text"] for part in parts) == "ab" + expected("ab", 5)


def test_logprobs_have_tokens_rivals_and_offsets(server: Any, expected: Any) -> None:
    got = server.complete(logprobs=2).json()["choices"][0]["logprobs"]
    assert "".join(got["tokens"]) == expected("hi", 5)
    assert got["token_logprobs"] == [-1.0] * 5
    assert got["text_offset"] == [0, 1, 2, 3, 4]
    for token, top in zip(got["tokens"], got["top_logprobs"], strict=True):
        assert len(top) == 2
        assert top[token] == -1.0
    none = server.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert [list(top) for top in none["top_logprobs"]] == [[token] for token in none["tokens"]]
    assert server.complete().json()["choices"][0]["logprobs"] is None


def test_without_a_limit_an_answer_has_sixteen_tokens(server: Any) -> None:
    body = {"model": "org/fake", "prompt": "hi"}
    assert server.http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 16


def test_one_prompt_that_does_not_fit_refuses_the_request_before_any_runs(server: Any) -> None:
    before = len(server.backend.plans)
    response = server.complete(prompt=["a", "b" * 1024])
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "1024 tokens" in error["message"]
    assert "context of 1024" in error["message"]
    assert len(server.backend.plans) == before


def test_token_ids_outside_the_vocabulary_are_refused(server: Any) -> None:
    for prompt in ([97], [-1], [[1], [10**30]]):
        error = server.complete(prompt=prompt).json()["error"]
        assert (error["param"], error["type"]) == ("prompt", "invalid_request_error")
        assert "not between 0 and 96" in error["message"]
