"""Answers of POST /v1/responses: whole response objects, and the events of a stream."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvarn.serve.http.answer import Tally
from kvarn.serve.http.conversation import Named
from kvarn.serve.http.errors import ApiError
from kvarn.serve.http.items import Change, Closed, Grown, Item, Opened, Row, named_event, seal_thought
from kvarn.serve.http.responses_schema import ResponsesBody
from kvarn.serve.http.responses_tools import Origin, custom_input

SEALED = "reasoning.encrypted_content"


@dataclass(frozen=True, kw_only=True)
class ResponseForm:
    """How one answer is written. origins: what the names that the model calls are to the client."""

    body: ResponsesBody
    model: str
    origins: Mapping[str, Origin]
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    # The response object.

    def whole(self, row: Row, tally: Tally) -> dict[str, Any]:
        """The finished response. Its last item is incomplete where the answer is."""
        cut = row.finish_reason == "length"
        output = [self.item(i, item, cut=cut and i == len(row.items) - 1) for i, item in enumerate(row.items)]
        details = {"reason": "max_output_tokens"} if cut else None
        return self.response("incomplete" if cut else "completed", output, details, usage(tally))

    def response(
        self,
        status: str,
        output: list[dict[str, Any]],
        incomplete_details: dict[str, str] | None = None,
        usage: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The response object, with the settings that were really used."""
        body = self.body
        ended = int(time.time()) if status == "completed" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": ended,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": incomplete_details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": {"format": self._format()},
            "tool_choice": self._choice(),
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools],
            "top_logprobs": 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": None,
        }

    def _format(self) -> dict[str, Any]:
        answer = self.body.text.format
        if answer is None:
            return {"type": "text"}
        if answer.schema == {"type": "object"}:
            return {"type": "json_object"}
        return {"type": "json_schema", "name": "answer", "schema": answer.schema, "strict": True}

    def _choice(self) -> str | dict[str, str]:
        choice = self.body.tool_choice
        if not isinstance(choice, Named):
            return choice
        origin = self.origins.get(choice.name)
        return {"type": "custom" if origin is not None and origin.custom else "function", "name": choice.name}

    # Items.

    def item(self, index: int, item: Item, *, cut: bool = False) -> dict[str, Any]:
        """A finished item, or one that was cut."""
        head = {"id": self.item_id(index, item), "status": "incomplete" if cut else "completed"}
        if item.kind == "text":
            return {**head, "type": "message", "role": "assistant", "content": [_text_part(item.text)]}
        if item.kind == "thought":
            sealed = {"encrypted_content": seal_thought(item.text)} if SEALED in self.body.include else {}
            content = [{"type": "reasoning_text", "text": item.text}]
            return {**head, "type": "reasoning", "summary": [], "content": content, **sealed}
        return {**head, **self._call(item, item.text)}

    def beginning(self, index: int, item: Item) -> dict[str, Any]:
        """An item before its first word."""
        head = {"id": self.item_id(index, item), "status": "in_progress"}
        if item.kind == "text":
            return {**head, "type": "message", "role": "assistant", "content": []}
        if item.kind == "thought":
            return {**head, "type": "reasoning", "summary": [], "content": []}
        return {**head, **self._call(item, "")}

    def item_id(self, index: int, item: Item) -> str:
        """An id that is the same in all events of an item."""
        kind = {"text": "msg", "thought": "rs", "call": "ctc" if self._origin(item).custom else "fc"}[item.kind]
        return f"{kind}_{self.id.removeprefix('resp_')}_{index}"

    def _origin(self, item: Item) -> Origin:
        name = item.call.name if item.call is not None else ""
        return self.origins.get(name) or Origin(name=name)  # a name that the model made up stays as it is

    def _call(self, item: Item, arguments: str) -> dict[str, Any]:
        assert item.call is not None
        origin = self._origin(item)
        where = {"namespace": origin.namespace} if origin.namespace is not None else {}
        call = {"call_id": item.call.id, "name": origin.name, **where}
        if origin.custom:
            return {"type": "custom_tool_call", **call, "input": custom_input(arguments) if arguments else ""}
        return {"type": "function_call", **call, "arguments": arguments}

    # Events.

    def events(self, change: Change, *, cut: bool) -> Iterator[dict[str, Any]]:
        """A change of the row as events, without their numbers. cut: the answer ends there because it must."""
        index, item = change.index, change.item
        where = {"item_id": self.item_id(index, item), "output_index": index}
        custom = self._origin(item).custom
        match change:
            case Opened():
                yield {
                    "type": "response.output_item.added",
                    "output_index": index,
                    "item": self.beginning(index, item),
                }
                if item.kind != "call":
                    part = _part(item, "")
                    yield {"type": "response.content_part.added", **where, "content_index": 0, "part": part}
            case Grown(_, _, text):
                if item.kind == "text":
                    yield {
                        "type": "response.output_text.delta",
                        **where,
                        "content_index": 0,
                        "delta": text,
                        "logprobs": [],
                    }
                elif item.kind == "thought":
                    yield {"type": "response.reasoning_text.delta", **where, "content_index": 0, "delta": text}
                elif not custom:
                    yield {"type": "response.function_call_arguments.delta", **where, "delta": text}
            case Closed():
                yield from self._endings(item, where, custom)
                yield {
                    "type": "response.output_item.done",
                    "output_index": index,
                    "item": self.item(index, item, cut=cut),
                }

    def _endings(self, item: Item, where: dict[str, Any], custom: bool) -> Iterator[dict[str, Any]]:
        """What an item ends with, before it is done."""
        if item.kind == "call":
            if custom:  # its text is within JSON, so it comes when that is whole
                text = custom_input(item.text)
                yield {"type": "response.custom_tool_call_input.delta", **where, "delta": text}
                yield {"type": "response.custom_tool_call_input.done", **where, "input": text}
            else:
                name = self._origin(item).name
                yield {
                    "type": "response.function_call_arguments.done",
                    **where,
                    "name": name,
                    "arguments": item.text,
                }
            return
        kind = "response.output_text.done" if item.kind == "text" else "response.reasoning_text.done"
        extra: dict[str, Any] = {"logprobs": []} if item.kind == "text" else {}
        yield {"type": kind, **where, "content_index": 0, "text": item.text, **extra}
        yield {"type": "response.content_part.done", **where, "content_index": 0, "part": _part(item, item.text)}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _part(item: Item, text: str) -> dict[str, Any]:
    return _text_part(text) if item.kind == "text" else {"type": "reasoning_text", "text": text}


