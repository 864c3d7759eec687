"""Wrong readings of the tile format: a second, complete `seal` in which exactly one step may deviate.

`seal(keys, values, fmt)` is written from docs/format.md alone and shares no arithmetic with kvarn.reference; with
`wrong` it takes one of WRONG_READINGS. The golden vectors hold tiles on which each of them changes bytes, flags or
status (tests/test_golden.py), so an implementation that passes them has none of these faults.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvarn.format import SealStatus, TileFormat
from kvarn.tile import TileFields, join, pack_codes

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
One = np.float32(1)

WRONG_READINGS = {
    "adjacent_sums": "every sum adds neighbours (x[0::2] + x[1::2]) instead of halves",
    "tile_sum_axis_1_first": "a whole tile is summed along axis 1 first, then axis 0",
    "fused_squares": "the first addition of a sum of products is fused with a product",
    "axis_1_first": "the balance takes rows before columns",
    "balance_in_place": "the balance divides b again and again instead of recomputing it from t",
    "row_before_col": "b = (t / row) / col",
    "col_times_row": "b = t / (col * row)",
    "reciprocal_balance": "b = (t * (1 / col)) * (1 / row)",
    "std": "the balance divides by the standard deviation instead of the RMS",
    "g_before_rotation": "g is the RMS of the tile before its rotation",
    "scaled_stages": "each butterfly stage multiplies by 1/sqrt(2), no multiply at the end",
    "reciprocal_step": "code = rint((b - lo) * (1 / s))",
    "half_away": "codes round half away from zero",
    "clip_3_bit_values": "values of 3 bits are clipped at 1.6 too",
    "no_key_shrink": "two-bit keys keep their full range",
    "fused_key_shrink": "lo = c - h and hi = c + h of two-bit keys fused with the product that makes h",
    "no_gain": "the gain is not applied",
    "unbounded_gain": "the gain is applied outside 0.5 ... 2 too",
    "fused_q": "q = code * s + lo with one rounding",
    "truncated_half": "float16 casts cut towards zero",
    "saturated_half": "float16 casts stop at 65504",
    "flushed_half": "float16 subnormals become zero",
    "negative_zero": "-0 is stored as -0",
    "error_before_half": "a candidate's error is taken from the float32 constants",
    "fused_error": "the last product of the read-back fused with the subtraction of the candidate",
    "tie_keeps_plain": "equal errors keep the plain keys",
    "dead_is_compared": "the candidates of a dead tile are compared like any others",
    "dead_by_rotated_only": "only the rotated candidate's mean square can make a tile dead",
}


class Sealed(NamedTuple):
    """What sealing came to: bytes and flags where the status is OK, else None and 0."""

    status: SealStatus
    tile: NDArray[np.uint8] | None
    flags: int


class _Part(NamedTuple):
    codes: NDArray[np.uint8]
    scale: Halves
    zero: Halves
    other: Halves
    exact: tuple[Floats, Floats, Floats]

    @property
    def finite(self) -> bool:
        return all(bool(np.isfinite(x).all()) for x in (self.scale, self.zero, self.other))


def fma(a: Floats, b: Floats | np.float32, c: Floats) -> Floats:
    """The correctly rounded float32 `a * b + c`: exact product, sum rounded to odd in float64, one rounding more."""
    p, z = np.broadcast_arrays(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
    total = p + z
    part = total - p
    rest = (p - (total - part)) + (z - part)
    even = (total.view(np.int64) & 1) == 0
    towards = np.nextafter(total, np.where(rest > 0, np.inf, -np.inf))
    rounded: Floats = np.where((rest != 0) & even, towards, total).astype(np.float32)
    return rounded


def _sum(x: Floats, axis: int, wrong: str) -> Floats:
    x = np.moveaxis(x, axis, 0)
    while len(x) > 1:
        n = len(x) // 2
        x = x[0::2] + x[1::2] if wrong == "adjacent_sums" else x[:n] + x[n:]
    return np.asarray(x[0])


def _dot(a: Floats, b: Floats, axis: int, wrong: str) -> Floats:
    if wrong == "fused_squares":
        a, b = np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0)
        n = len(a) // 2
        return _sum(fma(a[:n], b[:n], a[n:] * b[n:]), 0, wrong)
    return _sum(a * b, axis, wrong)


def _tile_squares(x: Floats, wrong: str) -> np.float32:
    if wrong == "tile_sum_axis_1_first":
        return np.float32(_sum(_sum(x * x, 1, wrong), 0, wrong))
    flat = x.reshape(-1)
    return np.float32(_dot(flat, flat, 0, wrong))


def rotate(x: Floats, wrong: str = "") -> Floats:
    """Walsh-Hadamard along the last axis."""
    d, stride = x.shape[-1], 1
    index = np.arange(d)
    while stride < d:
        upper = (index & stride) != 0
        x = np.where(upper, x[..., index ^ stride] - x, x + x[..., index ^ stride])
        if wrong == "scaled_stages":
            x = x * np.float32(np.sqrt(0.5))
        stride *= 2
    return x if wrong == "scaled_stages" else x * np.float32(1 / np.sqrt(d))


def _divide(t: Floats, col: Floats, row: Floats, wrong: str) -> Floats:
    rows = row[:, None]
    b: Floats = (t / col) / rows
    if wrong == "row_before_col":
        b = (t / rows) / col
    elif wrong == "col_times_row":
        b = t / (col * rows)
    elif wrong == "reciprocal_balance":
        b = (t * (One / col)) * (One / rows)
    return b


def _divisor(b: Floats, axis: int, wrong: str) -> Floats:
    n = np.float32(b.shape[axis])
    if wrong == "std":
        mean: Floats = np.expand_dims(_sum(b, axis, wrong) / n, axis)
        b = b - mean
    r: Floats = np.sqrt(_dot(b, b, axis, wrong) / n)
    live: Floats = np.where(r <= np.float32(1e-6), One, r)
    return live


def _balance(t: Floats, wrong: str) -> tuple[Floats, Floats]:
    div = {0: np.ones(t.shape[1], np.float32), 1: np.ones(t.shape[0], np.float32)}
    b = t
    for _ in range(4):
        for axis in (1, 0) if wrong == "axis_1_first" else (0, 1):
            if wrong != "balance_in_place":
                b = _divide(t, div[0], div[1], wrong)
            r = _divisor(b, axis, wrong)
            div[axis] = div[axis] * r
            if wrong == "balance_in_place":
                b = b / (r[None, :] if axis == 0 else r[:, None])
    return div[0], div[1]


def _round(x: Floats, wrong: str) -> Floats:
    if wrong != "half_away":
        return np.rint(x)
    whole: Floats = np.trunc(x)
    away: Floats = whole + np.where(np.abs(x - whole) >= np.float32(0.5), np.sign(x), np.float32(0))
    return away


def _half(x: Floats, wrong: str) -> Halves:
    if wrong == "saturated_half":
        x = np.clip(x, np.float32(-65504), np.float32(65504))
    half: Halves = x.astype(np.float16)
    if wrong == "truncated_half":
        half = np.where(np.abs(half.astype(np.float32)) > np.abs(x), np.nextafter(half, np.zeros_like(half)), half)
    if wrong == "flushed_half":
        half = np.where(np.abs(half) < np.float16(2.0**-14), np.float16(0), half)
    return half if wrong == "negative_zero" else np.where(half == 0, np.float16(0), half)


def _quantize(tile: Floats, measured: Floats, bits: int, values: bool, wrong: str) -> _Part:
    """`measured` is the tile whose RMS is g: the tile itself, except in one wrong reading."""
    ms = _tile_squares(measured, wrong) / np.float32(tile.size)
    g = One if ms < np.float32(2.0**-80) else np.sqrt(ms)
    t = tile / g
    col, row = _balance(t, wrong)
    b = _divide(t, col, row, wrong)
    lo, hi = b.min(axis=1), b.max(axis=1)
    if values and (bits == 2 or (bits == 3 and wrong == "clip_3_bit_values")):
        lo, hi = np.maximum(lo, np.float32(-1.6)), np.minimum(hi, np.float32(1.6))
    elif not values and bits == 2 and wrong != "no_key_shrink":
        c, radius, shrink = (lo + hi) * np.float32(0.5), (hi - lo) * np.float32(0.5), np.float32(0.65)
        if wrong == "fused_key_shrink":
            lo, hi = fma(-radius, shrink, c), fma(radius, shrink, c)
        else:
            lo, hi = c - radius * shrink, c + radius * shrink
    top = np.float32(2**bits - 1)
    s = np.maximum((hi - lo) / top, np.float32(1e-10))
    steps = (b - lo[:, None]) * (One / s)[:, None] if wrong == "reciprocal_step" else (b - lo[:, None]) / s[:, None]
    codes = np.minimum(np.maximum(_round(steps, wrong), np.float32(0)), top)
    if bits == 2 and wrong != "no_gain":
        q = fma(codes, s[:, None], lo[:, None]) if wrong == "fused_q" else codes * s[:, None] + lo[:, None]
        bq = _dot(b, q, 1, wrong)
        a = _dot(b, b, 1, wrong) / bq
        good = bq > 0
        if wrong != "unbounded_gain":
            good &= (a >= np.float32(0.5)) & (a <= np.float32(2))
        a = np.where(good, a, One)
        s, lo = s * a, lo * a
    exact = row * s, row * lo, col * g
    scale, zero, other = (_half(x, wrong) for x in exact)
    return _Part(np.nan_to_num(codes).astype(np.uint8), scale, zero, other, exact)


def _error(x: Floats, part: _Part, wrong: str) -> np.float32:
    constants = part.exact if wrong == "error_before_half" else (part.scale, part.zero, part.other)
    scale, zero, other = (c.astype(np.float32) for c in constants)
    shifted = part.codes.astype(np.float32) * scale[:, None] + zero[:, None]
    e = fma(shifted, other[None], -x) if wrong == "fused_error" else shifted * other - x
    return _tile_squares(e, wrong)


@np.errstate(all="ignore")
def seal(keys: Floats, values: Floats, fmt: TileFormat, wrong: str = "") -> Sealed:
    """Seal one tile `[G, D]` by the format's text, or by one wrong reading of it."""
    if not (np.isfinite(keys).all() and np.isfinite(values).all()):
        return Sealed(SealStatus.NON_FINITE, None, 0)
    plain = np.ascontiguousarray(keys.T)
    candidates = (np.ascontiguousarray(rotate(keys, wrong).T), plain)
    parts, errors, usable, dead = [], [], [], []
    for x in candidates:
        part = _quantize(x, plain if wrong == "g_before_rotation" else x, fmt.key_bits, False, wrong)
        parts.append(part)
        errors.append(_error(x, part, wrong))
        usable.append(part.finite and bool(np.isfinite(errors[-1])))
        dead.append(bool(_tile_squares(x, wrong) / np.float32(x.size) < np.float32(2.0**-80)))
    # Only the plain candidate below 2^-80 changes an outcome: with the rotated one alone, both read back as zeros and
    # the rotated one, with the smaller sum of squares, has the smaller error anyway.
    dead_tile = {"dead_is_compared": False, "dead_by_rotated_only": dead[0]}.get(wrong, any(dead))
    smaller = errors[0] < errors[1] if wrong == "tie_keeps_plain" else errors[0] <= errors[1]
    turned = rotate(values, wrong)
    v = _quantize(turned, values if wrong == "g_before_rotation" else turned, fmt.value_bits, True, wrong)
    if not any(usable):
        return Sealed(SealStatus.KEYS_OVERFLOW, None, 0)
    if not v.finite:
        return Sealed(SealStatus.VALUES_OVERFLOW, None, 0)
    rotated = usable[0] and (dead_tile or not usable[1] or bool(smaller))
    k = parts[0] if rotated else parts[1]
    fields = TileFields(
        k_codes=pack_codes(k.codes, fmt.key_bits),
        k_scale=k.scale,
        k_zero=k.zero,
        k_token=k.other,
        v_codes=pack_codes(v.codes, fmt.value_bits),
        v_scale=v.scale,
        v_zero=v.zero,
        v_channel=v.other,
    )
    return Sealed(SealStatus.OK, join(fields, fmt), int(rotated))
