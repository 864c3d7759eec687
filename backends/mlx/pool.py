"""The two pools of the MLX backend: sealed blocks and exact slots, as arrays.

Per sealed layer `tiles uint8 [M, Hk, tile_nbytes]` with `flags uint8 [M, Hk]`; per layer and slot a page
`[2, Hk, G, D]`. A layer that is exact for good has a page per slot and, since its tokens outlive the tail, one per
block.

MLX arrays are immutable: a write makes a new array, which takes over the old one's memory when nothing else waits for
it, and copies it otherwise. So a step writes a layer's tiles once, before anything of that step reads them (then the
memory is taken over), and everything that is read and written in one step is a page of its own.
"""

import mlx.core as mx
from mlx.core import array

from kvarn.backend import MemoryReport
from kvarn.capacity import page_shape, pool_size
from kvarn.errors import CapacityError
from kvarn.model_plan import Layer, ModelPlan


class Pool:
    """The arrays of one backend; indices come from the core. Every write is pending until `flush`."""

    def __init__(
        self, plan: ModelPlan, num_blocks: int, num_slots: int, dtype: mx.Dtype, device: str, available: int
    ) -> None:
        self.row = {layer.index: i for i, layer in enumerate(plan.sealed)}  # layer index -> its row in `tiles`
        fmt = plan.tile_format
        size = pool_size(plan, dtype.size)
        need = num_blocks * size.block_bytes + num_slots * size.slot_bytes
        # The arrays are filled, so the memory is really taken: ask first, a CPU would start to swap instead.
        if need > available:
            raise CapacityError(
                f"the KV cache of {need / 2**20:.0f} MiB does not fit the {available / 2**20:.0f} MiB that are free "
                f"on {device}; lower --ctx-size"
            )

        def pages(layer: Layer, count: int) -> list[array]:
            return [mx.zeros(page_shape(layer, plan), dtype) for _ in range(count)]

        self.tiles: list[array] = []
        self.flags: list[array] = []
        if fmt is not None:
            heads = plan.sealed[0].num_kv_heads
            self.tiles = [mx.zeros((num_blocks, heads, fmt.tile_nbytes), mx.uint8) for _ in self.row]
            self.flags = [mx.zeros((num_blocks, heads), mx.uint8) for _ in self.row]
        self.slots = {x.index: pages(x, num_slots) for x in plan.layers}
        self.exact_blocks = {x.index: pages(x, num_blocks) for x in plan.exact} if fmt is not None else {}
        self._pending: list[array] = [*self.tiles, *self.flags, *self._all_pages()]
        try:
            self.flush()
        except RuntimeError as error:
            raise CapacityError(
                f"the KV cache of {need / 2**20:.0f} MiB could not be allocated on {device}; lower --ctx-size"
            ) from error

    def _all_pages(self) -> list[array]:
        return [x for layers in (self.slots, self.exact_blocks) for some in layers.values() for x in some]

    def slot(self, layer: int, index: int) -> array:
        """A slot's keys and values of one layer, `[2, Hk, G, D]`; not to be written."""
        return self.slots[layer][index]

    def write_slot(self, layer: int, index: int, first: int, rows: array) -> None:
        """Put keys and values `[2, Hk, N, D]` at the tokens `first` ... of a slot's page."""
        page = self.slots[layer][index]
        page[:, :, first : first + rows.shape[2]] = rows.astype(page.dtype)
        self._pending.append(page)

    def write_block(self, layer: int, block: int, page: array) -> None:
        """Put a whole page `[2, Hk, G, D]` of a layer that is exact for good."""
        kept = self.exact_blocks[layer]
        kept[block] = mx.contiguous(page.astype(kept[block].dtype))
        self._pending.append(kept[block])

    def write_tiles(self, layer: int, blocks: array, tiles: array, flags: array) -> None:
        """Put sealed tiles `uint8 [B, Hk, tile_nbytes]` and flags `uint8 [B, Hk]` of one layer into blocks."""
        row = self.row[layer]
        self.tiles[row][blocks] = tiles
        self.flags[row][blocks] = flags
        self._pending += [self.tiles[row], self.flags[row]]

    def flush(self, *others: array) -> None:
        """Carry out every pending write, and compute `others` in the same go."""
        pending, self._pending = self._pending, []
        mx.eval(*pending, *others)

    def report(self) -> MemoryReport:
        """The bytes of both pools as the arrays have them."""
        return MemoryReport(
            blocks=sum(x.nbytes for x in (*self.tiles, *self.flags))
            + sum(x.nbytes for pages in self.exact_blocks.values() for x in pages),
            slots=sum(x.nbytes for pages in self.slots.values() for x in pages),
        )
