"""The engine on a thread of its own: requests in, a stream of events per call out."""

import queue
import threading
from collections.abc import Callable, Iterator

from kvarn.engine import Engine
from kvarn.errors import BackendError, KvarnError
from kvarn.request import Event, Request, RequestParams


class Call:
    """One submitted call: iterate over its events, or cancel it. All its answers come through here."""

    def __init__(
        self, runner: "Runner", params: RequestParams, on_event: Callable[[Event | KvarnError], None] | None = None
    ) -> None:
        self.params = params
        self._runner = runner
        self._on_event = on_event
        self._events: queue.SimpleQueue[Event | KvarnError] = queue.SimpleQueue()
        self._open = params.n

    def __iter__(self) -> Iterator[Event]:
        """The events until every answer has ended; raises the error with which the call as a whole ended.

        An answer that ends with an error of its own gives an event with `error`, and the others go on.
        """
        while self._open:
            event = self._events.get()
            if isinstance(event, KvarnError):
                self._open = 0
                raise event
            if event.finish_reason is not None:
                self._open -= 1
            yield event

    def cancel(self) -> None:
        """End the call within one step, whatever it is doing; what it holds is free then."""
        self._runner._send(("cancel", self))

    def _put(self, event: Event | KvarnError) -> None:
        if self._on_event is None:
            self._events.put(event)
        else:
            self._on_event(event)


class Runner:
    """Runs an engine until it is shut down. Safe to use from any thread.

    `on_fault` is told, on the engine's thread, of the error with which the engine itself ended; no call runs after it.
    """

    def __init__(self, engine: Engine, *, on_fault: Callable[[KvarnError], None] | None = None) -> None:
        self._engine = engine
        self._on_fault = on_fault
        self._inbox: queue.SimpleQueue[tuple[str, Call | None]] = queue.SimpleQueue()
        self._calls: dict[int, Call] = {}  # by group
        self._requests: dict[Call, Request] = {}
        self._left: dict[int, int] = {}  # by group: answers that have not ended
        self._lock = threading.Lock()
        self._closed: KvarnError | None = None
        self._thread = threading.Thread(target=self._loop, name="kvarn-engine", daemon=True)
        self._thread.start()

    def submit(self, params: RequestParams, *, on_event: Callable[[Event | KvarnError], None] | None = None) -> Call:
        """Queue a call. Raises at once what is wrong with it (ContextOverflowError), or BackendError after shutdown.

        With `on_event` the call is not iterated: each event, or the error that ends the whole call, is given to it on
        the engine's thread. It must return at once and raise nothing.
        """
        self._engine.scheduler.check(params)
        call = Call(self, params, on_event)
        self._send(("add", call))
        return call

    def shutdown(self, *, drain: bool, timeout: float | None = None) -> bool:
        """Take no more calls, then finish (`drain`) or cancel what is there; whether the thread ended in time."""
        with self._lock:
            if self._closed is None:
                self._closed = BackendError("the engine is shutting down; submit again after the restart")
                self._inbox.put(("drain" if drain else "stop", None))
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _send(self, message: tuple[str, Call]) -> None:
        with self._lock:
            if self._closed is not None:
                if message[0] == "cancel":
                    self._inbox.put(message)  # a drain may be waiting for it
                    return
                raise self._closed
            self._inbox.put(message)

    def _loop(self) -> None:
        draining = False
        try:
            while True:
                idle = not self._engine.scheduler.has_work
                if idle and draining:
                    return
                while idle or not self._inbox.empty():
                    what, call = self._inbox.get()
                    idle = False
                    if what == "stop":
                        self._end_all()
                        return
                    if what == "drain":
                        draining = True
                    elif call is not None:
                        self._handle(what, call)
                for event in self._engine.step():
                    self._deliver(event)
        except BaseException as error:  # a fault of ours: nobody may wait for ever
            failure = BackendError(f"the engine stopped: {type(error).__name__}: {error}")
            failure.__cause__ = error
            with self._lock:
                self._closed = failure
            for call in list(self._calls.values()):
                call._put(failure)
            while not self._inbox.empty():
                _, waiting = self._inbox.get()
                if waiting is not None:
                    waiting._put(failure)
            if self._on_fault is not None:
                self._on_fault(failure)

    def _handle(self, what: str, call: Call) -> None:
        if what == "add":
            try:
                request = self._engine.add(call.params)
            except Exception as error:  # the maker of its text stream, say; the other calls go on
                refusal = error if isinstance(error, KvarnError) else BackendError(f"the call cannot start: {error!r}")
                call._put(refusal)
                return
            self._calls[request.group] = call
            self._requests[call] = request
            self._left[request.group] = call.params.n
        elif call in self._requests:
            self._cancel(call)

    def _cancel(self, call: Call) -> None:
        group = self._requests[call].group
        self._forget(call)
        scheduler = self._engine.scheduler
        live = [request for request in [*scheduler.running, *scheduler.waiting] if request.group == group]
        for request in live:
            self._engine.cancel(request)
            call._put(Event(request=request, finish_reason="cancelled"))
            for _ in range(request.to_fork):  # answers that had not begun
                call._put(Event(request=request, finish_reason="cancelled"))

    def _end_all(self) -> None:
        for call in list(self._requests):
            self._cancel(call)

    def _deliver(self, event: Event) -> None:
        group = event.request.group
        call = self._calls.get(group)
        if call is None:
            return
        # An answer that fails before it forks takes the others with it.
        ended = 0 if event.finish_reason is None else 1 + event.request.to_fork
        for _ in range(max(ended, 1)):
            call._put(event)
        self._left[group] -= ended
        if self._left[group] == 0:
            self._forget(call)

    def _forget(self, call: Call) -> None:
        group = self._requests.pop(call).group
        del self._calls[group], self._left[group]
