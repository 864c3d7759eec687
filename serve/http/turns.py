"""Messages in the chat templates' form out of blocks and items: neighbours of one speaker become one turn."""

from collections.abc import Mapping, Sequence
from typing import Any


def joined_turns(messages: Sequence[Mapping[str, Any]], *, later_system: bool) -> list[dict[str, Any]]:
    """The same messages with neighbours of one role as one message; results of calls stay apart.

    Agents send several texts in a row where many templates want the speakers to take turns. Texts of the assistant are
    pieces of one answer and are put together as they are; others are told apart by an empty line. later_system: the
    template takes system messages after others; else such a message is told by the user, in tags.
    """
    turns: list[dict[str, Any]] = []
    for given in messages:
        message = dict(given)
        if message["role"] == "system" and not later_system and any(turn["role"] != "system" for turn in turns):
            message = {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}
        last = turns[-1] if turns else None
        if last is None or message["role"] == "tool" or message["role"] != last["role"]:
            turns.append(message)
            continue
        between = "\n\n" if message["role"] != "assistant" and last["content"] and message["content"] else ""
        last["content"] += between + message["content"]
        if thought := message.get("reasoning_content"):
            last["reasoning_content"] = last.get("reasoning_content", "") + thought
        if calls := message.get("tool_calls"):
            last["tool_calls"] = [*last.get("tool_calls", ()), *calls]
    return turns


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A message of the assistant that is one call. arguments: JSON text."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
