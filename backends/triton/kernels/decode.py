"""Decode attention over packed tiles: one query per sequence. Reference: kvarn.reference.attend, ops.decode.

Three launches, and nothing in them depends on the host: block tables and lengths are read from device memory, so that a
CUDA graph can hold them. `_fold` rotates every query once. `_attend` runs one program per row, kv head and split; a
program serves all query heads of its kv head. Split 0 is the sink, split 1 the own tile, both exact; the others share
the row's sealed tiles. `_combine` merges the splits by their log-sum-exp and rotates what sealed tiles gave back, once.

Tolerance: 2e-3 of the largest output. Products run in float16 with float32 sums: the folded query and the weights are
rounded to 11 bits, the codes are exact. Exact tiles lose nothing but float32 roundings.

How a row's tiles are shared out depends on its own length and on the number of splits; that number depends on the width
of the block table alone. So a row gets the same bits whatever stands beside it.
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

from kvarn.backends.triton.kernels.compile_case import CompileCase
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
from kvarn.errors import FormatError
from kvarn.format import TileFormat

TOKENS_PER_SPLIT = 512  # that one split reads of a full block table, more where that makes too many programs
PROGRAMS_PER_ROW = 1024  # at most as many splits over sealed tiles, all kv heads of a row together
EXACT_SPLITS = 2  # the sink and the own tile
LOG2_E = log2(e)


@triton.jit
def _fold(query, folded, peaks, row_stride, head_stride, factor, root, H: tl.constexpr, D: tl.constexpr):
    """One query head: plain and rotated times `factor` (scale * log2(e)), both divided by the larger peak of the two.

    query `[B, H, D]` -> folded float32 `[B, H, 2, D]`, peaks float32 `[B, H]`. root: 1/sqrt(D). Divided by its peak, a
    query takes on any finite float16 scale without overflow.
    """
    row, head = tl.program_id(1), tl.program_id(0)
    d = tl.arange(0, D)
    plain = tl.load(query + row.to(tl.int64) * row_stride + head * head_stride + d[None, :]).to(tl.float32) * factor
    rotated = rotate(plain, 1, D) * root
    peak = tl.maximum(tl.max(tl.abs(plain)), tl.max(tl.abs(rotated)))
    peak = tl.where(peak > 0, peak, 1.0)
    at = row * H + head
    tl.store(peaks + at, peak)
    tl.store(folded + (at * 2) * D + d[None, :], plain / peak)
    tl.store(folded + (at * 2 + 1) * D + d[None, :], rotated / peak)


@triton.jit
def _share(length, G: tl.constexpr, SPLITS: tl.constexpr):
    """How many sealed tiles a row of `length` tokens reads, and how many of them one split takes."""
    sealed = tl.maximum((length - 1) // G - 1, 0)
    return sealed, tl.maximum(tl.cdiv(sealed, SPLITS), 1)


@triton.jit
def _weigh(s, factor, m, total):
    """One step of the running softmax over scores `[N, Q]`, which `factor [Q]` brings to powers of two.

    Returns the weights `[N, Q]`, the maximum so far, the sum so far, and what the sums so far must be multiplied by.
    """
    top = tl.maximum(m, tl.max(s, 0))
    shrink = tl.exp2((m - top) * factor)
    p = tl.exp2(s * factor[None, :] - (top * factor)[None, :])
    return p, top, total * shrink + tl.sum(p, 0), shrink


@triton.jit
def _exact(
    q, page, factor, valid, head, page_side, page_head,
    D: tl.constexpr, Q: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Attention of queries `[D, Q]` to the first `valid` tokens of one exact page: maximum, sum, output `[D, Q]`."""
    m = tl.full([Q], float("-inf"), tl.float32)
    total = tl.zeros([Q], tl.float32)
    acc = tl.zeros([D, Q], tl.float32)
    d, n = tl.arange(0, D), tl.arange(0, N)
    keys = page + head * page_head
    for first in range(0, valid, N):
        seen = first + n < valid
        at = (first + n)[:, None] * D + d[None, :]
        # What was never written may hold anything, and 0 * NaN is NaN.
        k = tl.load(keys + at, mask=seen[:, None], other=0.0)
        v = tl.trans(tl.load(keys + page_side + at, mask=seen[:, None], other=0.0))
        s = tl.dot(k.to(tl.float32), q.to(tl.float32), input_precision="ieee") if WIDE else tl.dot(k, q)
        p, m, total, shrink = _weigh(tl.where(seen[:, None], s, float("-inf")), factor, m, total)
        acc = acc * shrink[None, :]
        if WIDE:
            acc = tl.dot(v.to(tl.float32), p, acc, input_precision="ieee")
        else:
            # Two products, so that weights keep their float32 precision; there are only two exact tiles in a row.
            high = p.to(v.dtype)
            acc = tl.dot(v, high, acc)
            acc = tl.dot(v, (p - high.to(tl.float32)).to(v.dtype), acc)
    return m * factor, total, acc


