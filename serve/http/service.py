"""What the endpoints share: the loaded model, the server's status, and how many answers are in flight."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvarn.engine import Engine
from kvarn.errors import ContextOverflowError, KvarnError
from kvarn.request import RequestParams
from kvarn.runner import Runner
from kvarn.serve.http.bridge import Feed
from kvarn.serve.http.errors import ApiError, from_kvarn, unavailable
from kvarn.serve.http.metrics import Metrics
from kvarn.serve.structured import Structured
from kvarn.serve.tokenizer import Tokenizer

Status = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the server takes at once. timeout: seconds of one request."""

    max_queue: int = 64
    timeout: float = 600.0
    max_body_bytes: int = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model that answers. `names`: the served id, then its aliases."""

    names: tuple[str, ...]
    tokenizer: Tokenizer
    engine: Engine
    runner: Runner
    structured: Structured
    created: int

    @property
    def id(self) -> str:
        """The served id."""
        return self.names[0]

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self.engine.scheduler.config.context


class Service:
    """The state of one server. Used on the event loop, except for `served`, which is only read elsewhere."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.metrics = Metrics(self)
        self.status: Status = "loading"
        self.served: Served | None = None
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._feeds: set[Feed] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    # The status.

    def open(self, engine: Engine, tokenizer: Tokenizer, names: Sequence[str]) -> None:
        """Begin to answer: loading -> ready. Starts the engine's thread."""
        loop = asyncio.get_running_loop()

        def on_fault(error: KvarnError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.fail, error)

        self.served = Served(
            names=tuple(dict.fromkeys(names)),
            tokenizer=tokenizer,
            engine=engine,
            runner=Runner(engine, on_fault=on_fault),
            structured=Structured(tokenizer, engine.backend.info.vocab_size),
            created=int(time.time()),
        )
        if self.status == "loading":
            self.status = "ready"

    def fail(self, error: BaseException) -> None:
        """The model could not be loaded, or the engine ended: nothing will be answered any more."""
        self.status, self.failure = "failed", error
        self.on_failure()

    async def drain(self, timeout: float) -> None:
        """Take nothing new, and wait until everything has ended; what has not within `timeout` seconds is cancelled."""
        if self.status != "failed":
            self.status = "draining"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        for feed in list(self._feeds):
            feed.abort(unavailable("the server is shutting down; try again after the restart", "shutting_down"))

    def check_ready(self) -> Served:
        """The model; ApiError 503 while there is none that answers."""
        if self.status == "ready" and self.served is not None:
            return self.served
        if self.status == "failed":
            raise ApiError(503, "the engine has stopped; restart the server", code="engine_stopped")
        why = "still loading its model" if self.status == "loading" else "shutting down"
        raise unavailable(f"the server is {why}; try again later", self.status)

    # Requests.

    @property
    def in_flight(self) -> int:
        """Answers that run or wait."""
        return sum(feed.answers for feed in self._feeds)

    def check_room(self) -> None:
        """ApiError 429 when the queue is full."""
        places = self.check_ready().engine.scheduler.config.max_sequences
        if self.in_flight >= places + self.limits.max_queue:
            raise ApiError(
                429,
                f"{self.in_flight} answers run or wait, which is {places} at once and a queue of "
                f"{self.limits.max_queue} (--max-queue); try again later",
                code="queue_full",
                headers={"retry-after": "1"},
            )

    def check_prompt(self, prompt: Sequence[int], param: str) -> None:
        """ApiError 400 for token ids that the model does not have, and for a prompt that does not fit the context."""
        served = self.check_ready()
        self.check_ids(prompt, param)
        if len(prompt) > served.context - 1:
            overflow = ContextOverflowError(num_prompt_tokens=len(prompt), context=served.context)
            raise from_kvarn(overflow, param=param)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """ApiError 400 for token ids that the model does not have."""
        vocab = self.check_ready().engine.backend.info.vocab_size
        bad = next((token for token in ids if not 0 <= token < vocab), None)
        if bad is not None:
            raise ApiError(
                400,
                f"{param}: token {str(bad)[:20]} is not between 0 and {vocab - 1}",
                code="invalid_value",
                param=param,
            )

    def submit(self, prompts: Sequence[RequestParams]) -> Feed:
        """Send a request's prompts to the engine. The caller closes the feed."""
        self.check_room()
        try:
            feed = Feed(self.check_ready().runner, prompts, timeout=self.limits.timeout, on_close=self._closed)
        except KvarnError as error:
            raise from_kvarn(error) from error
        self._feeds.add(feed)
        self._idle.clear()
        return feed

    def _closed(self, feed: Feed) -> None:
        self._feeds.discard(feed)
        if not self._feeds:
            self._idle.set()
