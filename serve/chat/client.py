"""A conversation with a running server over /v1/chat/completions; the messages are kept here, as text."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from kvarn.errors import KvarnError, UsageError
from kvarn.serve.chat.report import cache_lines
from kvarn.serve.chat.settings import Settings
from kvarn.serve.chat.talk import Exchange, Listener, Outcome
from kvarn.serve.literal import one_line

_MAX_ERROR = 1 << 16  # bytes of an error's body that are read
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_EXTRA = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class ServerError(KvarnError):
    """A server cannot be reached, refuses, or answers with what is no answer. `code` is its own word for it."""

    def __init__(self, text: str, code: str | None = None) -> None:
        super().__init__(one_line(text))
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where a server is, and the key to it."""

    url: str
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            good = False
        if not good:
            raise UsageError(f"{self.url!r} is no server's address; use one like http://127.0.0.1:8080")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("the API key holds characters that no key has; give the key alone")

    def client(self) -> httpx.AsyncClient:
        """A client for one call. Answers may take any time; a server on this machine is never asked through a proxy."""
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return httpx.AsyncClient(
            base_url=self.url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=httpx.Timeout(None, connect=10.0),
            trust_env=urlsplit(self.url).hostname not in _LOOPBACK,
        )

    def get(self, path: str) -> Any:
        """The JSON object at a path; ServerError."""

        async def get() -> Any:
            async with self.client() as client, client.stream("GET", path) as response:
                return await _checked(response)

        try:
            return asyncio.run(get())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self.failure(error) from error

    def failure(self, error: Exception) -> ServerError:
        """What went wrong on the way, in one line."""
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerError(f"cannot reach {self.url}: {error}; is kvarn serve running there?")
        return ServerError(f"the connection to {self.url} failed: {str(error) or type(error).__name__}; try again")


