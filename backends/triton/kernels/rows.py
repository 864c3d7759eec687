"""What the rows of a decode step read and write, in one buffer of fixed size on the device, filled by one copy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvarn.backends.triton.kernels.decode import DecodePlan, Pages, Scratch, decode, decode_plan
from kvarn.format import TileFormat

_FIELDS = ("token", "position", "sink", "tail", "length", "own")
_ALIGNED = 4  # fields begin at multiples of 16 bytes, so that one compilation serves all numbers of rows


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence's decode step: the token to run at `position`, its slots, and its sealed blocks, tile 1 first.

    tail: the slot of the own tile; the sink itself while tile 0 fills.
    """

    token: int
    position: int
    sink: int
    tail: int
    blocks: Sequence[int]


class Rows:
    """Up to `size` rows. Buffers never move, so a CUDA graph may read them; `fill` writes them all.

    width: entries of a block table, the same in every buffer of an engine, since it decides into how many splits a row
    is cut (decode_plan) and so its bits. spare: a slot that padded rows write and nobody reads. Without `scratch`, the
    buffer makes its own.
    """

    def __init__(
        self,
        size: int,
        *,
        width: int,
        spare: int,
        heads: int,
        kv_heads: int,
        fmt: TileFormat,
        device: torch.device | str,
        scratch: Scratch | None = None,
    ) -> None:
        self.size, self.spare, self.fmt = size, spare, fmt
        self._column = -(-size // _ALIGNED) * _ALIGNED
        count = len(_FIELDS) * self._column + size * width
        pinned = torch.device(device).type == "cuda"
        self._host = torch.zeros(count, dtype=torch.int32, pin_memory=pinned)
        self._there = torch.zeros(count, dtype=torch.int32, device=device)
        self._numbers = self._host.numpy()
        fields = {name: self._there[i * self._column : i * self._column + size] for i, name in enumerate(_FIELDS)}
        self.tokens, self.positions = fields["token"], fields["position"]
        self.own = fields["own"]
        self.pages = Pages(fields["sink"], fields["tail"], fields["length"])
        self.blocks = self._there[len(_FIELDS) * self._column :].view(size, width)
        self.plan: DecodePlan = decode_plan(width, fmt.tile_tokens, kv_heads)
        self.scratch = scratch or self.plan.scratch(size, heads, fmt.head_dim, device)
        self.output = torch.empty((size, heads, fmt.head_dim), dtype=torch.float32, device=device)

    def fill(self, rows: Sequence[Row]) -> None:
        """Describe a step of these rows; those up to `size` are padding. The step before must have been read back.

        For then its copy from this host buffer has been made too.
        """
        columns = self._numbers[: len(_FIELDS) * self._column].reshape(len(_FIELDS), self._column)
        tables = self._numbers[len(_FIELDS) * self._column :].reshape(self.size, -1)
        columns[:] = np.array([0, 0, self.spare, self.spare, 0, self.spare], dtype=np.int32)[:, None]
        for i, row in enumerate(rows):
            columns[:, i] = (row.token, row.position, row.sink, row.tail, row.position + 1, row.tail)
            tables[i, : len(row.blocks)] = row.blocks
        self._there.copy_(self._host, non_blocking=True)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, pool: Tensor, tiles: Tensor, flags: Tensor, scale: float
    ) -> Tensor:
        """Append and attend in one sealed layer: ops.decode. Nothing here depends on what was filled in.

        query `[size, H, D]`, key and value `[size, Hk, D]`; pool `[S, 2, Hk, G, D]`, tiles and flags: this layer's.
        Returns float32 `[size, H, D]`, a buffer that the next call writes again.
        """
        offset = self.positions.long() % self.fmt.tile_tokens
        pool[self.own.long(), :, :, offset] = torch.stack([key, value], dim=1)
        return decode(
            query, pool, self.pages, tiles, flags, self.blocks, scale, self.fmt, self.plan, self.scratch, self.output
        )
