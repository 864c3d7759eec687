"""Thoughts, through the official client: apart from the answer, counted, steered, and handed back to the template."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_templates import OPENED, QWEN3
from scripted import MARK, character_tokenizer

HI: Any = [{"role": "user", "content": "Why?"}]


class Asked:
    """A server of one model, and what it was asked."""

    def __init__(self, own: Any, prompts: list[str]) -> None:
        self.own = own
        self.prompts = prompts

    def __call__(self, **fields: Any) -> Any:
        body = {"model": "org/fake", "messages": HI, "max_tokens": 200, "temperature": 0} | fields
        response: httpx.Response = self.own.http.post("/v1/chat/completions", json=body)
        return response


def asked(serve: Any, folder: Path, template: str, says: str, mark: str) -> Iterator[Asked]:
    tokenizer = character_tokenizer(folder, template, added=["<think>", "</think>"])
    prompts: list[str] = []

    def script(prompt: str) -> str:
        if not prompts or prompts[-1] != prompt:
            prompts.append(prompt)
        return says

    with serve(script=(tokenizer, script, mark)) as own:
        yield Asked(own, prompts)


@pytest.fixture(scope="module")
def free(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """A model that begins a thought itself."""
    says = "<think>\nHm, so.\n</think>\n\nBecause."
    yield from asked(serve, tmp_path_factory.mktemp("free"), QWEN3, says, MARK)


@pytest.fixture(scope="module")
def opened(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """A model whose prompt begins it."""
    folder = tmp_path_factory.mktemp("opened")
    yield from asked(serve, folder, OPENED, "Hm, so.\n</think>\n\nBecause.", MARK + "<think>\n")


@pytest.mark.parametrize("name", ["free", "opened"])
def test_a_thought_is_apart_and_counted(name: str, request: pytest.FixtureRequest) -> None:
    ask = request.getfixturevalue(name)
    got = ask().json()
    message = got["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Because.", "refusal": None, "reasoning_content": "Hm, so."}
    marks = 2 if name == "free" else 1
    newlines = 4 if name == "free" else 3
    thought = len("Hm, so.") + marks + newlines - 2  # the two line breaks after it are none of it
    assert got["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
    assert got["usage"]["completion_tokens"] == thought + 2 + len("Because.")


@pytest.mark.parametrize("name", ["free", "opened"])
def test_a_thought_streams_before_the_answer(name: str, request: pytest.FixtureRequest) -> None:
    text = request.getfixturevalue(name)(stream=True).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line and "[DONE]" not in line]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, so."
    assert "".join(delta.get("content", "") for delta in deltas) == "Because."
    kinds = [kind for delta in deltas for kind in ("reasoning_content", "content") if delta.get(kind)]
    assert kinds == sorted(kinds, reverse=True)


def test_a_thought_that_is_cut_leaves_no_answer(free: Asked) -> None:
    choice = free(max_tokens=5).json()["choices"][0]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("", "Hm,")
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["free", "opened"])
def test_a_form_binds_what_comes_after_the_thought(name: str, request: pytest.FixtureRequest) -> None:
    ask = request.getfixturevalue(name)
    for fields in ({"regex": "Because[.] [a-c]+"}, {"grammar": 'start: "Because. a"'}):
        message = ask(**fields).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm, so."
        assert message["content"].startswith("Because. ")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 5}}}
    message = ask(response_format=schema).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, so.", "5")


def test_thoughts_of_this_turn_go_back_to_the_template_under_either_name(free: Asked) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for name in ("reasoning_content", "reasoning"):
        message = {"role": "assistant", "tool_calls": [call], name: "I call."}
        assert free(messages=[*HI, message, {"role": "tool", "tool_call_id": "a", "content": "x"}]).is_success
        assert "<think>\nI call.\n</think>\n\n<tool_call>" in free.prompts[-1]
    old = {"role": "assistant", "content": "So.", "reasoning_content": "Old."}
    assert free(messages=[*HI, old, *HI]).is_success
    assert "Old." not in free.prompts[-1], "the template drops those of earlier turns"


@pytest.mark.parametrize("effort", ["none", "minimal"])
def test_thoughts_are_switched_off_where_the_template_can(free: Asked, effort: str) -> None:
    tokens = {}
    for fields in ({"reasoning_effort": effort}, {"chat_template_kwargs": {"enable_thinking": False}}, {}):
        got = free(max_tokens=1, **fields).json()
        tokens[str(fields)] = got["usage"]["prompt_tokens"]
    off, also_off, on = tokens.values()
    assert off == also_off == on + 6


def test_an_effort_that_the_template_does_not_know_is_refused(opened: Asked) -> None:
    for effort in ("none", "high"):
        response = opened(reasoning_effort=effort)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "reasoning_effort"
