"""The loop: plan, run, commit; nothing else."""

from collections.abc import Iterator

from kvarn.backend import Backend
from kvarn.block_pool import BlockPool
from kvarn.capacity import holding
from kvarn.request import Event, Request, RequestParams
from kvarn.scheduler import Scheduler, SchedulerConfig


class Engine:
    """One backend with its pools, and the scheduler that fills them."""

    def __init__(self, backend: Backend, *, context: int, prefill_chunk: int) -> None:
        plan = backend.info.plan
        need = holding(context, plan)
        self.backend = backend
        self.memory = backend.allocate(need.blocks, need.slots)
        config = SchedulerConfig(
            tile_tokens=plan.tile_tokens,
            sealed=plan.preset is not None,
            context=context,
            prefill_chunk=prefill_chunk,
        )
        self.scheduler = Scheduler(config, BlockPool(need.blocks), BlockPool(need.slots, "slot"))
        self.peak_bytes_held = 0

    def add(self, params: RequestParams) -> Request:
        """Queue a request; see Scheduler.add."""
        return self.scheduler.add(params)

    def step(self) -> list[Event]:
        """Run one step; the events of every request in it, none when there is no work."""
        planned = self.scheduler.plan()
        if planned is None:
            return []
        plan, requests = planned
        self.peak_bytes_held = max(self.peak_bytes_held, self.bytes_held)
        return self.scheduler.commit(plan, requests, self.backend.run(plan))

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
        """Bytes of the blocks and slots that requests hold now."""
        size = self.backend.pool_size
        return self.scheduler.blocks.num_used * size.block_bytes + self.scheduler.slots.num_used * size.slot_bytes
