"""The oracle: rotate, balance, seal, unseal and attend in NumPy. The meaning of every kernel; slow and plain.

docs/format.md is the text of this file. Every line is one float32 operation, rounded once; the order of the
operations is part of the format, so nothing here may be rearranged.

Source of the method: Müller et al., KVarN: Variance-Normalized KV-Cache Quantization, arXiv 2606.03458. Where the
format departs from it (keys rotated or not per tile, clipped two-bit values with a gain), docs/format.md says why.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvarn.errors import FormatError, SealError
from kvarn.format import FLAG_KEYS_ROTATED, SealStatus, TileFormat
from kvarn.tile import Bytes, Halves, TileFields, join, pack_codes, split, unpack_codes
from kvarn.visibility import pieces

Floats = NDArray[np.float32]

BALANCE_ITERATIONS = 4
DEAD_RMS = np.float32(1e-6)
DEAD_MEAN_SQUARE = np.float32(2.0**-80)
VALUE_CLIP = np.float32(1.6)
KEY_SHRINK = np.float32(0.65)
SMALLEST_STEP = np.float32(1e-10)


def tree_sum(x: Floats, axis: int) -> Floats:
    """Sum along one axis (a power of two) by halving: `x[:n/2] + x[n/2:]` until one value is left."""
    x = np.moveaxis(x, axis, 0)
    while len(x) > 1:
        half = len(x) // 2
        x = x[:half] + x[half:]
    total: Floats = x[0]
    return total


def tile_sum(x: Floats) -> np.float32:
    """The halving tree over a whole oriented tile, flattened row-major (axis 0 first, then axis 1)."""
    return np.float32(tree_sum(x.reshape(-1), 0))


def rotate(x: Floats) -> Floats:
    """Walsh-Hadamard transform of the last axis, `[..., D]`: Sylvester order, no signs, orthonormal, its own inverse.

    Butterflies `(a + b, a - b)` with stride 1, 2, 4, ..., then one multiply by float32(1/sqrt(D)).
    """
    d = x.shape[-1]
    stride = 1
    while stride < d:
        pairs = x.reshape(*x.shape[:-1], d // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(*x.shape[:-1], d)
        stride *= 2
    return x * np.float32(1 / np.sqrt(d))


@dataclass(frozen=True)
class Quantized:
    """One oriented tile, quantized: the codes, the stored constants and every intermediate that is pinned.

    Rows and columns are those of the oriented tile: channels x tokens for keys, tokens x channels for values.
    """

    g: np.float32
    col: Floats  # [C]
    row: Floats  # [R]
    lo: Floats  # [R] after clip and gain
    s: Floats  # [R] after clip and gain
    codes: Bytes  # [R, C]
    scale: Halves  # [R]
    zero: Halves  # [R]
    other: Halves  # [C]

    @property
    def finite(self) -> bool:
        """Whether every stored constant is finite."""
        return bool(np.isfinite(self.scale).all() and np.isfinite(self.zero).all() and np.isfinite(self.other).all())


def prescale(tile: Floats) -> np.float32:
    """RMS of a candidate, 1 where its mean square is below 2^-80."""
    mean_square = tile_sum(tile * tile) / np.float32(tile.size)
    return np.float32(1) if mean_square < DEAD_MEAN_SQUARE else np.sqrt(mean_square)


def balance(t: Floats) -> tuple[Floats, Floats]:
    """Dual-axis variance normalization of `t [R, C]`: the divisors `(col [C], row [R])` after four iterations."""
    rows, columns = t.shape
    col, row = np.ones(columns, np.float32), np.ones(rows, np.float32)
    for _ in range(BALANCE_ITERATIONS):
        b = (t / col) / row[:, None]
        col = col * _live_rms(b, axis=0)
        b = (t / col) / row[:, None]
        row = row * _live_rms(b, axis=1)
    return col, row


def _live_rms(b: Floats, axis: int) -> Floats:
    r = np.sqrt(tree_sum(b * b, axis) / np.float32(b.shape[axis]))
    return np.where(r <= DEAD_RMS, np.float32(1), r)


@np.errstate(all="ignore")
def quantize(tile: Floats, bits: int, *, values: bool) -> Quantized:
    """Quantize one oriented tile `[R, C]` (keys `[D, G]`, values `[G, D]`): steps 2 to 6 of docs/format.md."""
    g = prescale(tile)
    t = tile / g
    col, row = balance(t)
    b = (t / col) / row[:, None]
    lo, hi = b.min(axis=1), b.max(axis=1)
    if bits == 2 and values:
        lo, hi = np.maximum(lo, -VALUE_CLIP), np.minimum(hi, VALUE_CLIP)
    elif bits == 2:
        center, half = (lo + hi) * np.float32(0.5), ((hi - lo) * np.float32(0.5)) * KEY_SHRINK
        lo, hi = center - half, center + half
    top = np.float32(2**bits - 1)
    s = np.maximum((hi - lo) / top, SMALLEST_STEP)
    codes = np.clip(np.rint((b - lo[:, None]) / s[:, None]), np.float32(0), top)
    if bits == 2:
        q = codes * s[:, None] + lo[:, None]
        bq = tree_sum(b * q, 1)
        gain = tree_sum(b * b, 1) / bq
        gain = np.where((bq > 0) & (gain >= np.float32(0.5)) & (gain <= 2), gain, np.float32(1))
        s, lo = s * gain, lo * gain
    return Quantized(
        g=g,
        col=col,
        row=row,
        lo=lo,
        s=s,
        codes=np.nan_to_num(codes).astype(np.uint8),
        scale=_half(row * s),
        zero=_half(row * lo),
        other=_half(col * g),
    )


@np.errstate(all="ignore")
def _half(x: Floats) -> Halves:
    """To float16, nearest-even, subnormals kept, -0 as +0."""
    half = x.astype(np.float16)
    return np.where(half == 0, np.float16(0), half)


def read_back(codes: Bytes, scale: Halves, zero: Halves, other: Halves) -> Floats:
    """`(code * scale[row] + zero[row]) * other[col]` of an oriented tile `[..., R, C]`: three float32 roundings."""
    scaled = codes.astype(np.float32) * scale.astype(np.float32)[..., None]
    shifted = scaled + zero.astype(np.float32)[..., None]
    return shifted * other.astype(np.float32)[..., None, :]


@dataclass(frozen=True)
class KeyChoice:
    """The two candidates for a tile's keys, the squared error of each, and the one that is kept (None: neither)."""

    rotated: Quantized
    plain: Quantized
    rotated_error: np.float32
    plain_error: np.float32
    keep_rotated: bool | None

    @property
    def kept(self) -> Quantized:
        """The candidate that is stored."""
        return self.rotated if self.keep_rotated else self.plain