def usage(tally: Tally) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "input_tokens": tally.prompt_tokens,
        "input_tokens_details": {"cached_tokens": sum(tally.cached.values()), "cache_write_tokens": 0},
        "output_tokens": tally.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": tally.reasoning_tokens},
        "total_tokens": tally.prompt_tokens + tally.completion_tokens,
    }


async def response_events(
    form: ResponseForm, row: Row, changes: AsyncIterator[list[Change]], tally: Tally
) -> AsyncIterator[bytes]:
    """The stream of one answer."""
    number = 0

    def event(data: dict[str, Any]) -> bytes:
        nonlocal number
        number += 1
        return named_event({**data, "sequence_number": number - 1})

    try:
        for kind in ("created", "in_progress"):
            yield event({"type": f"response.{kind}", "response": form.response("in_progress", [])})
        async for step in changes:
            for change in step:
                for data in form.events(change, cut=row.finish_reason == "length" and change is step[-1]):
                    yield event(data)
        whole = form.whole(row, tally)
        yield event({"type": f"response.{whole['status']}", "response": whole})
    except ApiError as error:  # the code 200 is sent already
        yield event({"type": "error", "code": error.code, "message": error.message, "param": error.param})
        failure = {"code": error.code or "server_error", "message": error.message}
        output = [form.item(i, item, cut=True) for i, item in enumerate(row.items)]
        yield event({"type": "response.failed", "response": form.response("failed", output, error=failure)})
