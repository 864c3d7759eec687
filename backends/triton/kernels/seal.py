"""Sealing on a GPU: tiles of exact keys and values -> the bytes of docs/format.md. Reference: kvarn.reference.seal.

Bytes, flags and status words are the reference's, with no tolerance. So every line is one float32 operation in the
reference's order: sums are halving trees written out (tl.sum promises no order, but two numbers have only one),
division and square root are the correctly rounded ones, and nothing is launched with fused multiply-adds.

One program seals one tile. The tile keeps the order of the pool, tokens x channels; keys, whose oriented tile is
channels x tokens, swap the axes of every step instead. Inside it is `[tokens, D / 32, 32]`: a warp has 32 neighbouring
channels in its lanes, and a thread the same channels of several tokens.

A program works through its tile in slices that fit in the registers, each of every SLICES-th token: the tree over a
slice's tokens is a subtree of the tree over all of them, and the levels that are left go over one vector per slice.
What a program keeps from one slice to the next lies in scratch memory of its own, which stays in the caches: the
candidate at hand over its g `[G, D]`, for keys later its codes, the tokens' divisors `[G]`, and sums `[SLICES, D]`,
twice, or `[G]`.
"""

# mypy: disable-error-code=import-untyped, allow-untyped-defs, allow-incomplete-defs
# mypy: allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvarn.backends.triton.kernels.compile_case import CompileCase
from kvarn.errors import FormatError
from kvarn.format import FLAG_KEYS_ROTATED, SealStatus, TileFormat
from kvarn.reference import (
    BALANCE_ITERATIONS,
    DEAD_MEAN_SQUARE,
    DEAD_RMS,
    KEY_SHRINK,
    SMALLEST_STEP,
    VALUE_CLIP,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# By head_dim: what a program holds at a time, 8 or 16 numbers in each thread. More of them would spill.
SLICE_TOKENS = {64: 16, 128: 8, 256: 8, 512: 8}
NUM_WARPS = {64: 4, 128: 4, 256: 8, 512: 8}
OPTIONS = {
    "enable_fp_fusion": False,
    "maxnreg": 255,  # the most there is: without it ptxas spills to fit more programs on a multiprocessor
}
SCRATCH_BYTES = 64 * 2**20  # at most, in one launch; more tiles are sealed in several launches

# The kernel's arguments, none of them specialized: one compilation serves all shapes, strides and block ids.
POINTERS = ["keys_ptr", "values_ptr", "tiles_ptr", "flags_ptr", "status_ptr", "blocks_ptr", "scratch_ptr"]
INTEGERS = [
    *("heads", "tiles", "first"),
    *("k_layer", "k_tile", "k_head", "k_token", "v_layer", "v_tile", "v_head", "v_token"),
    *("t_layer", "t_block", "t_head", "f_layer", "f_block", "f_head", "s_layer", "s_tile", "s_head"),
]

_ITERATIONS = tl.constexpr(BALANCE_ITERATIONS)
_DEAD_MEAN_SQUARE = tl.constexpr(float(DEAD_MEAN_SQUARE))
_DEAD_RMS = tl.constexpr(float(DEAD_RMS))
_VALUE_CLIP = tl.constexpr(float(VALUE_CLIP))
_KEY_SHRINK = tl.constexpr(float(KEY_SHRINK))
_SMALLEST_STEP = tl.constexpr(float(SMALLEST_STEP))
_INFINITY = tl.constexpr(float("inf"))
_ROUND = tl.constexpr(float(2**23))  # x + 2^23 - 2^23 rounds 0 <= x < 2^22 half to even
_FLAG_KEYS_ROTATED = tl.constexpr(FLAG_KEYS_ROTATED)
_OK = tl.constexpr(int(SealStatus.OK))
_NON_FINITE = tl.constexpr(int(SealStatus.NON_FINITE))
_KEYS_OVERFLOW = tl.constexpr(int(SealStatus.KEYS_OVERFLOW))
_VALUES_OVERFLOW = tl.constexpr(int(SealStatus.VALUES_OVERFLOW))


@triton.jit
def _tree(x):
    """Halving tree over the first axis of `[n, m]`: `[m]`."""
    for _ in tl.static_range(9):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), axis=0)
    return tl.reshape(x, [x.shape[1]])


