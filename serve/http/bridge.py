"""From the engine's thread to asyncio: the calls of one request as one bounded stream of events."""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Sequence

from kvarn.errors import KvarnError
from kvarn.request import Event, RequestParams
from kvarn.runner import Runner
from kvarn.serve.http.errors import ApiError, from_kvarn, unavailable

EVENTS_PER_ANSWER = 512  # how far an answer may run ahead of a client that does not read


class Feed:
    """The events of one request: `(index, event)` until every answer has ended.

    One call per prompt; `index` is prompt * n + choice. Made and used on the event loop. Iterating raises the ApiError
    with which the request ended. `close` must be called, at any moment: it frees what the calls hold within one step.
    """

    def __init__(
        self, runner: Runner, prompts: Sequence[RequestParams], *, timeout: float, on_close: Callable[["Feed"], None]
    ) -> None:
        self.answers = sum(params.n for params in prompts)
        self.aborted = asyncio.Event()  # the request ends with an error from outside, whoever reads or not
        self._n = prompts[0].n
        self._loop = asyncio.get_running_loop()
        self._on_close: Callable[[Feed], None] | None = on_close
        self._items: deque[tuple[int, Event]] = deque()
        self._wake = asyncio.Event()
        self._left = self.answers
        self._error: ApiError | None = None
        self._timer = self._loop.call_later(timeout, self._time_out, timeout)
        self._calls = []
        try:
            for prompt, params in enumerate(prompts):
                receive = functools.partial(self._from_engine, prompt)
                self._calls.append(runner.submit(params, on_event=receive))
        except BaseException:
            self.close()
            raise

    def _from_engine(self, prompt: int, item: Event | KvarnError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._receive, prompt, item)

    def _receive(self, prompt: int, item: Event | KvarnError) -> None:
        if self._error is not None or self._on_close is None:
            return
        if isinstance(item, KvarnError):
            self.abort(from_kvarn(item))
            return
        if item.token is None and item.finish_reason is None and not item.text:
            return  # a part of the prompt was read
        self._items.append((prompt * self._n + item.request.choice, item))
        if len(self._items) > EVENTS_PER_ANSWER * self.answers:
            self.abort(ApiError(408, "the client does not read its answer; it was cancelled", code="client_too_slow"))
        self._wake.set()

    def _time_out(self, timeout: float) -> None:
        self.abort(unavailable(f"the request took longer than {timeout:g} s (--timeout); it was cancelled", "timeout"))

    def abort(self, error: ApiError) -> None:
        """End the request with an error, now; what was not read yet is dropped."""
        if self._error is None:
            self._error = error
            self._items.clear()
            self._cancel()
            self._wake.set()
            self.aborted.set()

    def close(self) -> None:
        """End what still runs. Harmless when everything has ended, and when called again."""
        on_close, self._on_close = self._on_close, None
        self._timer.cancel()
        if self._left:
            self._cancel()
        self._items.clear()
        if on_close is not None:
            on_close(self)

    def _cancel(self) -> None:
        for call in self._calls:
            with contextlib.suppress(KvarnError):
                call.cancel()

    def __aiter__(self) -> "Feed":
        return self

    async def __anext__(self) -> tuple[int, Event]:
        while True:
            if self._error is not None:
                raise self._error
            if self._items:
                break
            if not self._left:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        index, event = self._items.popleft()
        if event.finish_reason is not None:
            self._left -= 1
        if event.error is not None:
            raise from_kvarn(event.error)
        if event.finish_reason == "cancelled":
            raise unavailable("the server is shutting down; try again after the restart", "shutting_down")
        return index, event
