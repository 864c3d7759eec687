"""How prefill attention is cut into programs: plain host code, once for all layers of a step.

Every item of `plan` is one program per kv head: a stretch of positions of one tile and a range of sealed tiles. Spans
of few tokens are cut along the sealed tiles too, or a verify step would read its context in a handful of programs. How
a span is cut depends on that span alone, so a row gets the same bits whatever stands beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.errors import FormatError
from kvarn.format import TileFormat
from kvarn.visibility import num_sealed, pieces

ROWS = {64: 64, 128: 64, 256: 32, 512: 16}  # query rows of a program, by head_dim: what registers hold
MOST_ROWS = 128  # at head_dim 128 where tensor cores read their operands from shared memory (sm_90, sm_100)
SMALLEST_ROWS = 16  # of a tensor-core product
SPLIT_TOKENS = 512  # a span of fewer tokens is split along its sealed tiles, so that about as many programs run
TILES_PER_SPLIT = 4
MAX_SPLITS = 64
ITEM_FIELDS = 12


@dataclass(frozen=True, kw_only=True)
class Span:
    """One sequence's part of a launch. Exact tokens from key_start on are fresh, those before it stand in the slots."""

    query_at: int  # row of its first token in query and output
    num_tokens: int
    start: int  # position of its first token
    key_at: int  # row of position key_start in keys and values
    key_start: int  # at most start; start itself where keys and values hold the fresh tokens alone
    sink: int  # slot of tile 0
    tail: int  # slot of tile start // G, where that is not tile 0 and begins before key_start


@dataclass(frozen=True)
class Launch:
    """Items that run with the same number of rows: int32 `[items, ITEM_FIELDS]`, on the device."""

    rows: int
    items: Tensor


@dataclass(frozen=True)
class Work:
    """What `plan` made of the spans of a step; the same for all layers."""

    fmt: TileFormat
    ratio: int  # query heads per kv head
    int8: bool  # scores of sealed keys as products of integers
    launches: tuple[Launch, ...]
    counts: Tensor  # sealed tiles that each span reads, int32 [spans]
    merges: Tensor  # tokens that were split: output row, first part, distance of its parts, their number; int32 [n, 4]
    num_parts: int
    num_tiles: int  # the most sealed tiles that a span reads


def plan(
    spans: Sequence[Span],
    ratio: int,
    fmt: TileFormat,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    int8: bool = False,
) -> Work:
    """Cut spans into items, once for all layers. How a span is cut depends on nothing but the span.

    An item is positions of one tile and a range of sealed tiles; fields: output row, positions, first position, row of
    position 0 in keys (may be negative), key_start, sink, tail, span, first and last sealed tile, whether it reads the
    exact tokens, and its first part (-1: straight to the output). ratio: query heads per kv head; dtype: the model's;
    int8: scores of sealed keys are products of integers, less exact. Raises FormatError for a span without tokens, and
    for heads that the kernel does not take.
    """
    device = torch.device(device)
    items: dict[int, list[list[int]]] = {}
    merges: list[list[int]] = []
    num_parts = 0
    for index, span in enumerate(spans):
        if span.num_tokens < 1 or not 0 <= span.key_start <= span.start:
            raise FormatError(
                f"a span of {span.num_tokens} tokens at {span.start} with keys from {span.key_start} on; "
                "give it at least one token, and keys from its start or before"
            )
        rows = _rows(span.num_tokens * ratio, ratio, fmt, dtype, device, int8)
        for piece in pieces(span.start, span.start + span.num_tokens, fmt.tile_tokens):
            share = _share(piece.sealed, span.num_tokens)
            splits = max(-(-piece.sealed // share), 1)
            programs = -(-(piece.stop - piece.start) // (rows // ratio))
            size = -(-(piece.stop - piece.start) // programs)
            for first in range(piece.start, piece.stop, size):
                count = min(size, piece.stop - first)
                row = span.query_at + first - span.start
                for split in range(splits):
                    low, high = split * share, min((split + 1) * share, piece.sealed)
                    at = num_parts + split * count if splits > 1 else -1
                    exact = [span.key_at - span.key_start, span.key_start, span.sink, span.tail]
                    items.setdefault(rows, []).append(
                        [row, count, first, *exact, index, low, high, int(split == 0), at]
                    )
                if splits > 1:
                    merges += [[row + i, num_parts + i, count, splits] for i in range(count)]
                    num_parts += splits * count
    counts = [num_sealed(span.start + span.num_tokens - 1, fmt.tile_tokens) for span in spans]
    # The longest first, so that none begins when all others are done.
    for group in items.values():
        group.sort(key=lambda item: item[8] - item[9])
    return Work(
        fmt=fmt,
        ratio=ratio,
        int8=int8,
        launches=tuple(Launch(rows, _ids(group, device)) for rows, group in items.items()),
        counts=_ids(counts, device),
        merges=_ids(merges, device),
        num_parts=num_parts,
        num_tiles=max(counts, default=0),
    )


def _ids(numbers: Sequence[int] | Sequence[list[int]], device: torch.device | str) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _share(sealed: int, num_tokens: int) -> int:
    """Sealed tiles that one item reads."""
    splits = min(max(SPLIT_TOKENS // num_tokens, 1), MAX_SPLITS)
    return max(-(-sealed // splits), TILES_PER_SPLIT)


def _rows(wanted: int, ratio: int, fmt: TileFormat, dtype: torch.dtype, device: torch.device, int8: bool) -> int:
    """Query rows of a program: a power of two, all heads of a position in it."""
    shared_operands = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
    most = most_rows(fmt, dtype, shared_operands, int8)
    if ratio > most:
        raise FormatError(
            f"{ratio} query heads per kv head at head_dim {fmt.head_dim} are more than the {most} that the prefill "
            f"kernel takes in {dtype}; use the plain torch version"
        )
    return min(max(1 << (wanted - 1).bit_length(), SMALLEST_ROWS), most)


def most_rows(fmt: TileFormat, dtype: torch.dtype, shared_operands: bool, int8: bool) -> int:
    """The most query rows of a program; shared_operands: as on sm_90 and sm_100. FormatError where there are none."""
    wide = dtype == torch.float32
    if wide and fmt.head_dim > 256:
        raise FormatError(
            f"the prefill kernel takes no float32 at head_dim {fmt.head_dim}; use bfloat16 or the plain torch version"
        )
    widths = {fmt.key_bits, fmt.value_bits}
    rows = ROWS[fmt.head_dim]
    if fmt.head_dim == 128 and shared_operands:
        # Codes that straddle words take registers that the larger form has not.
        return MOST_ROWS if widths <= {2, 4, 8} and not wide and not int8 else rows
    crowded = fmt.head_dim == 128 and not widths <= {2, 4}
    crowded |= fmt.head_dim == 256 and (wide or not (shared_operands or widths <= {2, 4, 8}))
    return rows // 2 if crowded else rows