@triton.jit
def _round(x, ROWS: tl.constexpr):
    """float32 `[ROWS, Q]` to float16, and the sums of what came out, float32 `[Q]`: a product with ones, which tensor
    cores do beside the others."""
    half = x.to(tl.float16)
    return half, tl.max(tl.dot(tl.full([16, ROWS], 1.0, tl.float16), half), 0)


@triton.jit
def _fold_keys(
    folded, heads, live, rotated, k_scale, k_zero, first, D: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr
):
    """The queries with a tile's key scales, channels `first` to `first + ROWS`: float16 `[ROWS, Q]`, and what is to be
    added to their products with the codes, float32 `[Q]`."""
    d = first + tl.arange(0, ROWS)
    r = tl.load(folded + (heads * 2 + rotated)[None, :] * D + d[:, None], mask=live[None, :], other=0.0)
    scale, zero = constants_of(k_scale, d), constants_of(k_zero, d)
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    f, rounded = _round(r * scale[:, None], ROWS)
    return f, tl.sum(r * (zero + scale * MIDDLE)[:, None], 0) - rounded * MIDDLE


@triton.jit
def _sealed(
    folded, peak, heads, live, tiles, flags, table, first, last, head, tile_stride, flag_stride,
    D: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, N: tl.constexpr, K_ROWS: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, TILE_NBYTES: tl.constexpr,
    K_CODES: tl.constexpr, K_SCALE: tl.constexpr, K_ZERO: tl.constexpr, K_TOKEN: tl.constexpr,
    V_CODES: tl.constexpr, V_SCALE: tl.constexpr, V_ZERO: tl.constexpr, V_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Attention of folded queries to the sealed tiles `first` to `last` of a row: maximum, sum, output `[D, Q]` in the
    rotated basis, its rows in the order of the values' codes."""
    m = tl.full([Q], float("-inf"), tl.float32)
    total = tl.zeros([Q], tl.float32)
    acc = tl.zeros([D, Q], tl.float32)
    tokens, channels = order(N, KEY_BITS), order(D, VALUE_BITS)
    k_unit, v_unit = unit(N, KEY_BITS), unit(D, VALUE_BITS)
    V_MIDDLE: tl.constexpr = 1 << (VALUE_BITS - 1)
    for i in range(first, last):
        block = tl.load(table + i)
        rotated = tl.load(flags + block.to(tl.int64) * flag_stride + head).to(tl.int32) & 1
        base = tile_base(tiles, block, head, tile_stride, TILE_NBYTES)
        k_scale, k_zero = halves(base, K_SCALE), halves(base, K_ZERO)
        v_channel = constants_of(halves(base, V_CHANNEL), channels) / v_unit
        if K_ROWS == D:
            f, zero = _fold_keys(folded, heads, live, rotated, k_scale, k_zero, 0, D, K_ROWS, KEY_BITS)
        for t in range(0, G, N):
            s = tl.zeros([N, Q], tl.float32)
            for d in range(0, D, K_ROWS):
                if K_ROWS < D:
                    f, zero = _fold_keys(folded, heads, live, rotated, k_scale, k_zero, d, D, K_ROWS, KEY_BITS)
                row = words(base, K_CODES) + t * KEY_BITS // 32
                k = codes(row, d + tl.arange(0, K_ROWS), N, KEY_BITS, G * KEY_BITS // 32)
                s = tl.dot(tl.trans(k), f, s + zero[None, :] * k_unit[:, None])
            k_token = constants_of(halves(base, K_TOKEN) + t, tokens) / k_unit
            p, m, total, shrink = _weigh(s * k_token[:, None], peak, m, total)
            scale = constants_of(halves(base, V_SCALE) + t, tokens)
            shift = constants_of(halves(base, V_ZERO) + t, tokens)
            f_values, rounded = _round(p * scale[:, None], N)
            middle = tl.sum(p * (shift + scale * V_MIDDLE)[:, None], 0) - rounded * V_MIDDLE
            row = words(base, V_CODES) + t * (D * VALUE_BITS // 32)
            v = codes(row, tokens, D, VALUE_BITS, D * VALUE_BITS // 32)
            o = tl.dot(tl.trans(v), f_values, middle[None, :] * v_unit[:, None])
            acc = acc * shrink[None, :] + o * v_channel[:, None]
    return m * peak, total, acc


@triton.jit
def _attend(
    query, folded, peaks, pool, sinks, tails, lengths, tiles, flags, blocks, stats, parts,
    row_stride, head_stride, page_stride, page_side, page_head, tile_stride, flag_stride, table_stride, factor,
    H: tl.constexpr, HK: tl.constexpr, SPLITS: tl.constexpr, Q: tl.constexpr, N: tl.constexpr, K_ROWS: tl.constexpr,
    EXACT_N: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr, G: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, TILE_NBYTES: tl.constexpr,
    K_CODES: tl.constexpr, K_SCALE: tl.constexpr, K_ZERO: tl.constexpr, K_TOKEN: tl.constexpr,
    V_CODES: tl.constexpr, V_SCALE: tl.constexpr, V_ZERO: tl.constexpr, V_CHANNEL: tl.constexpr,
):  # fmt: skip
    """One row, kv head and split: stats float32 `[B, H, splits, 2]` (maximum, sum) and parts `[B, H, splits, D]`."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    R: tl.constexpr = H // HK
    COUNT: tl.constexpr = SPLITS + 2
    length = tl.load(lengths + row)
    own = (length - 1) // G
    sealed, share = _share(length, G, SPLITS)
    first = (split - 2) * share
    if split == 0:
        work = length > 0
    elif split == 1:
        work = own > 0
    else:
        work = first < sealed
    if not work:
        return
    r = tl.arange(0, Q)
    live = r < R
    heads = row * H + head * R + r
    d = tl.arange(0, D)
    channels = d
    if split < 2:
        at = row.to(tl.int64) * row_stride + (head * R + r)[None, :] * head_stride + d[:, None]
        q = tl.load(query + at, mask=live[None, :], other=0.0)
        if split == 0:
            slot = tl.load(sinks + row)
            valid = tl.minimum(length, G)
        else:
            slot = tl.load(tails + row)
            valid = length - own * G
        page = pool + slot.to(tl.int64) * page_stride
        scale = tl.zeros([Q], tl.float32) + factor
        m, total, acc = _exact(q, page, scale, valid, head, page_side, page_head, D, Q, EXACT_N, WIDE)
    else:
        peak = tl.load(peaks + heads, mask=live, other=1.0)
        m, total, acc = _sealed(
            folded, peak, heads, live, tiles, flags, blocks + row.to(tl.int64) * table_stride,
            first, tl.minimum(first + share, sealed), head, tile_stride, flag_stride,
            D, G, Q, N, K_ROWS, KEY_BITS, VALUE_BITS, TILE_NBYTES,
            K_CODES, K_SCALE, K_ZERO, K_TOKEN, V_CODES, V_SCALE, V_ZERO, V_CHANNEL,
        )  # fmt: skip
        channels = order(D, VALUE_BITS)
    at = heads.to(tl.int64) * COUNT + split
    tl.store(stats + at * 2, m, mask=live)
    tl.store(stats + at * 2 + 1, total, mask=live)
    tl.store(parts + at[None, :] * D + channels[:, None], acc, mask=live[None, :])


@triton.jit
def _merge(stats, parts, base, split, live, top, D: tl.constexpr):
    """The outputs of the splits `split` that lie below `live`, weighed against the maximum `top` and summed: `[D]`."""
    written = split < live
    weight = tl.exp2(tl.load(stats + (base + split) * 2, mask=written, other=float("-inf")) - top)
    at = (base + split)[:, None] * D + tl.arange(0, D)[None, :]
    return tl.sum(tl.load(parts + at, mask=written[:, None], other=0.0) * weight[:, None], 0)


@triton.jit
def _combine(
    lengths, stats, parts, output, root,
    H: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """One query head: its splits merged by their log-sum-exp, into output float32 `[B, H, D]`. root: 1/sqrt(D)."""
    head, row = tl.program_id(0), tl.program_id(1)
    COUNT: tl.constexpr = SPLITS + 2
    d = tl.arange(0, D)
    at = row.to(tl.int64) * H + head
    length = tl.load(lengths + row)
    if length <= 0:
        tl.store(output + at * D + d, tl.zeros([D], tl.float32))
        return
    sealed, share = _share(length, G, SPLITS)
    live = 2 + tl.cdiv(sealed, share)
    split = tl.arange(0, WIDTH)
    unwritten = tl.where(length > G, -1, 1)  # while tile 0 fills there is no own tile beside the sink
    written = (split < live) & (split != unwritten)
    maximum = tl.load(stats + (at * COUNT + split) * 2, mask=written, other=float("-inf"))
    total = tl.load(stats + (at * COUNT + split) * 2 + 1, mask=written, other=0.0)
    top = tl.max(maximum)
    total = tl.sum(total * tl.exp2(maximum - top))
    exact = _merge(stats, parts, at * COUNT, tl.arange(0, 2), tl.where(length > G, 2, 1), top, D)
    back = tl.zeros([D], tl.float32)
    for i in range(2, live, 8):
        back += _merge(stats, parts, at * COUNT, i + tl.arange(0, 8), live, top, D)
    back = tl.reshape(rotate(tl.reshape(back, [1, D]), 1, D), [D]) * root
    tl.store(output + at * D + d, (exact + back) / total)


@dataclass(frozen=True)
class Pages:
    """What every row reads in the exact pool: its sink slot, its tail slot (not read while tile 0 fills) and its length
    in tokens, the new one counted (0: a padded row, its output is zero). All int32 `[B]`."""

    sink: Tensor
    tail: Tensor
    length: Tensor


@dataclass(frozen=True)
class Scratch:
    """What a call writes before it reads it, float32. The caller owns it; one is enough for all layers in turn."""

    folded: Tensor  # [B, H, 2, D]
    peaks: Tensor  # [B, H]
    stats: Tensor  # [B, H, splits + 2, 2]
    parts: Tensor  # [B, H, splits + 2, D]


@dataclass(frozen=True)
class DecodePlan:
    """Into how many splits the sealed tiles of every row are shared out."""

    splits: int

    def scratch(self, batch: int, heads: int, head_dim: int, device: torch.device | str) -> Scratch:
        """Scratch memory for calls of `batch` rows."""
        count = self.splits + EXACT_SPLITS
        shapes = ((2, head_dim), (), (count, 2), (count, head_dim))
        return Scratch(*(torch.empty((batch, heads, *x), dtype=torch.float32, device=device) for x in shapes))


def decode_plan(table_width: int, tile_tokens: int, kv_heads: int) -> DecodePlan:
    """The plan for block tables of `table_width` tiles. Shapes alone decide, so no row's bits depend on another row."""
    splits = -(-table_width * tile_tokens // TOKENS_PER_SPLIT)
    return DecodePlan(min(max(splits, 1), max(PROGRAMS_PER_ROW // kv_heads, 1)))


def decode(
    query: Tensor,
    pool: Tensor,
    pages: Pages,
    tiles: Tensor,
    flags: Tensor,
    blocks: Tensor,
    scale: float,
    fmt: TileFormat,
    plan: DecodePlan,
    scratch: Scratch,
    output: Tensor,
) -> Tensor:
    """Attention of many sequences in one sealed layer, one query each; ops.decode without its host lists.

    query `[B, H, D]`; pool `[S, 2, Hk, G, D]` of the same dtype, this layer's exact pages, any stride between slots;
    tiles `uint8 [M, Hk, tile_nbytes]` and flags `uint8 [M, Hk]`, this layer's; blocks int32 `[B, T]`: where a row's
    tiles 1, 2, ... stand in it, read as far as the row's length says; scale: above 0; plan: of `decode_plan(T, G, Hk)`.
    Writes and returns output, float32 `[B, H, D]`. Raises FormatError where shapes or dtypes do not fit together.
    """
    b, h, d = query.shape
    hk, g = pool.shape[2:4]
    _check(query, pool, tiles, flags, blocks, fmt)
    root, factor = d**-0.5, scale * LOG2_E
    constexprs = _attend_constexprs(fmt, h, hk, plan, query.dtype, compiled=query.is_cuda)
    _fold[(h, b)](
        query, scratch.folded, scratch.peaks, query.stride(0), query.stride(1), factor, root,
        **_fold_constexprs(h, d), **_FOLD_LAUNCH,
    )  # fmt: skip
    _attend[(plan.splits + EXACT_SPLITS, hk, b)](
        query, scratch.folded, scratch.peaks, pool, pages.sink, pages.tail, pages.length, tiles, flags, blocks,
        scratch.stats, scratch.parts, query.stride(0), query.stride(1), *pool.stride()[:3], tiles.stride(0),
        flags.stride(0), blocks.stride(0), factor, **constexprs, **_attend_launch(fmt, h // hk, query.dtype),
    )  # fmt: skip
    _combine[(h, b)](
        pages.length, scratch.stats, scratch.parts, output, root,
        **_combine_constexprs(h, d, g, plan), **_COMBINE_LAUNCH,
    )  # fmt: skip
    return output


def _check(query: Tensor, pool: Tensor, tiles: Tensor, flags: Tensor, blocks: Tensor, fmt: TileFormat) -> None:
    (b, h, d), (_, two, hk, g, e) = query.shape, pool.shape
    fits = (two, g, e, d, h % hk) == (2, fmt.tile_tokens, d, fmt.head_dim, 0) and pool.dtype == query.dtype
    fits &= tiles.shape[1:] == (hk, fmt.tile_nbytes) and flags.shape[1:] == (hk,) and len(blocks) == b
    fits &= (tiles.dtype, flags.dtype, blocks.dtype) == (torch.uint8, torch.uint8, torch.int32)
    rows_are_whole = pool.stride()[3:] == (d, 1) and tiles.stride()[1:] == (fmt.tile_nbytes, 1)
    rows_are_whole &= query.stride(2) == flags.stride(1) == blocks.stride(1) == 1
    if not (fits and rows_are_whole):
        given = ", ".join(f"{x.dtype} {list(x.shape)}" for x in (query, pool, tiles, flags, blocks))
        raise FormatError(
            f"decode of {fmt.name} tiles of head_dim {fmt.head_dim} got query, pool, tiles, flags, blocks of {given}; "
            "pass one layer's pools with contiguous rows, and int32 block tables"
        )


_FOLD_LAUNCH = {"num_warps": 1, "enable_fp_fusion": True}
_COMBINE_LAUNCH = {"num_warps": 4, "enable_fp_fusion": True}


def _fold_constexprs(h: int, d: int) -> dict[str, Any]:
    return {"H": h, "D": d}


def _combine_constexprs(h: int, d: int, g: int, plan: DecodePlan) -> dict[str, Any]:
    width = triton.next_power_of_2(plan.splits + EXACT_SPLITS)
    return {"H": h, "SPLITS": plan.splits, "WIDTH": width, "D": d, "G": g}


def _attend_constexprs(
    fmt: TileFormat, h: int, hk: int, plan: DecodePlan, dtype: torch.dtype, *, compiled: bool
) -> dict[str, Any]:
    """WIDE: exact tiles in float32 products; the interpreter's bfloat16 ones are wrong."""
    return {
        "H": h,
        "HK": hk,
        "SPLITS": plan.splits,
        "Q": max(8, triton.next_power_of_2(h // hk)),
        "N": fmt.tile_tokens if fmt.key_bits == 2 and fmt.head_dim == 64 else 64,  # 8 words of a row of keys
        "K_ROWS": min(fmt.head_dim, 128),
        "EXACT_N": 32 if fmt.head_dim <= 128 and dtype != torch.float32 else 16,
        "WIDE": dtype == torch.float32 or (dtype == torch.bfloat16 and not compiled),
        **constants(fmt),
    }


def _attend_launch(fmt: TileFormat, ratio: int, dtype: torch.dtype) -> dict[str, Any]:
    """One warp, so that a tile's words become operands of the products without a detour through shared memory; more
    where its registers would not do, or where the detour is made anyhow: codes that straddle words, short rows.

    maxnreg: all that a thread can have. Left to itself, ptxas spills a few to fit one more program.
    """
    detour = not {fmt.key_bits, fmt.value_bits} <= {2, 4, 8} or fmt.key_bits * fmt.tile_tokens < 256
    crowded = (fmt.head_dim + 64) * max(8, ratio) > (128 + 64) * 8
    crowded |= fmt.head_dim == 128 and (fmt.key_bits != 4 or fmt.value_bits == 8 or fmt.tile_tokens == 64)
    warps = 8 if fmt.head_dim == 512 else 4 if detour or crowded or dtype == torch.float32 else 1
    return {"num_warps": warps, "maxnreg": 255, "enable_fp_fusion": True}


def compile_cases(fmt: TileFormat) -> list[CompileCase]:
    """The three launches as a model with bfloat16, 32 query and 8 kv heads and 64 splits makes them."""
    h, hk, plan = 32, 8, DecodePlan(64)
    pointers = {
        "query": "*bf16", "pool": "*bf16", "tiles": "*u8", "flags": "*u8", "blocks": "*i32", "sinks": "*i32",
        "tails": "*i32", "lengths": "*i32", "folded": "*fp32", "peaks": "*fp32", "stats": "*fp32", "parts": "*fp32",
        "output": "*fp32",
    }  # fmt: skip
    strides = ("row_stride", "head_stride", "page_stride", "page_side", "page_head", "tile_stride")

    def case(name: str, kernel: Any, constexprs: dict[str, Any], launch: dict[str, Any]) -> CompileCase:
        signature = {x: pointers.get(x, "fp32" if x in ("factor", "root") else "i32") for x in kernel.arg_names}
        return CompileCase(
            name=f"{name} {fmt.name} D={fmt.head_dim}",
            kernel=kernel,
            signature={x: kind for x, kind in signature.items() if x not in constexprs},
            constexprs=constexprs,
            num_warps=launch["num_warps"],
            aligned=tuple(x for x in signature if x in pointers or x in strides),
            options={x: value for x, value in launch.items() if x != "num_warps"},
        )

    attend = _attend_constexprs(fmt, h, hk, plan, torch.bfloat16, compiled=True)
    return [
        case("decode fold", _fold, _fold_constexprs(h, fmt.head_dim), _FOLD_LAUNCH),
        case("decode attend", _attend, attend, _attend_launch(fmt, h // hk, torch.bfloat16)),
        case("decode combine", _combine, _combine_constexprs(h, fmt.head_dim, fmt.tile_tokens, plan), _COMBINE_LAUNCH),
    ]
