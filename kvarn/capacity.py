"""Bytes -> blocks, slots and contexts: what a context takes, what fits, and which limit binds."""

from dataclasses import dataclass
from math import prod

from kvarn.backend import ModelInfo, PoolSize
from kvarn.errors import CapacityError, UsageError
from kvarn.model_plan import Layer, ModelPlan
from kvarn.visibility import num_sealed

MEMORY_FRACTION = 0.9  # of the available bytes that the pools may take


def page_shape(layer: Layer, plan: ModelPlan) -> tuple[int, int, int, int]:
    """Shape of one exact tile of one layer, keys and values: `[2, Hk, G, D]`."""
    return (2, layer.num_kv_heads, plan.tile_tokens, layer.head_dim)


def pool_size(plan: ModelPlan, itemsize: int) -> PoolSize:
    """Bytes of one block and of one slot under a plan, for a model dtype of `itemsize` bytes."""
    pages = {layer.index: prod(page_shape(layer, plan)) * itemsize for layer in plan.layers}
    fmt = plan.tile_format
    block = sum(pages[layer.index] for layer in plan.exact) if fmt else 0
    if fmt:
        block += len(plan.sealed) * plan.sealed[0].num_kv_heads * (fmt.tile_nbytes + 1)
    return PoolSize(block_bytes=block, slot_bytes=sum(pages.values()))


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Blocks and slots that one sequence of some tokens holds."""

    blocks: int
    slots: int

    def nbytes(self, size: PoolSize) -> int:
        """Its bytes in the pools."""
        return self.blocks * size.block_bytes + self.slots * size.slot_bytes


def holding_of(tokens: int, tile_tokens: int, *, sealed: bool) -> Holding:
    """What a sequence of `tokens` tokens holds: under a preset its sealed blocks, the sink and the tail."""
    tiles = -(-tokens // tile_tokens)
    if not sealed:
        return Holding(blocks=0, slots=tiles)
    return Holding(blocks=num_sealed(tokens, tile_tokens), slots=min(tiles, 2))


def holding(tokens: int, plan: ModelPlan) -> Holding:
    """The same under a model's plan."""
    return holding_of(tokens, plan.tile_tokens, sealed=plan.preset is not None)


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The planned context of one sequence, what it takes, and what set it."""

    context: int
    kv_bytes: int
    exact_bytes: int
    available_bytes: int
    limit: str  # "asked for", "the model's context" or "memory"


def plan_context(
    info: ModelInfo, size: PoolSize, available_bytes: int, asked: int | None, *, fraction: float = MEMORY_FRACTION
) -> Capacity:
    """The context for one sequence: as asked for, else as much of the model's own as fits `fraction` of the memory.

    Raises CapacityError when what was asked for does not fit, with both numbers and the longest context that does;
    UsageError when it is beyond the model's own context.
    """
    plan = info.plan
    if asked is not None and not 1 <= asked <= plan.max_context:
        raise UsageError(f"--ctx-size {asked} is not between 1 and the model's context of {plan.max_context}")
    budget = int(available_bytes * fraction)
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


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Pools for many sequences: their sizes, what they hold, and what set the context.

    `sequences` is how many sequences of the whole context run at once without preemption.
    """

    context: int
    limit: str  # "asked for", "the model's context" or "memory"
    blocks: int
    slots: int
    kv_bytes: int
    tokens: int
    sequences: int


def plan_serving(
    info: ModelInfo,
    size: PoolSize,
    available_bytes: int,
    *,
    context: int | None,
    max_sequences: int,
    fraction: float = MEMORY_FRACTION,
) -> Serving:
    """Fill `fraction` of the memory with blocks and slots for up to `max_sequences` sequences.

    Under a preset every sequence gets its sink and its tail, and as many sinks again are kept for reuse; the rest of
    the memory becomes blocks, as many as the sequences can use twice over. Raises as `plan_context` does.
    """
    plan = info.plan
    one = plan_context(info, size, available_bytes, context, fraction=fraction)
    budget = int(available_bytes * fraction)
    need = holding(one.context, plan)
    if plan.preset is None:
        blocks, slots = 0, min(budget // size.slot_bytes, 2 * max_sequences * need.slots)
        tiles = slots
    else:
        spare = budget - need.nbytes(size)
        slots = need.slots + min(3 * max_sequences - need.slots, spare // 2 // size.slot_bytes)
        slots = max(slots, need.slots)
        left = budget - slots * size.slot_bytes
        blocks = min(left // size.block_bytes, max(2 * max_sequences * need.blocks, need.blocks))
        tiles = blocks + slots
    per_pool = [pool // count for pool, count in ((blocks, need.blocks), (slots, need.slots)) if count]
    return Serving(
        context=one.context,
        limit=one.limit,
        blocks=blocks,
        slots=slots,
        kv_bytes=blocks * size.block_bytes + slots * size.slot_bytes,
        tokens=tiles * plan.tile_tokens,
        sequences=min(*per_pool, max_sequences) if per_pool else max_sequences,
    )
