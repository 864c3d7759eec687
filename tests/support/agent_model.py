"""A model for tests of the endpoints of agents: it thinks, calls two tools at once, and answers their results."""

from pathlib import Path

from chat_templates import QWEN3
from scripted import END, Script, character_tokenizer

from kvarn.serve.tokenizer import Tokenizer

THOUGHT = "Two cities."
SAID = "Let me look."
CALLS = (("weather", '{"city": "Rome"}'), ("weather", '{"city":  "Oslo", "days": 2}'))
ANSWER = "Rome is warm."


def write_call(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def agent_script(prompt: str) -> str:
    """What it is told to write, the answer to results, calls to learn the weather, or an echo."""
    last = prompt.removesuffix("<|im_start|>assistant\n").rsplit("<|im_start|>user\n", 1)[-1].split(END)[0]
    if last.startswith("write "):
        return last.removeprefix("write ")
    if last.startswith("<tool_response>"):
        return f"<think>\nI know.\n</think>\n\n{ANSWER}"
    if "weather" in last:
        calls = "\n".join(write_call(*call) for call in CALLS)
        return f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{calls}"
    return f"You said: {last}"


def agent_model(folder: Path, template: str = QWEN3) -> tuple[Tokenizer, Script]:
    """What the server of tests/serve/http takes as its script."""
    return character_tokenizer(folder, template), agent_script
