"""Prefill attention over packed tiles, and verify of a few tokens. Reference: kvarn.reference.attend, ops.attend.

A program attends a stretch of positions of one tile, all query heads of one kv head as rows `[M, D]`; prefill_plan cuts
them. So every row reads the same sealed tiles, whole, and only the own tile is masked.

Three launches. `_partition` lists the sealed tiles of every span and kv head by the basis of their keys, plain ones and
rotated ones: the main loop then holds one form of the query and has no branch. `_attend` reads the plain tiles, the
rotated tiles, rotates what it has summed back, once, and goes on with the exact tokens. `_combine` merges the splits.

A tile is dequantized in registers as far as float16 carries it: `code * scale + zero`, in units of 2^9. The factors
that may leave its range, keys per token and values per channel, act on the float32 products. Queries are divided by
their largest number first.

Tolerance: 2e-3 of the largest output. Products run in float16 with float32 sums; exact tokens in the model's dtype,
with weights in two parts where that is bfloat16. Nothing that comes after a position enters its result.
"""

# mypy: disable-error-code=import-untyped, allow-untyped-defs, allow-incomplete-defs
# mypy: allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass
from math import e, log2
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvarn.backends.triton.kernels.compile_case import ARCHITECTURES, CompileCase
from kvarn.backends.triton.kernels.prefill_plan import (
    ITEM_FIELDS,
    ROWS,
    SMALLEST_ROWS,
    Span,
    Work,
    most_rows,
    plan,
)
from kvarn.backends.triton.kernels.tile import (
    codes,
    constants,
    constants_of,
    halves,
    order,
    rotate,
    tile_base,
    unit,
    words,
)
from kvarn.format import TileFormat

TOKENS = {64: 64, 128: 64, 256: 32, 512: 32}  # tokens of a tile that a program holds at a time
OPTIONS = {"enable_fp_fusion": True}  # one operation and one rounding less in every number of a tile
MOST_REGISTERS = {"maxnreg": 255}  # or the assembler spills a few to fit more programs on a multiprocessor
PARTITION_STEP = 128
LOG2_E = log2(e)
_POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
_UNIT = tl.constexpr(2.0**-9)  # of dequantized keys and values: 255 codes of the largest scale stay in float16's range


