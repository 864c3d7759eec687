"""One request's answers, whole as JSON or streamed as server-sent events."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvarn.request import Event, RequestParams
from kvarn.serve.http.bridge import Feed
from kvarn.serve.http.errors import ApiError
from kvarn.serve.http.metrics import Metrics
from kvarn.serve.http.parts import AnswerParser, CallStart, Collected, Part, PlainParser
from kvarn.serve.http.service import Service
from kvarn.serve.tokenizer import Tokenizer

LAST_WORDS = 1.0  # seconds that a client has to read the error with which its stream ends


@dataclass(frozen=True, kw_only=True)
class Token:
    """A generated token with its log-probability and those of the most probable tokens, as bytes."""

    text: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


@dataclass(kw_only=True)
class Answer(Collected):
    """One answer as far as it has come."""

    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str = ""  # the stop string that ended it, if one did


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What one event brought to an answer. finish_reason: stop, length or tool_calls, with the answer's last one;
    then stop is the stop string that ended it, if one did."""

    index: int
    parts: list[Part]
    tokens: list[Token]
    finish_reason: str | None
    stop: str = ""


class Form(Protocol):
    """How an endpoint writes its answers."""

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """The fields of the whole object, or of a chunk, before `choices`."""

    def whole(self, index: int, answer: Answer) -> dict[str, Any]:
        """A finished choice."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice's part of the first chunk, if the form has one."""

    def deltas(self, progress: Progress) -> list[dict[str, Any]]:
        """A choice's parts of later chunks, one chunk each."""