@np.errstate(all="ignore")
def choose_keys(keys: Floats, fmt: TileFormat) -> KeyChoice:
    """Quantize keys `[G, D]` rotated and as they are, and keep the candidate with the smaller squared error.

    A tie, or a dead tile (mean square of either candidate below 2^-80), keeps the rotated one. A candidate with a
    non-finite constant or error is discarded.
    """
    candidates = [np.ascontiguousarray(x.T) for x in (rotate(keys), keys)]
    rotated, plain = (quantize(x, fmt.key_bits, values=False) for x in candidates)
    errors = []
    for x, kept in zip(candidates, (rotated, plain), strict=True):
        e = read_back(kept.codes, kept.scale, kept.zero, kept.other) - x
        errors.append(tile_sum(e * e))
    usable = [kept.finite and bool(np.isfinite(error)) for kept, error in zip((rotated, plain), errors, strict=True)]
    dead = any(tile_sum(x * x) / np.float32(x.size) < DEAD_MEAN_SQUARE for x in candidates)
    keep_rotated: bool | None
    if usable[0] and (dead or not usable[1] or errors[0] <= errors[1]):
        keep_rotated = True
    else:
        keep_rotated = False if usable[1] else None
    return KeyChoice(rotated, plain, errors[0], errors[1], keep_rotated)