@triton.jit
def _partition(
    flags, blocks, counts, lists, before, flag_stride, table_stride, width,
    HK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One span and kv head: lists int32 `[spans, Hk, 2, T]`, the blocks of its plain and of its rotated tiles;
    before int32 `[spans, Hk, T + 1]`, how many of the first i tiles are plain."""
    head, span = tl.program_id(0), tl.program_id(1)
    at = span * HK + head
    count = tl.load(counts + span)
    plain_list = lists + at.to(tl.int64) * 2 * width
    before += at.to(tl.int64) * (width + 1)
    tl.store(before, 0)
    plain = 0
    for first in range(0, count, STEP):
        i = first + tl.arange(0, STEP)
        read = i < count
        block = tl.load(blocks + span.to(tl.int64) * table_stride + i, mask=read, other=0)
        rotated = tl.load(flags + block.to(tl.int64) * flag_stride + head, mask=read, other=1).to(tl.int32) & 1
        is_plain = 1 - rotated
        upto = plain + tl.cumsum(is_plain, 0)
        tl.store(before + i + 1, upto, mask=read)
        to = tl.where(rotated == 1, width + i - upto, upto - 1)
        tl.store(plain_list + to, block, mask=read)
        plain += tl.sum(is_plain, 0)


@triton.jit
def _centered(code, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Codes in their units -> `(code - 2^(BITS-1)) * UNIT`, float16, exact: what follows is rounded in proportion to
    the spread of the codes, not to their mean."""
    return code * (1.0 / unit(COLUMNS, BITS) * _UNIT).to(tl.float16)[None, :] - (1 << (BITS - 1)) * _UNIT


@triton.jit
def _dequantized(code, scale, zero, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """`(code * scale + zero) * UNIT` of codes in their units, one scale and zero per row, in float16 all the way."""
    middle = (zero + scale * (1 << (BITS - 1))) * _UNIT
    return _centered(code, COLUMNS, BITS) * scale.to(tl.float16)[:, None] + middle.to(tl.float16)[:, None]


@triton.jit
def _int8_scores(q, code, scale, zero, N: tl.constexpr, BITS: tl.constexpr):
    """Scores `[M, N]` of codes as integers, for queries `[M, D]` that take on the scales and are rounded to int8."""
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    wide = q.to(tl.float32)
    folded = wide * scale[None, :]
    top = tl.maximum(tl.max(tl.abs(folded), 1), 1e-30)
    folded = folded * (127.0 / top)[:, None]
    folded = (folded + tl.where(folded >= 0, 0.5, -0.5)).to(tl.int8)
    code = (_centered(code, N, BITS) * (1 / _UNIT)).to(tl.int8)
    middle = tl.sum(wide * (zero + scale * MIDDLE)[None, :], 1)
    s = tl.dot(folded, code, out_dtype=tl.int32).to(tl.float32)
    return s * (top * (1.0 / 127.0))[:, None] + middle[:, None]


@triton.jit
def _weigh(s, m, total):
    """One step of the running softmax: scores `[M, N]`, powers of two -> weights, maximum, sum, factor of the past."""
    top = tl.maximum(m, tl.max(s, 1))
    shrink = tl.exp2(m - top)
    p = tl.exp2(s - top[:, None])
    return p, top, total * shrink + tl.sum(p, 1), shrink


@triton.jit
def _sealed(
    base, t, q, peak, m, total, acc,
    D: tl.constexpr, G: tl.constexpr, N: tl.constexpr, INT8: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    K_CODES: tl.constexpr, K_SCALE: tl.constexpr, K_ZERO: tl.constexpr, K_TOKEN: tl.constexpr,
    V_CODES: tl.constexpr, V_SCALE: tl.constexpr, V_ZERO: tl.constexpr, V_CHANNEL: tl.constexpr,
):  # fmt: skip
    """The tokens t ... t+N-1 of a sealed tile enter the running softmax of queries `[M, D]`, in the tile's basis."""
    d = tl.arange(0, D)
    tokens = t + order(N, KEY_BITS)
    scale, zero = constants_of(halves(base, K_SCALE), d), constants_of(halves(base, K_ZERO), d)
    k = codes(words(base, K_CODES) + t * KEY_BITS // 32, d, N, KEY_BITS, G * KEY_BITS // 32)
    token = constants_of(halves(base, K_TOKEN), tokens)
    if INT8:
        s = _int8_scores(q, k, scale, zero, N, KEY_BITS) * token[None, :]
    else:
        s = tl.dot(q, _dequantized(k, scale, zero, N, KEY_BITS)) * (token * (1 / _UNIT))[None, :]
    p, m, total, shrink = _weigh(s * peak[:, None], m, total)
    v = codes(words(base, V_CODES), tokens, D, VALUE_BITS, D * VALUE_BITS // 32)
    scale, zero = constants_of(halves(base, V_SCALE), tokens), constants_of(halves(base, V_ZERO), tokens)
    channel = constants_of(halves(base, V_CHANNEL), order(D, VALUE_BITS)) * (1 / _UNIT)
    o = tl.dot(p.to(tl.float16), _dequantized(v, scale, zero, D, VALUE_BITS))
    return m, total, acc * shrink[:, None] + o * channel[None, :]


@triton.jit
def _exact_rows(fresh, token_stride, page, at, position, key_start, seen, columns, D: tl.constexpr, G: tl.constexpr):
    """Exact keys or values of positions `[N]` of one tile: those from key_start on are fresh, the others in a page."""
    row = tl.where(
        position >= key_start,
        fresh + (at + position).to(tl.int64) * token_stride,
        page + (position % G).to(tl.int64) * D,
    )
    # What was never written may hold anything, and 0 * NaN is NaN.
    return tl.load(row[:, None] + columns[None, :], mask=seen[:, None], other=0.0)


@triton.jit
def _exact(k, v, q, hidden, factor, m, total, acc, PRECISION: tl.constexpr):
    """Exact keys and values `[N, D]` enter the running softmax of queries `[M, D]`."""
    if PRECISION == "model":
        s = tl.dot(q, tl.trans(k))
    else:
        s = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision=PRECISION)
    p, m, total, shrink = _weigh(tl.where(hidden, float("-inf"), s * factor), m, total)
    acc = acc * shrink[:, None]
    if PRECISION == "model":
        weight = p.to(v.dtype)
        acc = tl.dot(weight, v, acc)
        if v.dtype == tl.bfloat16:
            acc = tl.dot((p - weight.to(tl.float32)).to(v.dtype), v, acc)
    else:
        acc = tl.dot(p, v.to(tl.float32), acc, input_precision=PRECISION)
    return m, total, acc


@triton.jit
def _rows(item, head, R: tl.constexpr, M: tl.constexpr):
    """The rows of an item, int32 `[M]`: which token of it, its row in query and output, its head, whether it is one.

    Read anew wherever they are wanted, or they would take registers all through the main loop.
    """
    i = tl.arange(0, M)
    count = tl.load(item + 1, volatile=True)
    index = tl.minimum(i // R, count - 1)
    return index, tl.load(item, volatile=True) + index, head * R + i % R, i // R < count


@triton.jit
def _queries(query, item, head, q_token, q_head, R: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """The queries of an item, `[M, D]`; rows that are none are zero."""
    _, row, query_head, live = _rows(item, head, R, M)
    at = row.to(tl.int64) * q_token + query_head * q_head
    return tl.load(query + at[:, None] + tl.arange(0, D)[None, :], mask=live[:, None], other=0.0)


@triton.jit
def _attend(
    query, keys, values, pool, tiles, lists, before, items, output, stats, parts,
    q_token, q_head, k_token, k_head, v_token, v_head, page_stride, page_side, page_head, tile_stride, o_token, width,
    factor, root,
    HK: tl.constexpr, R: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT_N: tl.constexpr, FIELDS: tl.constexpr,
    PRECISION: tl.constexpr, INT8: tl.constexpr, D: tl.constexpr, G: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, TILE_NBYTES: tl.constexpr,
    K_CODES: tl.constexpr, K_SCALE: tl.constexpr, K_ZERO: tl.constexpr, K_TOKEN: tl.constexpr,
    V_CODES: tl.constexpr, V_SCALE: tl.constexpr, V_ZERO: tl.constexpr, V_CHANNEL: tl.constexpr,
):  # fmt: skip
    """One item (see `plan`) and kv head: straight into output, or as a part with its maximum and sum."""
    head = tl.program_id(0)
    item = items + tl.program_id(1) * FIELDS
    span, first, last = tl.load(item + 7), tl.load(item + 8), tl.load(item + 9)
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    list_at = (span * HK + head).to(tl.int64)
    for phase in range(2):
        low = tl.load(before + list_at * (width + 1) + first)
        high = tl.load(before + list_at * (width + 1) + last)
        low = tl.where(phase == 1, first - low, low)
        high = tl.where(phase == 1, last - high, high)
        if low < high:
            wide = _queries(query, item, head, q_token, q_head, R, M, D).to(tl.float32) * factor
            if phase == 1:
                wide = rotate(wide, M, D) * root
            peak = tl.max(tl.abs(wide), 1)
            peak = tl.where(peak > 0, peak, 1.0)
            q = (wide / peak[:, None]).to(tl.float16)
            blocks = lists + (list_at * 2 + phase) * width
            STEPS: tl.constexpr = G // N
            for step in range(low * STEPS, high * STEPS):
                base = tile_base(tiles, tl.load(blocks + step // STEPS), head, tile_stride, TILE_NBYTES)
                m, total, acc = _sealed(
                    base, step % STEPS * N, q, peak, m, total, acc, D, G, N, INT8, KEY_BITS, VALUE_BITS,
                    K_CODES, K_SCALE, K_ZERO, K_TOKEN, V_CODES, V_SCALE, V_ZERO, V_CHANNEL,
                )  # fmt: skip
    # The channels stand in the order of their codes. That permutes the bits of an index, and a Walsh-Hadamard matrix
    # is the same after it; so exact values are read in that order, and only the output is put back into its own.
    channels = order(D, VALUE_BITS)
    if first < last:
        acc = rotate(acc, M, D) * root

    if tl.load(item + 10) == 1:
        key_at, key_start = tl.load(item + 3), tl.load(item + 4)
        sink, tail = tl.load(item + 5), tl.load(item + 6)
        q = _queries(query, item, head, q_token, q_head, R, M, D)
        index, _, _, _ = _rows(item, head, R, M)
        start = tl.load(item + 2)
        own = start // G * G
        ahead = tl.minimum(own, G)  # tokens of the sink that come before those of the own tile
        stop = start + tl.load(item + 1)
        for step in range(0, ahead + stop - own, EXACT_N):
            in_sink = step < ahead
            slot = tl.where(in_sink | (own == 0), sink, tail)
            page = pool + slot.to(tl.int64) * page_stride + head * page_head
            position = tl.where(in_sink, step, own + step - ahead) + tl.arange(0, EXACT_N)
            seen = position < stop
            k = _exact_rows(
                keys + head * k_head, k_token, page, key_at, position, key_start, seen, tl.arange(0, D), D, G
            )
            v = _exact_rows(
                values + head * v_head, v_token, page + page_side, key_at, position, key_start, seen, channels, D, G
            )
            hidden = position[None, :] > (start + index)[:, None]
            m, total, acc = _exact(k, v, q, hidden, factor, m, total, acc, PRECISION)

    index, row, query_head, live = _rows(item, head, R, M)
    part = tl.load(item + 11)
    if part < 0:
        o_at = output + (row.to(tl.int64) * o_token + query_head * D)[:, None] + channels[None, :]
        tl.store(o_at, acc / total[:, None], mask=live[:, None])
    else:
        at = (part + index).to(tl.int64) * (HK * R) + query_head
        tl.store(stats + at * 2, m, mask=live)
        tl.store(stats + at * 2 + 1, total, mask=live)
        tl.store(parts + (at * D)[:, None] + channels[None, :], acc, mask=live[:, None])


@triton.jit
def _combine(merges, stats, parts, output, o_token, H: tl.constexpr, D: tl.constexpr):
    """One token that was split, and query head: its parts merged by their log-sum-exp."""
    head = tl.program_id(0)
    merge = merges + tl.program_id(1) * 4
    row, part, stride, count = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2), tl.load(merge + 3)
    d = tl.arange(0, D)
    m = float("-inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    for split in range(count):
        at = (part + split * stride).to(tl.int64) * H + head
        maximum = tl.load(stats + at * 2)
        top = tl.maximum(m, maximum)
        shrink = tl.exp2(m - top)
        weight = tl.exp2(maximum - top)
        total = total * shrink + tl.load(stats + at * 2 + 1) * weight
        acc = acc * shrink + tl.load(parts + at * D + d) * weight
        m = top
    tl.store(output + row.to(tl.int64) * o_token + head * D + d, acc / total)


@dataclass(frozen=True)
class Scratch:
    """What one call writes before it reads it; the caller owns it and may use it again for the next layer."""

    lists: Tensor  # int32 [spans, Hk, 2, T]
    before: Tensor  # int32 [spans, Hk, T + 1]
    stats: Tensor  # float32 [parts, H, 2]
    parts: Tensor  # float32 [parts, H, D]


def prefill_scratch(work: Work, heads: int, device: torch.device | str) -> Scratch:
    """Scratch memory for `prefill` of this work with `heads` query heads."""
    spans, hk, tiles = len(work.counts), heads // work.ratio, max(work.num_tiles, 1)
    return Scratch(
        lists=torch.empty((spans, hk, 2, tiles), dtype=torch.int32, device=device),
        before=torch.empty((spans, hk, tiles + 1), dtype=torch.int32, device=device),
        stats=torch.empty((work.num_parts, heads, 2), dtype=torch.float32, device=device),
        parts=torch.empty((work.num_parts, heads, work.fmt.head_dim), dtype=torch.float32, device=device),
    )


def prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pool: Tensor,
    tiles: Tensor,
    flags: Tensor,
    blocks: Tensor,
    work: Work,
    scale: float,
    scratch: Scratch,
    output: Tensor,
) -> Tensor:
    """Attention of several sequences in one sealed layer under the visibility rule; see ops.attend.

    query `[N, H, D]`, keys and values `[T, Hk, D]` (rows as the spans say) and pool `[S, 2, Hk, G, D]`, this layer's
    exact pages, all in the model's dtype; tiles `uint8 [M, Hk, tile_nbytes]` and flags `uint8 [M, Hk]`, this layer's,
    the tiles that the spans themselves complete already sealed; blocks int32 `[spans, W]`: where a span's tiles 1, 2,
    ... stand, read as far as its last query does. The last axis of each is contiguous, pages are whole. Writes and
    returns output `[N, H, D]`, contiguous, of any float type.
    """
    h, d = query.shape[1:]
    hk = pool.shape[2]
    fmt, width = work.fmt, max(work.num_tiles, 1)
    _partition[(hk, len(work.counts))](
        flags, blocks, work.counts, scratch.lists, scratch.before, flags.stride(0), blocks.stride(0), width,
        HK=hk, STEP=PARTITION_STEP, num_warps=4, **OPTIONS,
    )  # fmt: skip
    for launch in work.launches:
        _attend[(hk, len(launch.items))](
            query, keys, values, pool, tiles, scratch.lists, scratch.before, launch.items, output, scratch.stats,
            scratch.parts, query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0),
            values.stride(1), *pool.stride()[:3], tiles.stride(0), output.stride(0), width, scale * LOG2_E, d**-0.5,
            **_constexprs(fmt, hk, work.ratio, launch.rows, query.dtype, query.is_cuda, work.int8),
            num_warps=_warps(fmt), num_stages=_stages(fmt, query.dtype), **OPTIONS, **MOST_REGISTERS,
        )  # fmt: skip
    if work.num_parts:
        _combine[(h, len(work.merges))](
            work.merges, scratch.stats, scratch.parts, output, output.stride(0), H=h, D=d, num_warps=4, **OPTIONS
        )
    return output


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
    *,
    int8: bool = False,
) -> Tensor:
    """One sequence: arguments and result of ops.attend, float32 `[N, H, D]`."""
    n, h, d = query.shape
    span = Span(
        query_at=0,
        num_tokens=n,
        start=start,
        key_at=0,
        key_start=start // fmt.tile_tokens * fmt.tile_tokens,
        sink=0,
        tail=0,
    )
    work = plan([span], h // window.shape[1], fmt, query.dtype, query.device, int8=int8)
    keys, values = window.transpose(1, 2)
    output = torch.empty((n, h, d), dtype=torch.float32, device=query.device)
    scratch = prefill_scratch(work, h, query.device)
    table = blocks.to(torch.int32)[None]
    return prefill(query, keys, values, sink[None], tiles, flags, table, work, scale, scratch, output)


def _warps(fmt: TileFormat) -> int:
    return 4 if fmt.head_dim == 64 else 8


def _stages(fmt: TileFormat, dtype: torch.dtype) -> int:
    """Loads are fetched ahead, but where no registers are left for it: exact tokens in float32, codes that straddle
    words, and tiles that are read in one go."""
    straddle = not {fmt.key_bits, fmt.value_bits} <= {2, 4, 8}
    return 1 if dtype == torch.float32 or straddle or fmt.tile_tokens == TOKENS[fmt.head_dim] else 2


def _constexprs(
    fmt: TileFormat, hk: int, ratio: int, rows: int, dtype: torch.dtype, compiled: bool, int8: bool
) -> dict[str, Any]:
    """The constexprs of `_attend`. PRECISION: that of exact products; the interpreter's bfloat16 ones are wrong."""
    wide = dtype == torch.float32
    return {
        "HK": hk,
        "R": ratio,
        "M": rows,
        "N": TOKENS[fmt.head_dim],
        "EXACT_N": 16 if wide or fmt.head_dim == 512 else 32,
        "FIELDS": ITEM_FIELDS,
        "PRECISION": ("bf16x3" if wide else "model") if compiled else "ieee",
        "INT8": int8,
        **constants(fmt),
    }


def compile_cases(fmt: TileFormat) -> list[CompileCase]:
    """Prefill and verify as a model with 8 kv heads and 4 query heads for each launches them.

    The rarer forms are listed for one preset: the widths change little in them.
    """
    cases = []
    for shared_operands, architectures in ((True, (90, 100)), (False, (80, 86, 120))):
        rows = most_rows(fmt, torch.bfloat16, shared_operands, False)
        cases.append(_attend_case("prefill", fmt, rows, torch.bfloat16, False, architectures))
    if ROWS[fmt.head_dim] > SMALLEST_ROWS:
        cases.append(_attend_case("verify", fmt, SMALLEST_ROWS, torch.bfloat16, False, ARCHITECTURES))
    if (fmt.key_bits, fmt.value_bits) == (4, 4):
        rows = most_rows(fmt, torch.bfloat16, False, True)
        cases.append(_attend_case("prefill int8", fmt, rows, torch.bfloat16, True, ARCHITECTURES))
        if fmt.head_dim <= 256:
            rows = most_rows(fmt, torch.float32, False, False)
            cases.append(_attend_case("prefill float32", fmt, rows, torch.float32, False, ARCHITECTURES))
    partition = {"flags": "*u8", "blocks": "*i32", "counts": "*i32", "lists": "*i32", "before": "*i32"}
    cases.append(
        CompileCase(
            name="prefill partition",
            kernel=_partition,
            signature=partition | dict.fromkeys(("flag_stride", "table_stride", "width"), "i32"),
            constexprs={"HK": 8, "STEP": PARTITION_STEP},
            num_warps=4,
            options=OPTIONS,
            aligned=tuple(partition),
        )
    )
    combine = {"merges": "*i32", "stats": "*fp32", "parts": "*fp32", "output": "*bf16"}
    cases.append(
        CompileCase(
            name=f"prefill combine D={fmt.head_dim}",
            kernel=_combine,
            signature=combine | {"o_token": "i32"},
            constexprs={"H": 32, "D": fmt.head_dim},
            num_warps=4,
            options=OPTIONS,
            aligned=(*combine, "o_token"),
        )
    )
    return cases


def _attend_case(
    what: str, fmt: TileFormat, rows: int, dtype: torch.dtype, int8: bool, architectures: tuple[int, ...]
) -> CompileCase:
    fresh = ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")
    strides = (*fresh, "page_stride", "page_side", "page_head", "tile_stride", "o_token")
    pointers = {"tiles": "*u8", "lists": "*i32", "before": "*i32", "items": "*i32", "stats": "*fp32", "parts": "*fp32"}
    model = dict.fromkeys(("query", "keys", "values", "pool", "output"), _POINTERS[dtype])
    return CompileCase(
        name=f"{what} D={fmt.head_dim}",
        kernel=_attend,
        signature=model | pointers | dict.fromkeys((*strides, "width"), "i32") | {"factor": "fp32", "root": "fp32"},
        constexprs=_constexprs(fmt, 8, 4, rows, dtype, True, int8),
        num_warps=_warps(fmt),
        num_stages=_stages(fmt, dtype),
        options=OPTIONS | MOST_REGISTERS,
        aligned=(*model, *pointers, *strides),
        architectures=architectures,
    )
