"""Waiting and running requests -> StepPlan, and StepResult -> events: admission, chunked prefill, decode.

Deterministic: the same arrivals give the same plans.
"""

from collections import deque
from dataclasses import dataclass

from kvarn.block_pool import BlockPool
from kvarn.errors import ContextOverflowError, SealError
from kvarn.request import Event, FinishReason, Request, RequestParams
from kvarn.step import Span, StepPlan, StepResult
from kvarn.visibility import completed_tiles


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of the schedule. `sealed` is false under `exact`, where every tile keeps a slot."""

    tile_tokens: int
    sealed: bool
    context: int
    prefill_chunk: int


class Scheduler:
    """Owns the block tables: which request holds which blocks and slots."""

    def __init__(self, config: SchedulerConfig, blocks: BlockPool, slots: BlockPool) -> None:
        self.config = config
        self.blocks = blocks
        self.slots = slots
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._next_id = 0

    def add(self, params: RequestParams) -> Request:
        """Queue a request; ContextOverflowError when its prompt leaves no room for one token of answer."""
        room = self.config.context - (1 if params.max_tokens else 0)
        if len(params.prompt) > room:
            raise ContextOverflowError(num_prompt_tokens=len(params.prompt), context=self.config.context)
        request = Request(id=self._next_id, params=params, tokens=list(params.prompt))
        self._next_id += 1
        self.waiting.append(request)
        return request

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def plan(self) -> tuple[StepPlan, list[Request]] | None:
        """The next step and the request of each of its spans; None when there is nothing to do."""
        while self.waiting:
            self.running.append(self.waiting.popleft())
        if not self.running:
            return None
        return StepPlan(spans=tuple(self._span(request) for request in self.running)), list(self.running)

    def _span(self, request: Request) -> Span:
        start = request.num_computed_tokens
        stop = min(len(request.tokens), start + self.config.prefill_chunk)
        g = self.config.tile_tokens
        last_tile = (stop - 1) // g
        while len(request.slots) <= (min(last_tile, 1) if self.config.sealed else last_tile):
            request.slots.append(self.slots.allocate())
        before = len(request.blocks)
        if self.config.sealed:
            request.blocks += [self.blocks.allocate() for _ in completed_tiles(start, stop, g)]
        whole = stop == len(request.tokens)
        generates = whole and request.params.max_tokens > 0
        return Span(
            tokens=tuple(request.tokens[start:stop]),
            start=start,
            slots=tuple(request.slots),
            blocks=tuple(request.blocks[:before]),
            seal_into=tuple(request.blocks[before:]),
            want="all" if request.params.return_logits else "last" if generates else "none",
            sampling=request.params.sampling.row(request.num_generated_tokens) if generates else None,
        )

    def commit(self, plan: StepPlan, requests: list[Request], result: StepResult) -> list[Event]:
        """Take in what a step did; a request whose tile could not be sealed ends with that error, alone."""
        events = []
        failures = {failure.span: failure for failure in reversed(result.failures)}
        for i, (span, request, output) in enumerate(zip(plan.spans, requests, result.outputs, strict=True)):
            request.num_computed_tokens = span.stop
            if i in failures:
                failure = failures[i]
                error = SealError(failure.reason, layer=failure.layer, kv_head=failure.kv_head)
                event = Event(request=request, finish_reason="error", error=error)
            elif output.token is not None:
                event = self._generated(request, output.token, output.logprob)
            else:
                done = span.stop == len(request.tokens)
                event = Event(request=request, logits=output.logits, finish_reason="length" if done else None)
            if event.finish_reason is not None:
                self._end(request)
            events.append(event)
        return events

    def _generated(self, request: Request, token: int, logprob: float | None) -> Event:
        if token in request.params.stop_token_ids:
            return Event(request=request, finish_reason="stop")
        request.tokens.append(token)
        full = request.num_generated_tokens >= request.params.max_tokens or len(request.tokens) >= self.config.context
        reason: FinishReason | None = "length" if full else None
        return Event(request=request, token=token, logprob=logprob, finish_reason=reason)

    def _end(self, request: Request) -> None:
        self.running.remove(request)
        for block in request.blocks:
            self.blocks.release(block)
        for slot in request.slots:
            self.slots.release(slot)