@np.errstate(all="ignore")
def seal(keys: Floats, values: Floats, fmt: TileFormat) -> tuple[Bytes, int]:
    """Quantize one tile of one kv head.

    keys (after RoPE) and values: float32 `[G, D]`. Returns the tile's bytes, `uint8 [tile_nbytes]`, and its flags.
    Raises SealError for non-finite input or constants beyond float16, FormatError for another shape or dtype.
    """
    shape = (fmt.tile_tokens, fmt.head_dim)
    for what, x in (("keys", keys), ("values", values)):
        if x.shape != shape or x.dtype != np.float32:
            raise FormatError(f"{what} are {x.dtype} {list(x.shape)}, a tile wants float32 {list(shape)}")
    if not (np.isfinite(keys).all() and np.isfinite(values).all()):
        raise SealError(SealStatus.NON_FINITE.reason)
    choice = choose_keys(keys, fmt)
    v = quantize(rotate(values), fmt.value_bits, values=True)
    if choice.keep_rotated is None:
        raise SealError(SealStatus.KEYS_OVERFLOW.reason)
    if not v.finite:
        raise SealError(SealStatus.VALUES_OVERFLOW.reason)
    k = choice.kept
    parts = TileFields(
        k_codes=pack_codes(k.codes, fmt.key_bits),
        k_scale=k.scale,
        k_zero=k.zero,
        k_token=k.other,
        v_codes=pack_codes(v.codes, fmt.value_bits),
        v_scale=v.scale,
        v_zero=v.zero,
        v_channel=v.other,
    )
    return join(parts, fmt), FLAG_KEYS_ROTATED if choice.keep_rotated else 0


def unseal(tile: Bytes, flags: int, fmt: TileFormat) -> tuple[Floats, Floats]:
    """Read one tile back: `uint8 [tile_nbytes]` and its flags -> keys and values, float32 `[G, D]`."""
    parts = split(tile, fmt)
    keys = read_back(unpack_codes(parts.k_codes, fmt.key_bits), parts.k_scale, parts.k_zero, parts.k_token).T
    values = read_back(unpack_codes(parts.v_codes, fmt.value_bits), parts.v_scale, parts.v_zero, parts.v_channel)
    keys = np.ascontiguousarray(keys)
    return rotate(keys) if flags & FLAG_KEYS_ROTATED else keys, rotate(values)


def attend(
    query: Floats,
    keys: Floats,
    values: Floats,
    tiles: Bytes,
    flags: Bytes,
    start: int,
    scale: float,
    fmt: TileFormat,
) -> NDArray[np.float64]:
    """Attention of one sequence under the visibility rule, decode (N = 1) and prefill alike.

    query `[N, H, D]` at positions start ... start+N-1; keys, values `[T, Hk, D]` exact, of positions 0 ... start+N-1
    (what the rule hides is not read); tiles `uint8 [B, Hk, tile_nbytes]` and flags `uint8 [B, Hk]` of the sealed
    tiles 1, 2, ... that the last query may read. `H` is a multiple of `Hk`. Returns float64 `[N, H, D]`: the exact
    value of the sum, so that a kernel's error is its own.
    """
    n, h, d = query.shape
    hk = keys.shape[1]
    out = np.zeros((n, h, d))
    unsealed = [[unseal(tiles[b, j], int(flags[b, j]), fmt) for j in range(hk)] for b in range(len(tiles))]
    for piece in pieces(start, start + n, fmt.tile_tokens):
        for position in range(piece.start, piece.stop):
            for head in range(h):
                j = head * hk // h
                spans = [slice(0, fmt.tile_tokens)] if piece.tile > 0 else []
                spans.append(slice(piece.tile * fmt.tile_tokens, position + 1))
                k = np.concatenate([keys[s, j] for s in spans] + [unsealed[b][j][0] for b in range(piece.sealed)])
                v = np.concatenate([values[s, j] for s in spans] + [unsealed[b][j][1] for b in range(piece.sealed)])
                score = k.astype(np.float64) @ query[position - start, head].astype(np.float64) * scale
                p = np.exp(score - score.max())
                out[position - start, head] = (p / p.sum()) @ v.astype(np.float64)
    return out