class ServerTalk:
    """See kvarn.serve.chat.talk.Talk."""

    def __init__(self, server: Server, model: str | None, system: str | None) -> None:
        self._server = server
        self._model = model or _first_model(server)
        self._system = system
        self._exchanges: tuple[Exchange, ...] = ()

    @property
    def name(self) -> str:
        return self._model

    @property
    def is_empty(self) -> bool:
        return not self._exchanges

    @property
    def system(self) -> str | None:
        return self._system

    def ask(self, text: str, settings: Settings, listener: Listener) -> Outcome:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError("the message holds bytes that are not UTF-8; say it in whole characters") from error
        return self._answer(self._exchanges, text, settings, listener)

    def retry(self, settings: Settings, listener: Listener) -> Outcome:
        if not self._exchanges:
            raise UsageError("nothing was said yet")
        return self._answer(self._exchanges[:-1], self._exchanges[-1].user, settings, listener)

    def undo(self) -> Exchange:
        if not self._exchanges:
            raise UsageError("nothing was said yet")
        dropped = self._exchanges[-1]
        self._exchanges = self._exchanges[:-1]
        return dropped

    def restart(self, system: str | None) -> None:
        self._system, self._exchanges = system, ()

    def save(self, name: str) -> None:
        raise UsageError(f"sessions hold token ids, which only the server has; run kvarn chat {self.name} to keep one")

    def load(self, name: str) -> None:
        self.save(name)

    def last(self) -> Exchange | None:
        return self._exchanges[-1] if self._exchanges else None

    def show(self) -> list[str]:
        return [
            f"model: {self.name} at {self._server.url}",
            "cache: its dtype is the server's choice, which it does not tell",
            f"tokens: the server counts them (/stats); {len(self._exchanges)} turns",
        ]

    def stats(self) -> list[str]:
        return ["KV bytes: the server does not tell what one conversation holds"]

    def cache(self) -> list[str]:
        found = self._server.get("/v1/cache")
        try:
            return cache_lines(found["report"])
        except (KeyError, TypeError) as error:
            raise ServerError("the server does not say what its cache holds; kvarn serve does") from error

    def close(self) -> None:
        return

    # The answer.

    def _answer(self, before: tuple[Exchange, ...], text: str, settings: Settings, listener: Listener) -> Outcome:
        messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        for turn in before:
            messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.answer}]
        body = {
            "model": self._model,
            "messages": [*messages, {"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": settings.max_tokens,
            "temperature": settings.sampling.temperature,
            "top_p": settings.sampling.top_p,
            "seed": settings.sampling.seed,
        }
        neutral, values = Settings().values(), settings.values()
        # Not every server knows these, so they go along only where they change something.
        body |= {name: values[name] for name in _EXTRA if values[name] != neutral[name]}
        heard = _Heard(listener)
        try:
            asyncio.run(self._hear(body, heard))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._server.failure(error) from error
        kept = bool(heard.text) or heard.finish_reason != "cancelled"
        if kept:
            self._exchanges = (*before, Exchange(user=text, answer=heard.text))
        return heard.outcome(kept, settings)

    async def _hear(self, body: dict[str, Any], heard: "_Heard") -> None:
        """Take in the stream. asyncio.run turns SIGINT into a cancellation, which hangs up, and the server stops."""
        try:
            async with (
                self._server.client() as client,
                client.stream("POST", "/v1/chat/completions", json=body) as response,
            ):
                if response.status_code != 200:
                    await _checked(response)
                async for event in _events(response):
                    heard.event(event)
                    if heard.done:
                        return
            raise ServerError("the server ended in the middle of its answer; /retry asks again")
        except asyncio.CancelledError:
            heard.finish_reason = "cancelled"


class _Heard:
    """An answer as far as it has come."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._start = self._first = self._last = time.perf_counter()
        self._usage: dict[str, Any] = {}
        self._begun = False
        self.text = ""
        self.finish_reason = ""
        self.done = False

    def event(self, data: str) -> None:
        """Take in one server-sent event; ServerError when it is an error, or cannot be understood."""
        if data == "[DONE]":
            self.done = True
            self.finish_reason = self.finish_reason or "stop"
            return
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                raise _error(chunk, 200)
            usage, choices = chunk.get("usage"), chunk.get("choices") or []
            delta = (choices[0].get("delta") or {}) if choices else {}
            piece, thought = delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""
            reason = choices[0].get("finish_reason") if choices else None
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ServerError("the server sends what is no part of a chat completion; check the address") from error
        if isinstance(usage, dict):
            self._usage = usage
        if isinstance(reason, str):
            self.finish_reason = one_line(reason)
        if isinstance(thought, str) and thought:
            self._stamp()
            self._listener.thought(thought)
        if isinstance(piece, str) and piece:
            self._stamp()
            self.text += piece
            self._listener.text(piece)

    def _stamp(self) -> None:
        self._last = time.perf_counter()
        if not self._begun:
            self._first, self._begun = self._last, True

    def outcome(self, kept: bool, settings: Settings) -> Outcome:
        """How it went, as far as the server said."""
        count = _count(self._usage, "completion_tokens")
        short = count is not None and count < settings.max_tokens
        limit = "the context is full" if short else f"max_tokens is {settings.max_tokens}"
        return Outcome(
            text=self.text,
            finish_reason=self.finish_reason,
            kept=kept,
            num_prompt_tokens=_count(self._usage, "prompt_tokens"),
            num_cached_tokens=_count(self._usage.get("prompt_tokens_details"), "cached_tokens"),
            num_completion_tokens=count,
            prompt_seconds=self._first - self._start,
            decode_seconds=self._last - self._first,
            limit=limit if self.finish_reason == "length" else "",
        )


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int else None


def _first_model(server: Server) -> str:
    found = server.get("/v1/models")
    try:
        return str(found["data"][0]["id"])
    except (KeyError, TypeError, IndexError) as error:
        raise ServerError(f"{server.url} does not say which models it has; name one: kvarn chat MODEL --url") from error


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event. Lines end with a line feed alone: a text may hold other line breaks."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode(errors="replace")


async def _checked(response: httpx.Response) -> Any:
    """The JSON of a good answer; ServerError for another one."""
    body = b""
    async for part in response.aiter_bytes():
        body += part
        if response.status_code != 200 and len(body) > _MAX_ERROR:
            break
    try:
        content = json.loads(body)
    except ValueError:
        content = None
    if response.status_code == 200 and content is not None:
        return content
    raise _error(content, response.status_code)


def _error(content: Any, status: int) -> ServerError:
    """The server's own words where it has some."""
    error = content.get("error") if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    code = error.get("code") if isinstance(error, dict) else None
    text = f"the server answers: {message[:2000]}" if isinstance(message, str) and message else ""
    text = text or f"the server answers with code {status} and without a reason; check the address"
    if status in (401, 403) and "api-key" not in text.lower():
        text += " (--api-key, or KVARN_API_KEY)"
    return ServerError(text, code if isinstance(code, str) else None)