@dataclass(kw_only=True)
class Tally:
    """Counts a request's tokens and times its answers."""

    metrics: Metrics
    start: float
    prompt_tokens: int
    n: int
    thinks: bool = False
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)  # by prompt
    last: dict[int, float] = field(default_factory=dict)  # by answer: when its last token came

    def count(self, index: int, event: Event) -> None:
        """Take in one event."""
        self.cached[index // self.n] = event.request.num_cached_tokens
        if event.token is None:
            return
        now = time.perf_counter()
        self.completion_tokens += 1
        if index in self.last:
            self.metrics.inter_token.observe(now - self.last[index])
        else:
            self.metrics.first_token.observe(now - self.start)
        self.last[index] = now

    def usage(self) -> dict[str, Any]:
        """The `usage` object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }
        if self.thinks:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage

    def close(self) -> None:
        """Add the request to the server's counters."""
        self.metrics.prompt_tokens.inc(self.prompt_tokens)
        self.metrics.generated_tokens.inc(self.completion_tokens)
        self.metrics.cached_tokens.inc(sum(self.cached.values()))


def new_tally(service: Service, request: Request, prompts: Sequence[RequestParams], *, thinks: bool = False) -> Tally:
    """The tally of one request that was just submitted. thinks: the usage says how many tokens were thoughts."""
    return Tally(
        metrics=service.metrics,
        start=request.state.start,
        prompt_tokens=sum(len(params.prompt) for params in prompts),
        n=prompts[0].n,
        thinks=thinks,
    )


async def progress(
    feed: Feed, tally: Tally, tokenizer: Tokenizer, parser: Callable[[], AnswerParser]
) -> AsyncIterator[Progress]:
    """The answers of a request as they come, each one through a parser of its own; counted in the tally."""
    parsers = [parser() for _ in range(feed.answers)]
    called = [False] * feed.answers
    async for index, event in feed:
        tally.count(index, event)
        own, reason = parsers[index], event.finish_reason
        before = own.in_thought
        parts = own.add(event.text)
        if event.token is not None and (before or own.in_thought):
            tally.reasoning_tokens += 1
        if reason is not None:
            parts += own.finish()
        called[index] = called[index] or any(isinstance(part, CallStart) for part in parts)
        yield Progress(
            index=index,
            parts=parts,
            tokens=_token(event, tokenizer),
            finish_reason="tool_calls" if reason == "stop" and called[index] else reason,
            stop=event.request.stops.match if reason == "stop" and event.request.stops else "",
        )


async def respond(
    service: Service,
    request: Request,
    prompts: Sequence[RequestParams],
    form: Form,
    *,
    stream: bool,
    usage: bool,
    parser: Callable[[], AnswerParser] = PlainParser,
    thinks: bool = False,
) -> Response:
    """Send the prompts to the engine and answer, streamed or whole. `usage`: a last chunk with the usage."""
    tokenizer = service.check_ready().tokenizer
    feed = service.submit(prompts)
    tally = new_tally(service, request, prompts, thinks=thinks)
    steps = progress(feed, tally, tokenizer, parser)
    if stream:
        return EventStream(_chunks(feed, tally, steps, form, usage), feed, tally)
    answers = [Answer() for _ in range(feed.answers)]
    if not await collect(answers, steps, feed, tally, request.receive):
        return Response(status_code=499)  # nobody reads it; it is the code in the metrics
    choices = [form.whole(index, answer) for index, answer in enumerate(answers)]
    return JSONResponse({**form.head(chunk=False), "choices": choices, "usage": tally.usage()})


def _token(event: Event, tokenizer: Tokenizer) -> list[Token]:
    if event.token is None or event.logprob is None:
        return []
    top = tuple((tokenizer.token_bytes(token), logprob) for token, logprob in event.top_logprobs)
    return [Token(text=tokenizer.token_bytes(event.token), logprob=event.logprob, top=top)]


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first(*awaitables: Awaitable[Any], timeout: float | None = None) -> None:
    """Wait for one of them."""
    await asyncio.wait([asyncio.ensure_future(x) for x in awaitables], timeout=timeout, return_when="FIRST_COMPLETED")


async def collect(
    answers: list[Answer], steps: AsyncIterator[Progress], feed: Feed, tally: Tally, receive: Receive
) -> bool:
    """Put the whole answers together; False if the client hung up before. Closes the feed and the tally."""

    async def run() -> None:
        async for step in steps:
            answer = answers[step.index]
            for part in step.parts:
                answer.add(part)
            answer.tokens += step.tokens
            answer.finish_reason, answer.stop = step.finish_reason, step.stop

    collecting = asyncio.ensure_future(run())
    gone = asyncio.ensure_future(until_disconnect(receive))
    try:
        await _first(collecting, gone)
        if not collecting.done():
            return False
        collecting.result()
        return True
    finally:
        collecting.cancel()
        gone.cancel()
        feed.close()
        tally.close()


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _chunks(
    feed: Feed, tally: Tally, steps: AsyncIterator[Progress], form: Form, include_usage: bool
) -> AsyncIterator[bytes]:
    head = form.head(chunk=True)
    extra = {"usage": None} if include_usage else {}
    try:
        openings = [choice for i in range(feed.answers) if (choice := form.opening(i)) is not None]
        for choice in openings:
            yield sse({**head, "choices": [choice], **extra})
        async for step in steps:
            for choice in form.deltas(step):
                yield sse({**head, "choices": [choice], **extra})
        if include_usage:
            yield sse({**head, "choices": [], "usage": tally.usage()})
        yield b"data: [DONE]\n\n"
    except ApiError as error:  # the code 200 is sent already; clients know an `error` in the stream
        yield sse(error.body)


class EventStream(Response):
    """A stream of events. When the client hangs up, or the request is aborted, the feed is closed at once."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes], feed: Feed, tally: Tally) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._feed = feed
        self._tally = tally

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the stream, the client or the request's time is at its end."""
        writing = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(until_disconnect(receive))
        aborted = asyncio.ensure_future(self._feed.aborted.wait())
        try:
            await _first(writing, gone, aborted)
            if aborted.done() and not writing.done() and not gone.done():
                await _first(writing, gone, timeout=LAST_WORDS)
            if writing.done():
                writing.result()
        finally:
            for task in (writing, gone, aborted):
                task.cancel()
            self._feed.close()
            self._tally.close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
