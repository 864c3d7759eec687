"""The kernels as operations with the signatures of ops.py, for kvarn.selfcheck and the start-up check.

A step calls them in its own way, with everything that all layers share made once: rows.py for decode, `spans` here for
prefill.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.backends.triton import ops
from kvarn.backends.triton.kernels import decode as decode_kernels
from kvarn.backends.triton.kernels import prefill as prefill_kernels
from kvarn.backends.triton.kernels.prefill import Scratch, prefill, prefill_scratch
from kvarn.backends.triton.kernels.prefill_plan import Span, Work, plan
from kvarn.backends.triton.kernels.seal import seal
from kvarn.errors import FormatError
from kvarn.format import TileFormat

_log = logging.getLogger("kvarn.triton")

__all__ = ["Prefill", "attend", "decode", "plan_prefill", "seal"]


def decode(
    query: Tensor,
    pool: Tensor,
    pages: ops.Pages,
    tiles: Tensor | None,
    flags: Tensor | None,
    blocks: ops.Tiles,
    scale: float,
    fmt: TileFormat | None,
) -> Tensor:
    """ops.decode by the kernels; exact pages alone (fmt None) take the plain operations. Reads its lists on the host:
    for checks, not for steps."""
    if fmt is None or tiles is None or flags is None:
        return ops.decode(query, pool, pages, tiles, flags, blocks, scale, fmt)
    b, h, d = query.shape
    held: list[list[int]] = [[] for _ in range(b)]
    valid = [0] * b
    for row, index, count in zip(pages.row.tolist(), pages.index.tolist(), pages.valid.tolist(), strict=True):
        held[row].append(index)
        valid[row] = count  # the last page of a row is its own tile
    tables: list[list[int]] = [[] for _ in range(b)]
    for row, block in zip(blocks.row.tolist(), blocks.index.tolist(), strict=True):
        tables[row].append(block)
    width = max(1, *(len(table) for table in tables))
    lengths = [
        (len(table) + len(slots) - 1) * fmt.tile_tokens + count
        for table, slots, count in zip(tables, held, valid, strict=True)
    ]

    def ids(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=query.device)

    split = decode_kernels.decode_plan(width, fmt.tile_tokens, pool.shape[2])
    return decode_kernels.decode(
        query,
        pool,
        decode_kernels.Pages(ids([x[0] for x in held]), ids([x[-1] for x in held]), ids(lengths)),
        tiles,
        flags,
        ids([[*table, *[0] * (width - len(table))] for table in tables]),
        scale,
        fmt,
        split,
        split.scratch(b, h, d, query.device),
        torch.empty((b, h, d), dtype=torch.float32, device=query.device),
    )


def attend(
    query: Tensor,
    sink: Tensor,
    window: Tensor,
    tiles: Tensor,
    flags: Tensor,
    blocks: Tensor,
    start: int,
    scale: float,
    fmt: TileFormat,
) -> Tensor:
    """ops.attend by the prefill kernels, or, for shapes that they do not take, by the plain operations, said once."""
    try:
        return prefill_kernels.attend(query, sink, window, tiles, flags, blocks, start, scale, fmt)
    except FormatError as error:
        _say(str(error))
        return ops.attend(query, sink, window, tiles, flags, blocks, start, scale, fmt)


@functools.cache
def _say(reason: str) -> None:
    _log.warning("kvarn: prefill runs on plain torch operations, which is slow: %s", reason)


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """The spans of a step that run through prefill, planned once for all layers."""

    work: Work
    scratch: Scratch
    blocks: Tensor  # int32 [spans, W]

    def attend(
        self, query: Tensor, windows: Sequence[Tensor], pool: Tensor, tiles: Tensor, flags: Tensor, scale: float
    ) -> Tensor:
        """One sealed layer, all spans in one launch: query `[N, H, D]`, the spans' tokens one after another; windows
        `[2, Hk, W, D]` as in ops.attend, one a span. Returns `[N, H, D]` in the query's dtype."""
        keys, values = (windows[0] if len(windows) == 1 else torch.cat(list(windows), dim=2)).transpose(1, 2)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        return prefill(query, keys, values, pool, tiles, flags, self.blocks, self.work, scale, self.scratch, output)


def plan_prefill(
    spans: Sequence[tuple[int, int, int]],
    tables: Sequence[Sequence[int]],
    *,
    heads: int,
    kv_heads: int,
    fmt: TileFormat,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Prefill | None:
    """Plan spans of (start, tokens, sink slot) with their sealed blocks, tile 1 first; None where the kernels do not
    take the model's shapes, which is said once."""
    g = fmt.tile_tokens
    query_at, key_at, parts = 0, 0, []
    for start, tokens, sink in spans:
        base = start // g * g
        parts.append(
            Span(
                query_at=query_at,
                num_tokens=tokens,
                start=start,
                key_at=key_at,
                key_start=base,
                sink=sink,
                tail=sink,  # not read: the window begins with the own tile
            )
        )
        query_at += tokens
        key_at += start + tokens - base
    try:
        work = plan(parts, heads // kv_heads, fmt, dtype, device)
    except FormatError as error:
        _say(str(error))
        return None
    width = max(1, *(len(table) for table in tables))
    padded = [[*table, *[0] * (width - len(table))] for table in tables]
    blocks = torch.tensor(padded, dtype=torch.int32, device=device)
    return Prefill(work=work, scratch=prefill_scratch(work, heads, device), blocks=blocks)
