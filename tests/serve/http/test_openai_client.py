"""The official client against a real server: answers, streams, errors, and hanging up."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvarn.engine import Engine, EngineConfig
from kvarn.serve.loading import ModelOptions, load
from kvarn.serve.tokenizer import Tokenizer

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CHAT = "<user>hi\n<assistant>"


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(trust_env=False, timeout=20) as http,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, http_client=http) as made,
    ):
        yield made


def test_chats_and_completions_whole_and_streamed(client: openai.OpenAI, expected: Any) -> None:
    fields: Any = {"model": "org/fake", "max_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(messages=MESSAGES, **fields)
    assert whole.choices[0].message.content == expected(CHAT, 6)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    stream = client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **fields
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected(CHAT, 6)
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens  # type: ignore[union-attr]
    assert client.completions.create(prompt="hi", **fields).choices[0].text == expected("hi", 6)
    parts = client.completions.create(prompt="hi", stream=True, logprobs=1, **fields)
    assert "".join(part.choices[0].text for part in parts) == expected("hi", 6)


def test_an_answer_can_be_sent_back_as_the_client_holds_it(client: openai.OpenAI, expected: Any) -> None:
    fields: Any = {"model": "org/fake", "max_tokens": 3, "temperature": 0}
    message = client.chat.completions.create(messages=MESSAGES, **fields).choices[0].message
    messages: Any = [*MESSAGES, message, {"role": "user", "content": "more"}]
    again = client.chat.completions.create(messages=messages, **fields)
    prompt = f"{CHAT}{message.content}\n<user>more\n<assistant>"
    assert again.choices[0].message.content == expected(prompt, 3)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["org/fake"]
    assert client.models.retrieve("org/fake").id == "org/fake"


def test_errors_come_as_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="org/fake", messages=MESSAGES, functions=[{"name": "f"}])
    assert bad.value.param == "functions"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="org/fake", prompt="x" * 2000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        create(model="org/fake", messages=MESSAGES, stream=True, temperature=-1)


def test_an_error_in_the_middle_of_a_stream_is_raised(serve: Any) -> None:
    with (
        serve(poison=33) as own,
        httpx.Client(trust_env=False) as http,
        openai.OpenAI(base_url=f"{own.url}/v1", api_key="x", max_retries=0, http_client=http) as client,
    ):
        stream = client.completions.create(model="org/fake", prompt="A" * 200, stream=True)
        with pytest.raises(openai.APIError, match="poisoned"):
            list(stream)


def test_closing_a_stream_frees_the_server(server: Any, client: openai.OpenAI, until: Any) -> None:
    server.backend.close_gate()
    server.backend.gate.release(3)
    stream = client.chat.completions.create(model="org/fake", messages=MESSAGES, max_tokens=900, stream=True)
    next(iter(stream))
    stream.close()
    until(lambda: server.service.in_flight == 0)
    server.backend.open_gate()
    until(server.idle)


def test_cancelling_a_task_of_the_async_client_frees_the_server(server: Any, until: Any) -> None:
    server.backend.close_gate()

    async def ask() -> None:
        async with (
            httpx.AsyncClient(trust_env=False) as http,
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, http_client=http) as client,
        ):
            task = asyncio.ensure_future(
                client.chat.completions.create(model="org/fake", messages=MESSAGES, max_tokens=900)
            )
            await asyncio.to_thread(until, lambda: server.service.in_flight == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(ask())
    until(lambda: server.service.in_flight == 0)
    server.backend.open_gate()
    until(server.idle)


def test_the_demo_model_answers_the_official_client(serve: Any, demo_dir: Path) -> None:
    loaded = load(ModelOptions(model=str(demo_dir), dtype="float32", device="cpu", backend="triton"))
    engine = Engine(loaded.backend, EngineConfig(context=512, max_sequences=2, blocks=8, slots=6))
    assert isinstance(loaded.tokenizer, Tokenizer)
    with (
        serve(ready=False) as own,
        httpx.Client(trust_env=False, timeout=60) as http,
        openai.OpenAI(base_url=f"{own.url}/v1", api_key="x", max_retries=0, http_client=http) as client,
    ):
        own.on_loop(lambda: own.service.open(engine, loaded.tokenizer, ("demo",)))
        messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
        stream = client.chat.completions.create(model="demo", messages=messages, temperature=0, stream=True)
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "The capital of France is Paris."
        assert chunks[-1].choices[0].finish_reason == "stop"
        messages += [{"role": "assistant", "content": "The capital of"}]
        whole = client.chat.completions.create(model="demo", messages=messages, temperature=0, logprobs=True)
        assert whole.choices[0].message.content == " France is Paris."
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.content is not None
        tokens = whole.choices[0].logprobs.content
        assert b"".join(bytes(x.bytes or []) for x in tokens).decode() == " France is Paris."
