"""Bytes -> blocks, slots and contexts: what a context takes, what fits, and which limit binds."""

from dataclasses import dataclass

from kvarn.backend import ModelInfo, PoolSize
from kvarn.errors import CapacityError, UsageError
from kvarn.model_plan import ModelPlan
from kvarn.visibility import num_sealed

MEMORY_FRACTION = 0.9  # of the available bytes that the pools may take


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Blocks and slots that one sequence of some tokens holds."""

    blocks: int
    slots: int

    def nbytes(self, size: PoolSize) -> int:
        """Its bytes in the pools."""
        return self.blocks * size.block_bytes + self.slots * size.slot_bytes


def holding(tokens: int, plan: ModelPlan) -> Holding:
    """What a sequence of `tokens` tokens holds: under a preset its sealed blocks, the sink and the tail."""
    tiles = -(-tokens // plan.tile_tokens)
    if plan.preset is None:
        return Holding(blocks=0, slots=tiles)
    return Holding(blocks=num_sealed(tokens, plan.tile_tokens), slots=min(tiles, 2))


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The planned context of one sequence, what it takes, and what set it."""

    context: int
    kv_bytes: int
    exact_bytes: int
    available_bytes: int
    limit: str  # "asked for", "the model's context" or "memory"


def plan_context(info: ModelInfo, size: PoolSize, available_bytes: int, asked: int | None) -> Capacity:
    """The context for one sequence: as asked for, else as much of the model's own as fits the memory.

    Raises CapacityError when what was asked for does not fit, with both numbers and the longest context that does;
    UsageError when it is beyond the model's own context.
    """
    plan = info.plan
    if asked is not None and not 1 <= asked <= plan.max_context:
        raise UsageError(f"--ctx-size {asked} is not between 1 and the model's context of {plan.max_context}")
    budget = int(available_bytes * MEMORY_FRACTION)
    fits = longest_context(plan, size, budget)
    context, limit = (asked, "asked for") if asked is not None else (plan.max_context, "the model's context")
    if asked is None and fits < context:
        context, limit = fits, "memory"
    need = holding(context, plan).nbytes(size)
    if need > budget or context < 1:
        raise CapacityError(
            f"a context of {context} tokens needs {need / 2**20:.0f} MiB of KV cache, "
            f"{budget / 2**20:.0f} MiB of memory are free for it; use --ctx-size {max(fits, 1)} or less"
        )
    return Capacity(
        context=context,
        kv_bytes=need,
        exact_bytes=-(-context // plan.tile_tokens) * plan.tile_tokens * info.exact_bytes_per_token,
        available_bytes=available_bytes,
        limit=limit,
    )


def longest_context(plan: ModelPlan, size: PoolSize, budget: int) -> int:
    """The most tokens of one sequence that `budget` bytes hold, up to the model's context; 0 when not one fits."""
    low, high = 0, plan.max_context
    while low < high:
        middle = (low + high + 1) // 2
        if holding(middle, plan).nbytes(size) <= budget:
            low = middle
        else:
            high = middle - 1
    return low
