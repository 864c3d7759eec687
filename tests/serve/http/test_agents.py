"""What coding agents send is taken and answered, with models that know tools and with those that do not.

The bodies lie in tests/data/agents. Each second one is the turn after the first.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_model import agent_model
from chat_templates import HERMES, PLAIN, QWEN3

from kvarn.engine import Engine, EngineConfig
from kvarn.serve.loading import ModelOptions, load

FOLDER = Path(__file__).parents[2] / "data" / "agents"
BODIES = sorted(file.stem for file in FOLDER.glob("*.json"))
PAIRS = sorted(name.removesuffix("_1") for name in BODIES if name.endswith("_1"))
ENDS = {
    "/v1/chat/completions": "[DONE]",
    "/v1/messages?beta=true": "message_stop",
    "/v1/responses": "response.completed",
}


@pytest.fixture(scope="module", params=[QWEN3, HERMES, PLAIN], ids=["thinks", "calls", "plain"])
def agent(request: pytest.FixtureRequest, serve: Any, tmp_path_factory: Any) -> Iterator[Any]:
    script = agent_model(tmp_path_factory.mktemp("agent"), request.param)
    with serve(script=script, context=8192, blocks=200) as run:
        yield run


@pytest.fixture
def prompts(agent: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the prompts that reach the engine."""
    seen: list[str] = []
    submit, spell = agent.service.submit, agent.service.served.tokenizer.spell
    monkeypatch.setattr(
        agent.service, "submit", lambda params: (seen.extend(spell(p.prompt) for p in params), submit(params))[1]
    )
    return seen


def read(name: str) -> dict[str, Any]:
    asked: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return asked


def send(agent: Any, name: str) -> Any:
    asked = read(name)
    response = agent.http.post(asked["path"], json=asked["body"], headers=asked["headers"])
    assert response.status_code == 200, response.text
    return response


def names_of(tools: list[dict[str, Any]]) -> list[str]:
    """The names of all tools, those within namespaces too."""
    found = []
    for tool in tools:
        found += names_of(tool["tools"]) if "tools" in tool else [tool.get("function", tool)["name"]]
    return found


@pytest.mark.parametrize("name", BODIES)
def test_what_an_agent_sends_is_taken_and_answered(agent: Any, prompts: list[str], name: str) -> None:
    asked = read(name)
    response = send(agent, name)
    if asked["path"] not in ENDS:
        assert response.json()["input_tokens"] > 1000
        return
    last = response.text.rstrip().rsplit("data: ", 1)[1]
    assert (last if last == "[DONE]" else json.loads(last)["type"]) == ENDS[asked["path"]]
    (prompt,) = prompts
    assert "Fix the failing test in parser.py" in prompt
    assert "x-anthropic-billing-header" not in prompt
    assert [tool for tool in names_of(asked["body"]["tools"]) if tool not in prompt] == [], "no tool vanishes"


@pytest.mark.parametrize("name", PAIRS)
def test_the_second_turn_begins_with_the_first(agent: Any, prompts: list[str], name: str) -> None:
    for turn in ("1", "2"):
        send(agent, f"{name}_{turn}")
    first, second = prompts
    assert second.startswith(first), "so that the prefix cache gives the whole first turn"


def test_the_demo_model_says_the_same_on_all_three_endpoints(serve: Any, demo_dir: Path) -> None:
    loaded = load(ModelOptions(model=str(demo_dir), dtype="float32", device="cpu", backend="triton"))
    engine = Engine(loaded.backend, EngineConfig(context=512, max_sequences=2, blocks=8, slots=6))
    asked = {
        "model": "demo",
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    with serve(ready=False) as own:
        own.on_loop(lambda: own.service.open(engine, loaded.tokenizer, ("demo",)))
        own.http.timeout = 60
        chat = own.http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
        message = own.http.post("/v1/messages", json={**asked, "max_tokens": 50}).json()
        items = {"model": "demo", "temperature": 0, "input": asked["messages"]}
        response = own.http.post("/v1/responses", json=items).json()
    assert chat == "The capital of France is Paris."
    assert [block["text"] for block in message["content"]] == [chat]
    assert [part["text"] for item in response["output"] for part in item["content"]] == [chat]
    assert (message["stop_reason"], response["status"]) == ("end_turn", "completed")
    used = message["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == response["usage"]["input_tokens"]
