"""An answer as a row of items (thoughts, texts, calls) in the order in which they came, whole or streamed.

Responses and Messages answer like that. Thoughts also go out as opaque text, and come back.
"""

import base64
import binascii
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from kvarn.serve.http.answer import Answer, EventStream, Progress, Tally, collect, new_tally, progress
from kvarn.serve.http.conversation import Prepared
from kvarn.serve.http.parts import Call, CallArguments, CallStart, Part, Text, Thought
from kvarn.serve.http.service import Service

SEALED = "kvarn1:"


@dataclass(kw_only=True)
class Item:
    """text: what is said or thought, or a call's arguments as JSON text. call: its id and name, where it is one."""

    kind: Literal["thought", "text", "call"]
    text: str = ""
    call: Call | None = None


@dataclass(frozen=True)
class Opened:
    """An item begins, still empty."""

    index: int
    item: Item


@dataclass(frozen=True)
class Grown:
    """More of the item's text."""

    index: int
    item: Item
    text: str


@dataclass(frozen=True)
class Closed:
    """The item is whole, or the answer ended in it."""

    index: int
    item: Item


Change = Opened | Grown | Closed


@dataclass(kw_only=True)
class Row(Answer):
    """An answer as far as it has come. At most one item is open, the last: calls come one after the other."""

    items: list[Item] = field(default_factory=list)
    closed: bool = True

    def add(self, part: Part) -> None:
        """See kvarn.serve.http.parts.Collected."""
        super().add(part)
        self.take(part)

    def take(self, part: Part) -> list[Change]:
        """What the next part changes in the row."""
        match part:
            case Text(text):
                return self._grow("text", text)
            case Thought(text):
                return self._grow("thought", text)
            case CallStart(_, call_id, name):
                return [*self.close(), self._open(Item(kind="call", call=Call(id=call_id, name=name)))]
            case CallArguments(_, text):
                assert self.items[-1].kind == "call", "arguments without a call"
                return self._grow("call", text)

    def close(self) -> list[Change]:
        """End the open item, if there is one."""
        if self.closed:
            return []
        self.closed = True
        return [Closed(len(self.items) - 1, self.items[-1])]

    def _grow(self, kind: Literal["thought", "text", "call"], text: str) -> list[Change]:
        changes: list[Change] = []
        if self.closed or self.items[-1].kind != kind:
            changes += [*self.close(), self._open(Item(kind=kind))]
        item = self.items[-1]
        item.text += text
        return [*changes, Grown(len(self.items) - 1, item, text)]

    def _open(self, item: Item) -> Change:
        self.items.append(item)
        self.closed = False
        return Opened(len(self.items) - 1, item)


async def changes_of(row: Row, steps: AsyncIterator[Progress]) -> AsyncIterator[list[Change]]:
    """The changes that every step brings, the last one's closing of the row included; the row says how it ended."""
    async for step in steps:
        changes = [change for part in step.parts for change in row.take(part)]
        if step.finish_reason is not None:
            row.finish_reason, row.stop = step.finish_reason, step.stop
            changes += row.close()
        yield changes


class ItemForm(Protocol):
    """How an endpoint writes a whole answer."""

    def whole(self, row: Row, tally: Tally) -> dict[str, Any]:
        """The body of the response."""


Form = TypeVar("Form", bound=ItemForm)


async def respond_in_items(
    service: Service,
    request: Request,
    prepared: Prepared,
    form: Form,
    events: Callable[[Form, Row, AsyncIterator[list[Change]], Tally], AsyncIterator[bytes]],
    *,
    stream: bool,
) -> Response:
    """Send the prompt to the engine and answer, streamed by `events` or whole by `form`."""
    feed = service.submit([prepared.params])
    tally = new_tally(service, request, [prepared.params], thinks=prepared.thinks)
    steps = progress(feed, tally, service.check_ready().tokenizer, prepared.parser)
    row = Row()
    if stream:
        return EventStream(events(form, row, changes_of(row, steps), tally), feed, tally)
    if not await collect([row], steps, feed, tally, request.receive):
        return Response(status_code=499)  # nobody reads it; it is the code in the metrics
    return Response(json_bytes(form.whole(row, tally)), media_type="application/json")


def named_event(data: dict[str, Any]) -> bytes:
    """A server-sent event that has its type as its name too."""
    name: str = data["type"]
    return b"event: " + name.encode() + b"\ndata: " + json_bytes(data) + b"\n\n"


def json_bytes(data: dict[str, Any]) -> bytes:
    """JSON in UTF-8; in ASCII where a model has written the escape of half a character, which UTF-8 does not have."""
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":")).encode()


def seal_thought(text: str) -> str:
    """A thought as the opaque text that clients send back unread. It is not secret: who asks has seen it anyway."""
    return SEALED + base64.b64encode(text.encode()).decode()


def unseal_thought(sealed: str) -> str:
    """The thought; empty for what another server sealed, which nobody but that server can read."""
    try:
        return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode() * sealed.startswith(SEALED)
    except (binascii.Error, UnicodeDecodeError):
        return ""
