"""The two pools of the torch backend: sealed blocks and exact slots, as tensors.

`tiles uint8 [L, M, Hk, tile_nbytes]` with `flags uint8 [L, M, Hk]` and `slots [S, L, 2, Hk, G, D]` for the L sealed
layers. A layer that is exact for good has a page per slot and, since its tokens outlive the tail, one per block.
"""

import torch
from torch import Tensor

from kvarn.backend import MemoryReport
from kvarn.capacity import page_shape, pool_size
from kvarn.errors import CapacityError
from kvarn.model_plan import ModelPlan


class Pool:
    """The tensors of one backend; indices come from the core."""

    def __init__(
        self, plan: ModelPlan, num_blocks: int, num_slots: int, dtype: torch.dtype, device: str, *, spare: bool = False
    ) -> None:
        """`spare`: one slot more, which padded rows of a decode step write and nobody reads."""
        self.spare = num_slots  # its index
        num_slots += spare
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
                    (num_slots, len(self.row), *page_shape(plan.sealed[0], plan)), dtype=dtype, device=device
                )
            self.exact_slots = {
                x.index: torch.empty((num_slots, *page_shape(x, plan)), dtype=dtype, device=device) for x in plan.exact
            }
            self.exact_blocks = {
                x.index: torch.empty((num_blocks, *page_shape(x, plan)), dtype=dtype, device=device)
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

    def pages(self, layer: int) -> Tensor:
        """All slots of one layer, a view `[S, 2, Hk, G, D]`."""
        return self.slots[:, self.row[layer]] if layer in self.row else self.exact_slots[layer]

    def report(self) -> MemoryReport:
        """The bytes of both pools as the tensors have them."""
        sealed = bool(self.row)
        blocks = sum(x.nbytes for x in self.exact_blocks.values())
        slots = sum(x.nbytes for x in self.exact_slots.values())
        if sealed:
            blocks += self.tiles.nbytes + self.flags.nbytes
            slots += self.slots.nbytes
        return MemoryReport(blocks=blocks, slots=slots)
