"""The two pools of the torch backend: sealed blocks and exact slots, as tensors.

`tiles uint8 [L, M, Hk, tile_nbytes]` with `flags uint8 [L, M, Hk]` and `slots [S, L, 2, Hk, G, D]` for the L sealed
layers. A layer that is exact for good has a page per slot and, since its tokens outlive the tail, one per block.
"""

from math import prod

import torch
from torch import Tensor

from kvarn.backend import MemoryReport, PoolSize
from kvarn.errors import CapacityError
from kvarn.model_plan import Layer, ModelPlan


def pool_size(plan: ModelPlan, itemsize: int) -> PoolSize:
    """Bytes of one block and of one slot under a plan."""
    pages = {layer.index: prod(_page(layer, plan)) * itemsize for layer in plan.layers}
    fmt = plan.tile_format
    block = sum(pages[layer.index] for layer in plan.exact) if fmt else 0
    if fmt:
        block += len(plan.sealed) * plan.sealed[0].num_kv_heads * (fmt.tile_nbytes + 1)
    return PoolSize(block_bytes=block, slot_bytes=sum(pages.values()))


def _page(layer: Layer, plan: ModelPlan) -> tuple[int, int, int, int]:
    return (2, layer.num_kv_heads, plan.tile_tokens, layer.head_dim)


class Pool:
    """The tensors of one backend; indices come from the core."""

    def __init__(self, plan: ModelPlan, num_blocks: int, num_slots: int, dtype: torch.dtype, device: str) -> None:
        self.row = {layer.index: i for i, layer in enumerate(plan.sealed)}  # layer index -> its row in `tiles`
        fmt = plan.tile_format
        try:
            if fmt is not None:
                heads = plan.sealed[0].num_kv_heads
                self.tiles = torch.empty(
                    (len(self.row), num_blocks, heads, fmt.tile_nbytes), dtype=torch.uint8, device=device
                )
                self.flags = torch.zeros((len(self.row), num_blocks, heads), dtype=torch.uint8, device=device)
                self.slots = torch.empty(
                    (num_slots, len(self.row), *_page(plan.sealed[0], plan)), dtype=dtype, device=device
                )
            self.exact_slots = {
                x.index: torch.empty((num_slots, *_page(x, plan)), dtype=dtype, device=device) for x in plan.exact
            }
            self.exact_blocks = {
                x.index: torch.empty((num_blocks, *_page(x, plan)), dtype=dtype, device=device)
                for x in plan.exact
                if fmt is not None
            }
        except (RuntimeError, torch.OutOfMemoryError) as error:
            size = pool_size(plan, dtype.itemsize)
            need = num_blocks * size.block_bytes + num_slots * size.slot_bytes
            raise CapacityError(
                f"the KV cache of {need / 2**20:.0f} MiB could not be allocated on {device}; lower --ctx-size"
            ) from error

    def slot(self, layer: int, index: int) -> Tensor:
        """A slot's keys and values of one layer, a view `[2, Hk, G, D]`."""
        if layer in self.row:
            return self.slots[index, self.row[layer]]
        return self.exact_slots[layer][index]

    def report(self) -> MemoryReport:
        """The bytes of both pools as the tensors have them."""
        sealed = bool(self.row)
        blocks = sum(x.nbytes for x in self.exact_blocks.values())
        slots = sum(x.nbytes for x in self.exact_slots.values())
        if sealed:
            blocks += self.tiles.nbytes + self.flags.nbytes
            slots += self.slots.nbytes
        return MemoryReport(blocks=blocks, slots=slots)
