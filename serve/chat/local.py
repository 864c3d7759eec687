"""A conversation with a model in this process: all tokens so far go to the engine, whose cache knows most of them."""

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType

from kvarn.engine import Engine
from kvarn.errors import KvarnError, UsageError
from kvarn.request import Event, RequestParams
from kvarn.runner import Runner
from kvarn.serve.chat.report import cache_lines
from kvarn.serve.chat.settings import Settings
from kvarn.serve.chat.talk import Exchange, Listener, Outcome
from kvarn.serve.loading import size
from kvarn.serve.sessions import Session, load_session, save_session
from kvarn.serve.tokenizer import Tokenizer, stop_token_ids

_PROBE = "kvarnprobe"


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """An engine with its tokenizer. identity: the tokenizer's, for sessions. about: backend, device and dtype."""

    name: str
    about: str
    tokenizer: Tokenizer
    engine: Engine
    identity: str


class LocalTalk:
    """See kvarn.serve.chat.talk.Talk. The conversation is a Session; its tokens are what the model has read."""

    def __init__(self, model: LocalModel, session: Session) -> None:
        self._model = model
        self._runner = Runner(model.engine)
        self._kv = ""
        self.session = session

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def is_empty(self) -> bool:
        return not self.session.tokens

    @property
    def system(self) -> str | None:
        return self.session.system

    def ask(self, text: str, settings: Settings, listener: Listener) -> Outcome:
        before = self.session
        prompt = [*before.tokens, *self._turn(text, first=not before.tokens, system=before.system)]
        return self._answer(prompt, (*before.turns, len(before.tokens), len(prompt)), settings, listener)

    def retry(self, settings: Settings, listener: Listener) -> Outcome:
        turns = self._turns()
        return self._answer(self.session.tokens[: turns[-1]], turns, settings, listener)

    def undo(self) -> Exchange:
        turns = self._turns()
        dropped = self._exchange()
        self.session = replace(self.session, tokens=self.session.tokens[: turns[-2]], turns=turns[:-2])
        return dropped

    def restart(self, system: str | None) -> None:
        self.session = Session(tokens=(), tokenizer=self._model.identity, system=system)

    def save(self, name: str) -> None:
        save_session(name, self.session)

    def load(self, name: str) -> None:
        session = load_session(name, self._model.identity)
        if session is None:
            raise UsageError(f"there is no session {name!r}; /save {name} makes one")
        self.session = session

    def last(self) -> Exchange | None:
        return self._exchange() if self.session.turns else None

    def show(self) -> list[str]:
        engine, info = self._model.engine, self._model.engine.backend.info
        return [
            f"model: {self.name}, {self._model.about}",
            f"cache: {info.plan.name}, {info.plan.describe()}",
            f"tokens: {len(self.session.tokens)} of {engine.scheduler.config.context}, "
            f"{len(self.session.turns) // 2} turns",
        ]

    def stats(self) -> list[str]:
        return [self._kv] if self._kv else []

    def cache(self) -> list[str]:
        return cache_lines(self._model.engine.cache_report())

    def close(self) -> None:
        self._runner.shutdown(drain=False)
        self._model.engine.close()

    # The answer.

    def _answer(self, prompt: Sequence[int], turns: tuple[int, ...], settings: Settings, listener: Listener) -> Outcome:
        engine, tokenizer = self._model.engine, self._model.tokenizer
        params = RequestParams(
            prompt=tuple(prompt),
            max_tokens=settings.max_tokens,
            sampling=settings.sampling,
            stop_token_ids=stop_token_ids(engine.backend.info, tokenizer),
            text=tokenizer.stream,
        )
        engine.peak_bytes_held = 0  # nothing runs, so what it becomes is this answer's
        text, cached, reason = "", 0, ""
        tokens: list[int] = []
        start = first = last = time.perf_counter()
        for event in self._events(params):
            last = time.perf_counter()
            if event.error is not None:
                raise event.error
            cached = event.request.num_cached_tokens
            if event.token is None and event.finish_reason is None:
                listener.reading(event.request.num_computed_tokens, len(prompt))
                continue
            if not tokens:
                first = last
            if event.token is not None:
                tokens.append(event.token)
            text += event.text
            if event.text:
                listener.text(event.text)
            reason = event.finish_reason or reason
        kept = bool(tokens) or reason != "cancelled"
        if kept:
            self.session = replace(self.session, tokens=(*prompt, *tokens), turns=turns)
        run = len(prompt) + max(len(tokens) - (reason != "stop"), 0)
        exact = run * engine.backend.info.exact_bytes_per_token
        self._kv = f"KV held {size(engine.peak_bytes_held)} (the same {run} tokens exact: {size(exact)})"
        context = engine.scheduler.config.context
        full = len(tokens) < settings.max_tokens
        limit = f"the context of {context} tokens is full" if full else f"max_tokens is {settings.max_tokens}"
        return Outcome(
            text=text,
            finish_reason=reason,
            kept=kept,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=cached,
            num_completion_tokens=len(tokens),
            prompt_seconds=first - start,
            decode_seconds=last - first,
            limit=limit if reason == "length" else "",
        )

    def _events(self, params: RequestParams) -> Iterator[Event]:
        """The events of one call to its end. SIGINT cancels it: the handler only puts a word into the queue."""
        events: queue.SimpleQueue[Event | KvarnError | None] = queue.SimpleQueue()
        call = self._runner.submit(params, on_event=events.put)
        ended = False
        try:
            with _on_interrupt(lambda: events.put(None)):
                while not ended:
                    event = events.get()
                    if event is None:
                        call.cancel()
                        continue
                    if isinstance(event, KvarnError):
                        ended = True
                        raise event
                    ended = event.finish_reason is not None
                    yield event
        finally:
            if not ended:
                call.cancel()

    # The text of a turn.

    def _turns(self) -> tuple[int, ...]:
        if not self.session.turns:
            raise UsageError(
                "nothing was said yet"
                if self.is_empty
                else "this session does not say where its turns begin, so none can be dropped; /clear begins anew"
            )
        return self.session.turns

    def _turn(self, text: str, *, first: bool, system: str | None) -> list[int]:
        """The token ids of a message, from the end of what was said to the beginning of the answer."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError("the message holds bytes that are not UTF-8; say it in whole characters") from error
        if not first:
            return self._model.tokenizer.encode_next_turn(text)
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self._model.tokenizer.encode_chat(messages)

    def _exchange(self) -> Exchange:
        """The last turn as text. The message is what stands between the words of the template."""
        tokens, (begin, answer) = self.session.tokens, self.session.turns[-2:]
        turn, user = tokens[begin:answer], ""
        with contextlib.suppress(UsageError):  # the template may refuse a probe; what was said is shown all the same
            before, _, after = self._spelled(self._turn(_PROBE, first=not begin, system=self.session.system)).partition(
                _PROBE
            )
            spelled = self._spelled(turn)
            if spelled.startswith(before) and spelled.endswith(after):
                user = spelled[len(before) : len(spelled) - len(after)]
        tokenizer = self._model.tokenizer
        return Exchange(user=user or tokenizer.decode(turn).strip(), answer=tokenizer.decode(tokens[answer:]))

    def _spelled(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens by their names."""
        return b"".join(map(self._model.tokenizer.token_bytes, tokens)).decode(errors="replace")


@contextlib.contextmanager
def _on_interrupt(action: Callable[[], None]) -> Iterator[None]:
    """Run `action` on SIGINT instead of raising KeyboardInterrupt; it must be safe inside any other code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        action()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
