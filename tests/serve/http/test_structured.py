"""Structured output over HTTP: response_format, regex and grammar bind an answer, or are refused before it begins."""

import json
import re
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["name", "age"] and len(value["name"]) <= 5 and 0 <= value["age"] <= 99


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_binds_the_answer_strict_or_not(server: Any, strict: bool | None) -> None:
    fields = {"response_format": json_schema(PERSON, strict=strict, description="one"), "max_tokens": 100}
    chat = server.chat(**fields).json()["choices"][0]
    assert is_person(chat["message"]["content"])
    assert chat["finish_reason"] == "stop"
    completion = server.complete(**fields).json()["choices"][0]
    assert is_person(completion["text"])
    assert completion["finish_reason"] == "stop"


def test_a_stream_brings_the_same_text(server: Any) -> None:
    fields = {"response_format": json_schema(PERSON), "max_tokens": 100}
    want = server.chat(**fields).json()["choices"][0]["message"]["content"]
    with server.http.stream(
        "POST",
        "/v1/chat/completions",
        json={
            "model": "org/fake",
            "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0,
            "stream": True,
            **fields,
        },
    ) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == want
    assert choices[-1]["finish_reason"] == "stop"


def test_each_answer_of_several_keeps_to_the_schema(server: Any) -> None:
    fields = {"response_format": json_schema(PERSON), "max_tokens": 100}
    assert all(is_person(c["message"]["content"]) for c in server.chat(n=3, **fields).json()["choices"])
    choices = server.complete(prompt=["a", "b"], n=2, **fields).json()["choices"]
    assert len(choices) == 4
    assert all(is_person(choice["text"]) for choice in choices)


def test_json_object_is_an_object(server: Any) -> None:
    text = server.complete(response_format={"type": "json_object"}, max_tokens=20).json()["choices"][0]["text"]
    assert text.startswith("{")
    with_schema = {"type": "json_object", "schema": PERSON}  # as llama.cpp's users write it
    assert is_person(server.complete(response_format=with_schema, max_tokens=100).json()["choices"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": r"[a-c]{3}-[0-9]+(x|y)z"}, r"[a-c]{3}-[0-9]+(x|y)z"),
        ({"regex": "a/b\nc"}, "a/b\nc"),
        ({"grammar": 'start: "<" word ">"\nword: /[a-z]{2,4}/'}, "<[a-z]{2,4}>"),
    ],
)
def test_a_regex_and_a_grammar_bind_the_answer(server: Any, fields: dict[str, Any], pattern: str) -> None:
    for choice in (
        server.complete(max_tokens=300, **fields).json()["choices"][0],
        server.chat(max_tokens=300, **fields).json()["choices"][0],
    ):
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice.get("text") or choice["message"]["content"])


def test_max_tokens_cuts_the_answer_and_says_so(server: Any) -> None:
    choice = server.complete(response_format=json_schema(PERSON), max_tokens=4).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["text"]) == 4


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": json_schema(False)}, "response_format", "cannot be met"),
        ({"response_format": json_schema({"type": "integer", "minimum": 3, "maximum": 2})}, "response_format", "(3)"),
        ({"response_format": json_schema({"type": "array", "uniqueItems": True})}, "response_format", "uniqueItems"),
        ({"response_format": json_schema({"$ref": "https://example.com/x"})}, "response_format", "https://example.com"),
        ({"response_format": json_schema({"type": "string", "pattern": "(a"})}, "response_format", "unclosed group"),
        ({"response_format": json_schema({"type": "string", "format": "shoe"})}, "response_format", "shoe"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"regex": "(?=a)b"}, "regex", "look-around"),
        ({"regex": "x" * 70_000}, "regex", "70000"),
        ({"grammar": 'root ::= "a"'}, "grammar", "GBNF"),
        ({"grammar": "start: other"}, "grammar", "other"),
        ({"regex": "a", "grammar": 'start: "a"'}, "grammar", "exclude each other"),
        ({"regex": "a", "response_format": json_schema({})}, "regex", "exclude each other"),
    ],
)
def test_what_cannot_be_met_is_refused_before_the_first_token(
    server: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    plans = len(server.backend.plans)
    for response in (server.complete(stream=True, **fields), server.chat(stream=True, **fields)):
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert words in error["message"]
    assert len(server.backend.plans) == plans


def test_a_bias_that_leaves_nothing_is_an_error_by_name_and_ends_no_other_answer(server: Any, until: Any) -> None:
    a = 65 - 32  # the fake tokenizer's "A"
    plain = server.complete(max_tokens=5).json()["choices"][0]["text"]
    response = server.complete(regex="A+B", logit_bias={str(a): -100, str(a + 1): -100})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "constraint_failed"
    assert "logit_bias" in response.json()["error"]["message"]
    assert server.complete(max_tokens=5).json()["choices"][0]["text"] == plain
    only = server.complete(regex="A+B", max_tokens=50, logit_bias={str(a + 1): -100}).json()["choices"][0]
    assert set(only["text"]) <= {"A", "B"}
    until(server.idle)


class Pet(BaseModel):
    """A pet."""

    name: str = Field(description="what it is called", pattern="^[A-Z][a-z]{1,4}$")
    kind: Literal["cat", "dog"]


class Household(BaseModel):
    pets: list[Pet] = Field(max_length=2)
    size: int | None


def test_the_official_client_asks_for_a_model_class_and_gets_its_object(server: Any) -> None:
    with (
        httpx.Client(trust_env=False, timeout=20) as http,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, http_client=http) as client,
    ):
        fields: Any = {"model": "org/fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400}
        parsed = client.chat.completions.parse(response_format=Household, **fields).choices[0].message.parsed
        assert isinstance(parsed, Household)
        with client.chat.completions.stream(response_format=Household, **fields) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "stop"
        assert isinstance(final.message.parsed, Household)
        plain = client.chat.completions.create(response_format={"type": "text"}, **fields | {"max_tokens": 5})
        assert plain.choices[0].finish_reason == "length"
        schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}
        with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
            client.chat.completions.create(response_format=schema, **fields)
        assert refused.value.param == "response_format"
        regex = client.completions.create(
            model="org/fake", prompt="hi", max_tokens=50, extra_body={"regex": "(yes|no), [a-z]{3}"}
        )
        assert re.fullmatch("(yes|no), [a-z]{3}", regex.choices[0].text)
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(response_format=Household, **fields | {"max_tokens": 4})
