"""A long conversation of tool calls: every turn finds the whole turn before it in the prefix cache, to the block."""

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from chat_templates import HERMES, QWEN3
from scripted import MARK, Scripted

from kvarn.engine import Engine, EngineConfig
from kvarn.format import Preset
from kvarn.serve.loading import ModelOptions, load
from kvarn.serve.tokenizer import Tokenizer

TURNS = 40
TILE = 128
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.capitalize()}s a file of the project.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
        },
    }
    for name in ("read", "write")
]
TEXTS = ["", "Let me look at that file.", "Now I change it:\n\n* one line\n* another ", "Schön — weiter ☺."]


def arguments(turn: int) -> str:
    """JSON with any spacing that a model may choose."""
    value = {"path": f"src/части/file_{turn}.py", "text": f'if x < {turn}:\n\tprint("<tool_call>", {{}})\n'}
    return [
        json.dumps(value),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        json.dumps(value, indent=2),
        "{ }",
        json.dumps({"path": "x"}).replace("x", "\\u00fc\\/"),
    ][turn % 5]


def answer(turn: int, *, thinks: bool) -> str:
    """What the model says: a thought, some text, one call or two."""
    thought = f"<think>\nStep {turn}: read or write?\n</think>\n\n" if thinks else ""
    names = ["read", "write"][: 1 + (turn % 4 == 3)]
    made = [f'<tool_call>\n{{"name": "{name}", "arguments": {arguments(turn)}}}\n</tool_call>' for name in names]
    text = TEXTS[turn % len(TEXTS)].rstrip()
    return thought + "\n".join([text, *made] if text else made)


def result(turn: int) -> str:
    return "\n".join(f"{turn}.{line}: value = {line * turn}; <|im_end|> is text" for line in range(3 + turn % 3))


@pytest.mark.parametrize("form", ["described", "hermes", "qwen3"])
def test_forty_turns_of_calls_reuse_all_that_was_said(form: str, serve: Any, demo_dir: Path) -> None:
    tokenizer = Tokenizer(demo_dir)
    if form != "described":
        tokenizer._inner.chat_template = HERMES if form == "hermes" else QWEN3

    def script(prompt: str) -> str:
        return answer(prompt.count(MARK) - 1, thinks=form == "qwen3")

    backend = Scripted(Preset(tile_tokens=TILE), tokenizer, script, max_context=16384)
    config = EngineConfig(context=12288, prefill_chunk=512, max_sequences=2, blocks=220, slots=8)
    engine = Engine(backend, config)
    with (
        serve(ready=False) as own,
        httpx.Client(trust_env=False, timeout=60) as http,
        openai.OpenAI(base_url=f"{own.url}/v1", api_key="x", max_retries=0, http_client=http) as client,
    ):
        own.on_loop(lambda: own.service.open(engine, tokenizer, ("demo",)))
        messages: Any = [{"role": "system", "content": "You edit code."}, {"role": "user", "content": "Fix the bugs."}]
        before = 0
        for turn in range(TURNS):
            got = client.chat.completions.create(model="demo", messages=messages, tools=TOOLS, temperature=0)
            assert got.usage is not None
            assert got.usage.prompt_tokens_details is not None
            assert got.usage.prompt_tokens_details.cached_tokens == before // TILE * TILE, f"turn {turn}"
            before = got.usage.total_tokens
            message = got.choices[0].message
            assert got.choices[0].finish_reason == "tool_calls"
            assert [call.function.arguments for call in message.tool_calls or ()] == [arguments(turn)] * (
                1 + (turn % 4 == 3)
            )
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": result(turn)} for call in message.tool_calls or ()
            ]
        assert before > 6000


def test_the_demo_model_calls_and_goes_on_from_its_cache(serve: Any, demo_dir: Path) -> None:
    loaded = load(ModelOptions(model=str(demo_dir), dtype="float32", device="cpu", backend="triton"))
    engine = Engine(loaded.backend, EngineConfig(context=1024, max_sequences=2, blocks=12, slots=6))
    city = {"type": "string", "enum": ["Rome", "Oslo", "Lima"]}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    with (
        serve(ready=False) as own,
        httpx.Client(trust_env=False, timeout=60) as http,
        openai.OpenAI(base_url=f"{own.url}/v1", api_key="x", max_retries=0, http_client=http) as client,
    ):
        own.on_loop(lambda: own.service.open(engine, loaded.tokenizer, ("demo",)))
        messages: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
        before = 0
        for _ in range(3):
            fields: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
            got = client.chat.completions.create(model="demo", messages=messages, **fields)
            assert got.usage is not None
            assert got.usage.prompt_tokens_details is not None
            assert got.usage.prompt_tokens_details.cached_tokens == before // TILE * TILE
            before = got.usage.total_tokens
            (call,) = got.choices[0].message.tool_calls or ()
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments)["city"] in city["enum"]
            messages.append(got.choices[0].message)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny, 20 degrees. " * 12})
        assert before > 2 * TILE