@triton.jit
def _sum(sums_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Halving tree over the first axis of what all slices have left at `sums_ptr`, `[ROWS, COLUMNS]`: `[COLUMNS]`."""
    tl.debug_barrier()
    x = tl.load(sums_ptr + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    tl.debug_barrier()
    return _tree(x)


@triton.jit
def _tree_channels(x):
    """Halving tree over the channels of `[R, H, 32]`: `[R]`."""
    x = tl.reshape(x, [x.shape[0], x.shape[1] * 32])
    for _ in tl.static_range(9):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), axis=1)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def _tree_tokens(x):
    """Halving tree over the tokens of `[R, H, 32]`: `[H, 32]`."""
    for _ in tl.static_range(7):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1], 32]), axis=0)
    return tl.reshape(x, [x.shape[1], 32])


@triton.jit
def _butterfly(pairs):
    """`(a + b, a - b)` of pairs along the third of four axes."""
    first = (tl.arange(0, 2) == 0)[None, None, :, None]
    bits = pairs.to(tl.int32, bitcast=True)
    # The other number of a pair: an integer sum less one's own bits, which compiles to a shuffle.
    other = (tl.sum(bits, axis=2, keep_dims=True) - bits).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.where(first, pairs, -pairs) + other


@triton.jit
def _rotate(x):
    """kvarn.reference.rotate of the channels of `[R, H, 32]`."""
    R: tl.constexpr = x.shape[0]
    H: tl.constexpr = x.shape[1]
    for level in tl.static_range(9):
        if (1 << level) < 32 * H:
            pairs = tl.reshape(x, [R, 16 * H >> level, 2, 1 << level])
            x = tl.reshape(_butterfly(pairs), [R, H, 32])
    scale: tl.constexpr = 1 / (32 * H) ** 0.5
    return x * scale


@triton.jit
def _at(token, token_stride, H: tl.constexpr):
    """Offsets of all channels of some tokens, `[R, H, 32]`."""
    # Not told that they are contiguous, the compiler gives each lane one of 32 channels and not four of 128.
    lane = tl.max_contiguous(tl.arange(0, 32), 1)
    return token[:, None, None] * token_stride + tl.arange(0, H)[None, :, None] * 32 + lane[None, None, :]


@triton.jit
def _divide(t, token, channel, KEYS: tl.constexpr):
    """`(t / col) / row` of `[R, H, 32]`: a row is a channel of keys, a token of values."""
    if KEYS:
        b = tl.div_rn(tl.div_rn(t, token[:, None, None]), channel[None, :, :])
    else:
        b = tl.div_rn(tl.div_rn(t, channel[None, :, :]), token[:, None, None])
    return b


@triton.jit
def _live_rms(total, N: tl.constexpr):
    r = tl.sqrt_rn(total * (1.0 / N))  # N is a power of two: the product is the quotient
    return tl.where(r <= _DEAD_RMS, 1.0, r)


@triton.jit
def _half(x):
    half = x.to(tl.float16)
    return tl.where(half == 0.0, 0.0, half).to(tl.float16)


@triton.jit
def _finite(x):
    """1 if every number of a tensor is finite, else 0."""
    finite = tl.where(tl.abs(x.to(tl.float32)) < _INFINITY, 1, 0)
    for _ in tl.static_range(len(x.shape)):
        finite = tl.min(finite, axis=0)
    return finite


@triton.jit
def _channels(H: tl.constexpr):
    """The channels, `[H, 32]`."""
    return tl.arange(0, H)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def _candidate(x_ptr, token_stride, token, rotated, H: tl.constexpr):
    """Some tokens of a candidate: float32 `[R, H, 32]`."""
    x = tl.load(x_ptr + _at(token, token_stride, H)).to(tl.float32)
    if rotated:
        x = _rotate(x)
    return x


@triton.jit
def _prescale(
    x_ptr,
    token_stride,
    scratch_ptr,
    rotated,
    KEYS: tl.constexpr,
    SLICES: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
):
    """A candidate over its g into scratch memory, `[G, D]`; returns its mean square and g."""
    G: tl.constexpr = SLICES * R
    D: tl.constexpr = 32 * H
    sums_ptr = scratch_ptr + G * D + G
    for i in tl.range(SLICES, disable_licm=True):
        token = tl.arange(0, R) * SLICES + i
        x = _candidate(x_ptr, token_stride, token, rotated, H)
        tl.store(scratch_ptr + _at(token, D, H), x)
        if KEYS:
            tl.store(sums_ptr + token, _tree_channels(x * x))
        else:
            tl.store(sums_ptr + i * D + _channels(H), _tree_tokens(x * x))
    total = _sum(sums_ptr, G, 1) if KEYS else _tree(tl.reshape(_sum(sums_ptr, SLICES, D), [D, 1]))
    mean_square = tl.sum(total, axis=0) * (1.0 / (G * D))  # a sum of one
    g = tl.where(mean_square < _DEAD_MEAN_SQUARE, 1.0, tl.sqrt_rn(mean_square))
    for i in tl.range(SLICES, disable_licm=True):
        at = scratch_ptr + _at(tl.arange(0, R) * SLICES + i, D, H)
        tl.store(at, tl.div_rn(tl.load(at), g))
    tl.debug_barrier()
    return mean_square, g


@triton.jit
def _slice(scratch_ptr, i, SLICES: tl.constexpr, H: tl.constexpr, R: tl.constexpr):
    """Slice i of what `_prescale` left, float32 `[R, H, 32]`, and where its tokens' divisors lie."""
    token = tl.arange(0, R) * SLICES + i
    return tl.load(scratch_ptr + _at(token, 32 * H, H)), scratch_ptr + SLICES * R * 32 * H + token


@triton.jit
def _balance(scratch_ptr, KEYS: tl.constexpr, SLICES: tl.constexpr, H: tl.constexpr, R: tl.constexpr):
    """The divisors of kvarn.reference.balance: per channel `[H, 32]`; those per token stay in scratch memory.

    A column of keys is a token and comes first in each iteration. A column of values is a channel: there the tokens'
    turn stands at the start of the next iteration, and `_seal_values` takes the last one.
    """
    G: tl.constexpr = SLICES * R
    D: tl.constexpr = 32 * H
    channel = tl.full([H, 32], 1.0, tl.float32)
    tl.store(scratch_ptr + G * D + tl.arange(0, G), tl.full([G], 1.0, tl.float32))
    tl.debug_barrier()
    sums_ptr = scratch_ptr + G * D + G
    for iteration in tl.range(_ITERATIONS, disable_licm=True):
        for i in tl.range(SLICES, disable_licm=True):
            t, token_ptr = _slice(scratch_ptr, i, SLICES, H, R)
            token = tl.load(token_ptr)
            b = _divide(t, token, channel, KEYS)
            r = _live_rms(_tree_channels(b * b), D)
            if not KEYS:
                r = tl.where(iteration > 0, r, 1.0)
            token = token * r
            tl.store(token_ptr, token)
            b = _divide(t, token, channel, KEYS)
            tl.store(sums_ptr + i * D + _channels(H), _tree_tokens(b * b))
        channel = channel * _live_rms(tl.reshape(_sum(sums_ptr, SLICES, D), [H, 32]), G)
    return channel


@triton.jit
def _code(b, lo, s, BITS: tl.constexpr):
    """Codes as float32; clipped before they are rounded, which comes to the same."""
    y = tl.minimum(tl.maximum(tl.div_rn(b - lo, s), 0.0), 2.0**BITS - 1.0)
    return (y + _ROUND) - _ROUND


@triton.jit
def _gain(bb, bq):
    gain = tl.div_rn(bb, bq)
    return tl.where((bq > 0.0) & (gain >= 0.5) & (gain <= 2.0), gain, 1.0)


@triton.jit
def _pack(code, A: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr):
    """Codes, read as `[A, N, M]`: each eight along N as one number of 8 * BITS bits, uint64 `[A, N / 8, M]`."""
    x = tl.reshape(code.to(tl.uint8), [A, N, M])
    for level in tl.static_range(3):
        pairs = tl.permute(tl.reshape(x, [A, N >> (level + 1), 2, M]), [0, 1, 3, 2])
        low, high = tl.split(pairs.to(tl.uint16 if level == 0 else tl.uint32 if level == 1 else tl.uint64))
        x = low | (high << (BITS << level))
    return x


@triton.jit
def _store_octets(codes_ptr, octets, BITS: tl.constexpr):
    """The BITS bytes of each packed eight."""
    for byte in tl.static_range(BITS):
        tl.store(codes_ptr + byte, (octets >> (8 * byte)).to(tl.uint8))


@triton.jit
def _seal_keys(
    x_ptr, token_stride, tile_ptr, scratch_ptr,
    BITS: tl.constexpr, SLICES: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    K_CODES: tl.constexpr, K_SCALE: tl.constexpr, K_ZERO: tl.constexpr, K_TOKEN: tl.constexpr,
):  # fmt: skip
    """Seal the keys of a tile: 1 if a candidate could be kept, else 0, and 1 if that is the rotated one."""
    G: tl.constexpr = SLICES * R
    D: tl.constexpr = 32 * H
    half_ptr = tile_ptr.to(tl.pointer_type(tl.float16))
    channels = _channels(H)
    tokens_ptr = scratch_ptr + G * D
    sums_ptr = tokens_ptr + G
    more_sums_ptr = sums_ptr + SLICES * D
    usable = False
    keep_rotated = False
    dead = False
    smallest = 0.0
    for candidate in tl.range(2, disable_licm=True):  # the rotated keys, then the keys as they are
        rotated = candidate == 0
        mean_square, g = _prescale(x_ptr, token_stride, scratch_ptr, rotated, True, SLICES, H, R)
        channel = _balance(scratch_ptr, True, SLICES, H, R)

        lo = tl.full([H, 32], float("inf"), tl.float32)
        hi = tl.full([H, 32], float("-inf"), tl.float32)
        for i in tl.range(SLICES, disable_licm=True):
            t, token_ptr = _slice(scratch_ptr, i, SLICES, H, R)
            b = _divide(t, tl.load(token_ptr), channel, True)
            lo = tl.minimum(lo, tl.min(b, axis=0))
            hi = tl.maximum(hi, tl.max(b, axis=0))
        if BITS == 2:
            center = (lo + hi) * 0.5
            half = ((hi - lo) * 0.5) * _KEY_SHRINK
            lo = center - half
            hi = center + half
        s = tl.maximum(tl.div_rn(hi - lo, 2.0**BITS - 1.0), _SMALLEST_STEP)
        gain = tl.full([H, 32], 1.0, tl.float32)
        if BITS == 2:
            for i in tl.range(SLICES, disable_licm=True):
                t, token_ptr = _slice(scratch_ptr, i, SLICES, H, R)
                b = _divide(t, tl.load(token_ptr), channel, True)
                tl.store(sums_ptr + i * D + channels, _tree_tokens(b * b))
                q = _code(b, lo[None, :, :], s[None, :, :], BITS) * s[None, :, :] + lo[None, :, :]
                tl.store(more_sums_ptr + i * D + channels, _tree_tokens(b * q))
            gain = _gain(_sum(sums_ptr, SLICES, D), _sum(more_sums_ptr, SLICES, D))
            gain = tl.reshape(gain, [H, 32])
        scale = _half(channel * (s * gain))
        zero = _half(channel * (lo * gain))
        finite_constants = tl.minimum(_finite(scale), _finite(zero))
        # Codes are packed along the tokens: from here on a slice is a run of tokens, and other threads hold them.
        tl.debug_barrier()
        for i in tl.range(SLICES, disable_licm=True):
            token = tl.arange(0, R) + i * R
            t_ptr = scratch_ptr + _at(token, D, H)
            divisor = tl.load(tokens_ptr + token)
            b = _divide(tl.load(t_ptr), divisor, channel, True)
            code = _code(b, lo[None, :, :], s[None, :, :], BITS)
            tl.store(t_ptr, code)  # the candidate over its g is done with
            other = _half(divisor * g)
            finite_constants = tl.minimum(finite_constants, _finite(other))
            back = code * scale.to(tl.float32)[None, :, :] + zero.to(tl.float32)[None, :, :]
            e = back * other.to(tl.float32)[:, None, None] - _candidate(x_ptr, token_stride, token, rotated, H)
            tl.store(sums_ptr + token, _tree_channels(e * e))
        error = tl.sum(_sum(sums_ptr, G, 1), axis=0)  # a sum of one

        dead = dead | (mean_square < _DEAD_MEAN_SQUARE)
        finite = (finite_constants == 1) & (error < _INFINITY)
        wins = finite & (rotated | (usable == 0) | ((dead == 0) & (error < smallest)))
        usable = usable | finite
        keep_rotated = keep_rotated & (wins == 0) | (wins & rotated)
        smallest = tl.where(wins, error, smallest)
        if wins:  # the second candidate is written over the first
            at = channels[None, :, :] * (G * BITS // 8) + tl.arange(0, R // 8)[:, None, None] * BITS
            for i in tl.range(SLICES, disable_licm=True):
                token = tl.arange(0, R) + i * R
                code = tl.load(scratch_ptr + _at(token, D, H))
                octets = tl.reshape(_pack(code, 1, R, D, BITS), [R // 8, H, 32])
                _store_octets(tile_ptr + K_CODES + at + i * (R * BITS // 8), octets, BITS)
                tl.store(half_ptr + K_TOKEN // 2 + token, _half(tl.load(tokens_ptr + token) * g))
            tl.store(half_ptr + K_SCALE // 2 + channels, scale)
            tl.store(half_ptr + K_ZERO // 2 + channels, zero)
        tl.debug_barrier()
    return usable, keep_rotated


@triton.jit
def _seal_values(
    x_ptr, token_stride, tile_ptr, scratch_ptr,
    BITS: tl.constexpr, SLICES: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    V_CODES: tl.constexpr, V_SCALE: tl.constexpr, V_ZERO: tl.constexpr, V_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Seal the values of a tile: 1 if every constant is finite, else 0."""
    half_ptr = tile_ptr.to(tl.pointer_type(tl.float16))
    _, g = _prescale(x_ptr, token_stride, scratch_ptr, True, False, SLICES, H, R)
    channel = _balance(scratch_ptr, False, SLICES, H, R)
    other = _half(channel * g)
    tl.store(half_ptr + V_CHANNEL // 2 + _channels(H), other)
    finite = _finite(other)
    for i in tl.range(SLICES, disable_licm=True):
        t, token_ptr = _slice(scratch_ptr, i, SLICES, H, R)
        token = tl.load(token_ptr)
        b = _divide(t, token, channel, False)
        token = token * _live_rms(_tree_channels(b * b), 32 * H)
        b = _divide(t, token, channel, False)
        lo = tl.min(tl.min(b, axis=2), axis=1)
        hi = tl.max(tl.max(b, axis=2), axis=1)
        if BITS == 2:
            lo = tl.maximum(lo, -_VALUE_CLIP)
            hi = tl.minimum(hi, _VALUE_CLIP)
        s = tl.maximum(tl.div_rn(hi - lo, 2.0**BITS - 1.0), _SMALLEST_STEP)
        if BITS == 2:
            bb = _tree_channels(b * b)
        code = _code(b, lo[:, None, None], s[:, None, None], BITS)
        if BITS == 2:
            q = code * s[:, None, None] + lo[:, None, None]
            gain = _gain(bb, _tree_channels(b * q))
            s = s * gain
            lo = lo * gain
        scale = _half(token * s)
        zero = _half(token * lo)
        finite = tl.minimum(finite, tl.minimum(_finite(scale), _finite(zero)))
        at = i + tl.arange(0, R) * SLICES
        tl.store(half_ptr + V_SCALE // 2 + at, scale)
        tl.store(half_ptr + V_ZERO // 2 + at, zero)
        octets = tl.reshape(_pack(code, R * H, 32, 1, BITS), [R, H, 4])
        octet = tl.arange(0, H)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        row_ptr = tile_ptr + V_CODES + at[:, None, None] * (4 * H * BITS)
        _store_octets(row_ptr + octet * BITS, octets, BITS)
    return finite


@triton.jit
def _all_finite(x_ptr, token_stride, SLICES: tl.constexpr, H: tl.constexpr, R: tl.constexpr):
    """1 if every number of a tile is finite, else 0."""
    finite = 1
    for i in tl.range(SLICES, disable_licm=True):
        x = tl.load(x_ptr + _at(tl.arange(0, R) + i * R, token_stride, H))
        finite = tl.minimum(finite, _finite(x))
    return finite


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
def seal_kernel(
    keys_ptr, values_ptr, tiles_ptr, flags_ptr, status_ptr, blocks_ptr, scratch_ptr,
    heads, tiles, first,
    k_layer, k_tile, k_head, k_token,
    v_layer, v_tile, v_head, v_token,
    t_layer, t_block, t_head,
    f_layer, f_block, f_head,
    s_layer, s_tile, s_head,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    SLICES: tl.constexpr,
    K_CODES: tl.constexpr, K_SCALE: tl.constexpr, K_ZERO: tl.constexpr, K_TOKEN: tl.constexpr,
    V_CODES: tl.constexpr, V_SCALE: tl.constexpr, V_ZERO: tl.constexpr, V_CHANNEL: tl.constexpr,
):  # fmt: skip
    """One program: one tile of one kv head of one layer. The strides count elements; tiles, flags, status are bytes."""
    H: tl.constexpr = D // 32
    R: tl.constexpr = G // SLICES
    scratch_ptr += tl.program_id(0).to(tl.int64) * (G * D + G + 2 * SLICES * D)
    program = first + tl.program_id(0)
    head = (program % heads).to(tl.int64)
    tile = (program // heads % tiles).to(tl.int64)
    layer = (program // heads // tiles).to(tl.int64)
    block = tl.load(blocks_ptr + tile).to(tl.int64)
    keys_ptr += layer * k_layer + tile * k_tile + head * k_head
    values_ptr += layer * v_layer + tile * v_tile + head * v_head
    tile_ptr = tiles_ptr + layer * t_layer + block * t_block + head * t_head

    keys_usable, rotated = _seal_keys(
        keys_ptr, k_token, tile_ptr, scratch_ptr, KEY_BITS, SLICES, H, R, K_CODES, K_SCALE, K_ZERO, K_TOKEN
    )
    flags = tl.where(rotated, _FLAG_KEYS_ROTATED, 0)
    tl.store(flags_ptr + layer * f_layer + block * f_block + head * f_head, flags.to(tl.uint8))
    values_usable = _seal_values(
        values_ptr, v_token, tile_ptr, scratch_ptr, VALUE_BITS, SLICES, H, R, V_CODES, V_SCALE, V_ZERO, V_CHANNEL
    )
    finite = _all_finite(keys_ptr, k_token, SLICES, H, R)
    finite = tl.minimum(finite, _all_finite(values_ptr, v_token, SLICES, H, R))
    status = tl.where(values_usable == 1, _OK, _VALUES_OVERFLOW)
    status = tl.where(keys_usable, status, _KEYS_OVERFLOW)
    status = tl.where(finite == 1, status, _NON_FINITE)
    tl.store(status_ptr + layer * s_layer + tile * s_tile + head * s_head, status.to(tl.uint8))


def _constexprs(fmt: TileFormat) -> dict[str, int]:
    return {
        "KEY_BITS": fmt.key_bits,
        "VALUE_BITS": fmt.value_bits,
        "G": fmt.tile_tokens,
        "D": fmt.head_dim,
        "SLICES": fmt.tile_tokens // SLICE_TOKENS[fmt.head_dim],
        **{name.upper(): field.offset for name, field in fmt.fields.items()},
    }


def seal(keys: Tensor, values: Tensor, fmt: TileFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize tiles, each by itself: kvarn.backends.triton.ops.seal in one launch for each SCRATCH_BYTES of work.

    keys (after RoPE) and values: float32, float16 or bfloat16 `[..., G, D]`, of any strides. Returns tiles
    `uint8 [..., tile_nbytes]`, flags `uint8 [...]` and status words `uint8 [...]` (kvarn.format.SealStatus); the bytes
    of a tile whose status is not OK mean nothing. Raises FormatError for another shape or dtype.
    """
    _check(keys, values, fmt)
    lead = keys.shape[:-2]
    tiles = keys.new_empty((*lead, fmt.tile_nbytes), dtype=torch.uint8)
    flags, status = (keys.new_empty(lead, dtype=torch.uint8) for _ in range(2))
    k, v = _five_axes(keys), _five_axes(values)
    blocks = torch.arange(k.shape[1], dtype=torch.int32, device=keys.device)
    three = k.shape[:3]
    _launch(k, v, tiles.view(*three, fmt.tile_nbytes), flags.view(three), status.view(three), blocks, fmt)
    return tiles, flags, status


def seal_into(
    keys: Tensor, values: Tensor, tiles: Tensor, flags: Tensor, status: Tensor, blocks: Tensor, fmt: TileFormat
) -> None:
    """Seal tiles where they stand in the pool, all layers in one launch, without a synchronization.

    keys and values `[L, T, Hk, G, D]`, as in `seal`; tiles `uint8 [L, M, Hk, tile_nbytes]`, flags `uint8 [L, M, Hk]`:
    the pool; status `uint8 [L, T, Hk]`, the words to write; blocks `int32 [T]`, where each tile goes, the same in all
    layers, each 0 <= block < M (not checked: they stay on the device). One layer may come without its axis L.
    Raises FormatError for another shape or dtype.
    """
    _check(keys, values, fmt)
    if keys.dim() == 4:
        keys, values, tiles, flags, status = (x[None] for x in (keys, values, tiles, flags, status))
    layers, count, heads = three = keys.shape[:3]
    pool = (layers, tiles.shape[1], heads)
    for what, x, shape, dtype in (
        ("tiles", tiles, (*pool, fmt.tile_nbytes), torch.uint8),
        ("flags", flags, pool, torch.uint8),
        ("status", status, three, torch.uint8),
        ("blocks", blocks, (count,), torch.int32),
    ):
        if x.shape != shape or x.dtype != dtype:
            raise FormatError(f"{what} are {x.dtype} {list(x.shape)}, these keys want {dtype} {list(shape)}")
    if tiles.stride(-1) != 1:
        raise FormatError(
            f"the bytes of a tile are {tiles.stride(-1)} apart; give a pool whose last axis is contiguous"
        )
    _launch(keys, values, tiles, flags, status, blocks, fmt)


def _check(keys: Tensor, values: Tensor, fmt: TileFormat) -> None:
    for what, x in (("keys", keys), ("values", values)):
        if x.shape[-2:] != (fmt.tile_tokens, fmt.head_dim) or x.dtype not in DTYPES:
            raise FormatError(
                f"{what} are {x.dtype} {list(x.shape)}, a tile wants float32, float16 or bfloat16 "
                f"[..., {fmt.tile_tokens}, {fmt.head_dim}]"
            )
    if keys.shape != values.shape:
        raise FormatError(f"keys are {list(keys.shape)}, values {list(values.shape)}; give as many of both")


def _five_axes(x: Tensor) -> Tensor:
    """`[..., G, D]` with exactly three axes before the tile; a view where the strides allow it."""
    while x.dim() > 5:
        x = x.flatten(0, 1)
    return x[(None,) * (5 - x.dim())]


def _launch(
    keys: Tensor, values: Tensor, tiles: Tensor, flags: Tensor, status: Tensor, blocks: Tensor, fmt: TileFormat
) -> None:
    layers, count, heads = keys.shape[:3]
    if layers * count * heads == 0:
        return
    keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
    g, d, constexprs = fmt.tile_tokens, fmt.head_dim, _constexprs(fmt)
    each = g * d + g + 2 * constexprs["SLICES"] * d
    at_once = min(layers * count * heads, SCRATCH_BYTES // (4 * each))
    scratch = torch.empty(at_once * each, dtype=torch.float32, device=keys.device)
    for first in range(0, layers * count * heads, at_once):
        seal_kernel[(min(at_once, layers * count * heads - first),)](
            *(keys, values, tiles, flags, status, blocks, scratch, heads, count, first),
            *keys.stride()[:4],
            *values.stride()[:4],
            *tiles.stride()[:3],
            *flags.stride(),
            *status.stride(),
            **constexprs,
            num_warps=NUM_WARPS[fmt.head_dim],
            num_stages=1,
            **OPTIONS,
        )


def compile_cases(fmt: TileFormat) -> list[CompileCase]:
    """The one way in which this module launches its kernel for a format."""
    constexprs = _constexprs(fmt)
    signature = dict.fromkeys(INTEGERS, "i32")
    signature |= {name: "*bf16" if name in POINTERS[:2] else "*u8" for name in POINTERS}
    signature |= {"blocks_ptr": "*i32", "scratch_ptr": "*fp32"}
    return [
        CompileCase(
            name=f"seal {fmt.name} D={fmt.head_dim}",
            kernel=seal_kernel,
            signature=signature,
            constexprs=constexprs,
            num_warps=NUM_WARPS[fmt.head_dim],
            options=OPTIONS,
            exact=True,
        )
    ]
