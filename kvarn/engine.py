"""The loop: plan, run, commit; nothing else. What is kept below the memory is the tier's job."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvarn.backend import Backend
from kvarn.block_pool import BlockPool
from kvarn.capacity import holding
from kvarn.errors import BackendError, KvarnError
from kvarn.request import Event, Request, RequestParams
from kvarn.scheduler import Planned, Scheduler, SchedulerConfig, check_room
from kvarn.tier import NO_TIER, Tier

WAIT = 0.05  # seconds between two looks at the inbox while everything waits for the tier


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the pools and limits of the schedule; by default, room for one sequence of the whole context."""

    context: int
    prefill_chunk: int = 512
    token_budget: int | None = None  # tokens of a step; default: one chunk and a token of every other sequence
    max_sequences: int = 1
    blocks: int | None = None
    slots: int | None = None


class Engine:
    """One backend with its pools, and the scheduler that fills them."""

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        *,
        tier: Tier = NO_TIER,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        plan = backend.info.plan
        one = holding(config.context, plan)
        blocks = BlockPool(one.blocks if config.blocks is None else config.blocks)
        slots = BlockPool(one.slots if config.slots is None else config.slots, "slot")
        check_room(config.context, (blocks, slots), (one.blocks, one.slots))
        self.backend = backend
        self.memory = backend.allocate(blocks.size, slots.size)
        self.peak_bytes_held = 0
        self._clock = clock
        self._tier = tier
        self.scheduler = Scheduler(
            config=SchedulerConfig(
                tile_tokens=plan.tile_tokens,
                sealed=plan.preset is not None,
                context=config.context,
                prefill_chunk=config.prefill_chunk,
                token_budget=config.token_budget or config.prefill_chunk + config.max_sequences,
                max_sequences=config.max_sequences,
            ),
            blocks=blocks,
            slots=slots,
            tier=tier,
        )

    def add(self, params: RequestParams) -> Request:
        """Queue a request; see Scheduler.add."""
        request = self.scheduler.add(params)
        request.times.arrived = self._clock()
        return request

    def cancel(self, request: Request) -> bool:
        """Take a request out at any moment; whether it was still there."""
        return self.scheduler.cancel(request)

    def step(self) -> list[Event]:
        """Run one step; the events of every request in it, none when there is no work.

        A step that the backend cannot run ends its requests with the error, not the engine.
        """
        planned = self.scheduler.plan()
        if planned is None:
            if self.scheduler.restores:
                self._tier.wait(WAIT)
            return []
        now = self._clock()
        for request in planned.requests:
            if request.times.started is None:
                request.times.started = now
        self.peak_bytes_held = max(self.peak_bytes_held, self.bytes_held)
        try:
            result = self.backend.run(planned.step)
        except KvarnError as error:
            events = self.scheduler.fail(planned, error)
        except (RuntimeError, MemoryError, ValueError) as error:
            events = self.scheduler.fail(planned, BackendError(f"the backend could not run a step: {error}"))
        else:
            events = self.scheduler.commit(planned, result)
            for source, target in self.scheduler.copies:
                self.backend.copy_exact(source, target)
            self.scheduler.copies.clear()
            self._measure(planned, self._clock() - now)
        self._stamp(events)
        return events

    def _measure(self, planned: Planned, seconds: float) -> None:
        """Tell the tier how fast prompts are computed, from steps that did little else."""
        tokens = sum(len(span.tokens) for span in planned.step.spans)
        if tokens >= self.scheduler.config.tile_tokens:
            self._tier.prefilled(tokens, seconds)

    def close(self) -> None:
        """Let the tier finish what it writes."""
        self._tier.close()

    def _stamp(self, events: list[Event]) -> None:
        now = self._clock()
        for event in events:
            times = event.request.times
            if event.token is not None and times.first_token is None:
                times.first_token = now
            if event.finish_reason is not None:
                times.finished = now

    def stream(self, params: RequestParams) -> Iterator[Event]:
        """Run one request to its end; raises the error that ends it."""
        self.add(params)
        while self.scheduler.has_work:
            for event in self.step():
                if event.error is not None:
                    raise event.error
                yield event

    @property
    def bytes_held(self) -> int:
        """Bytes of the blocks and slots that requests hold now; what is only kept for reuse is not counted."""
        size = self.backend.pool_size
        return self.scheduler.blocks.num_held * size.block_bytes + self.scheduler.slots.num_held * size.slot_bytes

    def cache_report(self) -> dict[str, Any]:
        """What the prefix cache holds in memory and below it, and what it saved, in tokens."""
        scheduler, counters = self.scheduler, self.scheduler.counters
        return {
            "memory": {
                "tiles": len(scheduler.cache),
                "bytes_held": self.bytes_held,
                "bytes_allocated": self.memory.blocks + self.memory.slots,
            },
            "tokens": {
                "from_memory": counters.cached_tokens,
                "from_disk": counters.restored_tokens,
                "computed": counters.computed_tokens,
            },
            "disk": self._tier.report(),
        }
