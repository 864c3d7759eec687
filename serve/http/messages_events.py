"""Answers in Anthropic's shape: whole messages, and the events of a stream."""

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvarn.serve.http.answer import Tally
from kvarn.serve.http.errors import ApiError, anthropic_body
from kvarn.serve.http.items import Change, Closed, Grown, Item, Opened, Row, named_event, seal_thought

UNSIGNED = "kvarn"  # the signature of a thought that is sent as it is: clients want one, and nothing is verified
NO_JSON = "invalid_json"  # the one property of an input whose text is no JSON object


@dataclass(frozen=True, kw_only=True)
class MessageForm:
    """How one answer is written. omit_thoughts: thoughts come without their text, sealed in the signature."""

    model: str
    max_tokens: int
    omit_thoughts: bool = False
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")

    def whole(self, row: Row, tally: Tally) -> dict[str, Any]:
        """The finished message."""
        return {
            **self.head(tally),
            "content": [self.block(item) for item in row.items],
            **self.ending(row, tally),
            "usage": usage(tally),
        }

    def head(self, tally: Tally) -> dict[str, Any]:
        """The message before its first word."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(tally),
        }

    def ending(self, row: Row, tally: Tally) -> dict[str, Any]:
        """Why the answer ended."""
        if row.finish_reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if row.finish_reason == "stop":
            return {"stop_reason": "stop_sequence" if row.stop else "end_turn", "stop_sequence": row.stop or None}
        full = tally.completion_tokens < self.max_tokens
        return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}

    def block(self, item: Item) -> dict[str, Any]:
        """A finished block."""
        if item.call is not None:
            return {"type": "tool_use", "id": item.call.id, "name": item.call.name, "input": _input(item.text)}
        if item.kind == "text":
            return {"type": "text", "text": item.text}
        return {
            "type": "thinking",
            "thinking": "" if self.omit_thoughts else item.text,
            "signature": self._signature(item),
        }

    def events(self, change: Change) -> Iterator[dict[str, Any]]:
        """A change of the row as events."""
        match change:
            case Opened(index, item):
                block = self.block(Item(kind=item.kind, call=item.call)) | _UNSIGNED[item.kind]
                yield {"type": "content_block_start", "index": index, "content_block": block}
            case Grown(index, item, text):
                if item.kind != "thought" or not self.omit_thoughts:
                    yield _delta(index, _DELTAS[item.kind], text)
            case Closed(index, item):
                if item.kind == "thought":
                    yield _delta(index, ("signature_delta", "signature"), self._signature(item))
                yield {"type": "content_block_stop", "index": index}

    def _signature(self, item: Item) -> str:
        return seal_thought(item.text) if self.omit_thoughts else UNSIGNED


_DELTAS = {
    "text": ("text_delta", "text"),
    "thought": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
_UNSIGNED: dict[str, dict[str, str]] = {"text": {}, "thought": {"signature": ""}, "call": {}}


def _delta(index: int, kind: tuple[str, str], text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind[0], kind[1]: text}}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object. What is no JSON object, because the answer was cut or the model wrote it wrongly,
    stands in one property, so that whoever runs the tool can say so."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {NO_JSON: arguments}


def usage(tally: Tally) -> dict[str, Any]:
    """The `usage` object: the three numbers of input tokens add up to the prompt."""
    cached = sum(tally.cached.values())
    numbers: dict[str, Any] = {
        "input_tokens": tally.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": tally.completion_tokens,
    }
    if tally.thinks:
        numbers["output_tokens_details"] = {"thinking_tokens": tally.reasoning_tokens}
    return numbers


async def message_events(
    form: MessageForm, row: Row, changes: AsyncIterator[list[Change]], tally: Tally
) -> AsyncIterator[bytes]:
    """The stream of one answer. It begins with the first token: only then it is known what the cache gave."""
    started = False
    try:
        async for step in changes:
            if not started:
                yield named_event({"type": "message_start", "message": form.head(tally)})
                started = True
            for change in step:
                for event in form.events(change):
                    yield named_event(event)
        delta = {"type": "message_delta", "delta": form.ending(row, tally), "usage": usage(tally)}
        yield named_event(delta)
        yield named_event({"type": "message_stop"})
    except ApiError as error:  # the code 200 is sent already
        yield named_event(anthropic_body(error))
