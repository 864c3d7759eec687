"""The plain MLX version of every operation: runs on MLX's CPU device and on Metal. Reference: kvarn.reference.

Sealing and unsealing are bit-equal to the reference on the CPU device: every line is one float32 operation in the
reference's order, so nothing here may go through mx.compile or mx.fast but `attend_exact`.
Attention agrees within 1e-5 relative in float32. Arguments stand as in the reference, with leading batch axes.
"""

from dataclasses import dataclass

import mlx.core as mx
from mlx.core import array

from kvarn.format import FLAG_KEYS_ROTATED, SealStatus, TileFormat
from kvarn.reference import (
    BALANCE_ITERATIONS,
    DEAD_MEAN_SQUARE,
    DEAD_RMS,
    KEY_SHRINK,
    SMALLEST_STEP,
    VALUE_CLIP,
)
from kvarn.visibility import pieces

TILES_PER_GROUP = 16  # sealed tiles that are read at a time: bounds the scratch memory of attention


def tree_sum(x: array) -> array:
    """Sum of the last axis (a power of two) by halving."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def rotate(x: array) -> array:
    """Walsh-Hadamard transform of the last axis, float32 `[..., D]`; its own inverse."""
    d = x.shape[-1]
    stride = 1
    while stride < d:
        pairs = x.reshape(*x.shape[:-1], d // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = mx.stack([a + b, a - b], axis=-2).reshape(*x.shape)
        stride *= 2
    scale: float = 1 / d**0.5
    return x * scale


def pack_codes(codes: array, bits: int) -> array:
    """Codes `uint8 [..., n]` -> little-endian bit stream `uint8 [..., n*bits/8]`."""
    if bits == 8:
        return codes
    shifts = mx.arange(8).astype(mx.uint8)
    ones = (codes[..., None] >> shifts[:bits]) & 1
    octets = ones.reshape(*codes.shape[:-1], -1, 8)
    return (octets << shifts).sum(-1).astype(mx.uint8)


def unpack_codes(stream: array, bits: int) -> array:
    """The inverse of `pack_codes`: bytes `uint8 [..., n*bits/8]` -> codes `uint8 [..., n]`."""
    if bits == 8:
        return stream
    mask = (1 << bits) - 1
    if bits in (2, 4):
        codes = mx.stack([(stream >> shift) & mask for shift in range(0, 8, bits)], axis=-1)
        return codes.flatten(-2)
    start = mx.arange(stream.shape[-1] * 8 // bits) * bits
    first = start // 8
    second = mx.minimum(first + 1, stream.shape[-1] - 1)
    low, high = (mx.take(stream, index, axis=-1).astype(mx.uint16) for index in (first, second))
    return (((low | (high << 8)) >> (start % 8).astype(mx.uint16)) & mask).astype(mx.uint8)


@dataclass(frozen=True)
class Quantized:
    """Oriented tiles `[..., R, C]`, quantized: codes uint8, constants float16, mean square of the input `[...]`."""

    mean_square: array
    codes: array
    scale: array
    zero: array
    other: array

    @property
    def finite(self) -> array:
        """Whether every stored constant is finite, bool `[...]`."""
        scale, zero, other = (mx.isfinite(x).all(-1) for x in (self.scale, self.zero, self.other))
        return scale & zero & other


def quantize(tile: array, bits: int, *, values: bool) -> Quantized:
    """Quantize oriented tiles, float32 `[..., R, C]`: steps 2 to 6 of docs/format.md, each tile by itself."""
    rows, columns = tile.shape[-2:]
    mean_square = tree_sum((tile * tile).flatten(-2)) / (rows * columns)
    g = mx.where(mean_square < float(DEAD_MEAN_SQUARE), 1.0, mx.sqrt(mean_square))
    t = tile / g[..., None, None]
    col, row = mx.ones_like(t[..., :1, :]), mx.ones_like(t[..., :1])
    for _ in range(BALANCE_ITERATIONS):
        b = (t / col) / row
        col = col * _live_rms(b.swapaxes(-1, -2))[..., None, :]
        b = (t / col) / row
        row = row * _live_rms(b)[..., None]
    b = (t / col) / row
    lo, hi = b.min(-1, keepdims=True), b.max(-1, keepdims=True)
    if bits == 2 and values:
        lo, hi = mx.maximum(lo, -float(VALUE_CLIP)), mx.minimum(hi, float(VALUE_CLIP))
    elif bits == 2:
        center, half = (lo + hi) * 0.5, ((hi - lo) * 0.5) * float(KEY_SHRINK)
        lo, hi = center - half, center + half
    top = 2**bits - 1
    s = mx.maximum((hi - lo) / top, float(SMALLEST_STEP))
    codes = mx.clip(mx.round((b - lo) / s), 0, top)
    if bits == 2:
        q = codes * s
        q = q + lo
        bq = tree_sum(b * q)[..., None]
        gain = tree_sum(b * b)[..., None] / bq
        gain = mx.where((bq > 0) & (gain >= 0.5) & (gain <= 2), gain, 1.0)
        s, lo = s * gain, lo * gain
    return Quantized(
        mean_square=mean_square,
        codes=mx.nan_to_num(codes).astype(mx.uint8),
        scale=_half(row * s).squeeze(-1),
        zero=_half(row * lo).squeeze(-1),
        other=_half(col * g[..., None, None]).squeeze(-2),
    )


def _live_rms(b: array) -> array:
    r = mx.sqrt(tree_sum(b * b) / b.shape[-1])
    return mx.where(r <= float(DEAD_RMS), 1.0, r)


def _half(x: array) -> array:
    half = x.astype(mx.float16)
    return mx.where(half == 0, 0.0, half)  # -0 is stored as +0


def read_back(codes: array, scale: array, zero: array, other: array) -> array:
    """`(code * scale[row] + zero[row]) * other[col]` of oriented tiles `[..., R, C]`: three float32 roundings."""
    x = codes.astype(mx.float32) * scale.astype(mx.float32)[..., None]
    x = x + zero.astype(mx.float32)[..., None]
    return x * other.astype(mx.float32)[..., None, :]


def seal(keys: array, values: array, fmt: TileFormat) -> tuple[array, array, array]:
    """Quantize tiles, each by itself.

    keys (after RoPE) and values: float32 `[..., G, D]`. Returns tiles `uint8 [..., tile_nbytes]`, flags `uint8 [...]`
    and status words `uint8 [...]` (kvarn.format.SealStatus); the bytes of a tile whose status is not OK mean nothing.
    """
    candidates = mx.contiguous(mx.stack([rotate(keys), keys]).swapaxes(-1, -2))
    k = quantize(candidates, fmt.key_bits, values=False)
    e = read_back(k.codes, k.scale, k.zero, k.other) - candidates
    error = tree_sum((e * e).flatten(-2))
    usable = k.finite & mx.isfinite(error)
    dead = (k.mean_square < float(DEAD_MEAN_SQUARE)).any(0)
    rotated = usable[0] & (dead | ~usable[1] | (error[0] <= error[1]))
    v = quantize(rotate(values), fmt.value_bits, values=True)

    def kept(x: array) -> array:
        return mx.where(rotated.reshape(rotated.shape + (1,) * (x.ndim - 1 - rotated.ndim)), x[0], x[1])

    parts = [pack_codes(kept(k.codes), fmt.key_bits), kept(k.scale), kept(k.zero), kept(k.other)]
    parts += [pack_codes(v.codes, fmt.value_bits), v.scale, v.zero, v.other]
    lead = keys.ndim - 2
    tiles = mx.concatenate([mx.contiguous(x.flatten(lead)).view(mx.uint8) for x in parts], axis=-1)
    flags = rotated.astype(mx.uint8) * FLAG_KEYS_ROTATED
    finite = (mx.isfinite(keys) & mx.isfinite(values)).flatten(-2).all(-1)
    status = mx.where(v.finite, SealStatus.OK.value, SealStatus.VALUES_OVERFLOW.value)
    status = mx.where(usable.any(0), status, SealStatus.KEYS_OVERFLOW.value)
    status = mx.where(finite, status, SealStatus.NON_FINITE.value)
    return tiles, flags, status.astype(mx.uint8)


def _field(tiles: array, name: str, fmt: TileFormat) -> array:
    """One field of tiles `uint8 [..., tile_nbytes]`: codes unpacked to `uint8 [..., R, C]`, constants as float32."""
    spec = fmt.fields[name]
    raw = tiles[..., spec.offset : spec.offset + spec.nbytes]
    if name.endswith("codes"):
        bits = fmt.key_bits if name == "k_codes" else fmt.value_bits
        return unpack_codes(raw.reshape(*raw.shape[:-1], spec.shape[0], -1), bits)
    return mx.contiguous(raw).view(mx.float16).astype(mx.float32)


def unseal(tiles: array, flags: array, fmt: TileFormat) -> tuple[array, array]:
    """Read tiles back: `uint8 [..., tile_nbytes]`, flags `uint8 [...]` -> keys and values, float32 `[..., G, D]`."""
    k = [_field(tiles, name, fmt) for name in ("k_codes", "k_scale", "k_zero", "k_token")]
    keys = read_back(*k).swapaxes(-1, -2)
    rotated = (flags & FLAG_KEYS_ROTATED).astype(mx.bool_)[..., None, None]
    return mx.where(rotated, rotate(keys), keys), rotate(_sealed_values(tiles, fmt))


def _sealed_values(tiles: array, fmt: TileFormat) -> array:
    """The values of tiles in the rotated basis, float32 `[..., G, D]`."""
    v = [_field(tiles, name, fmt) for name in ("v_codes", "v_scale", "v_zero", "v_channel")]
    return read_back(*v)


@dataclass(frozen=True)
class _Softmax:
    """A softmax over some keys: maximum and sum `[Hk, R, N]`, output `[Hk, R, N, D]`, all float32."""

    maximum: array
    total: array
    output: array

    @classmethod
    def of(cls, scores: array, values: array) -> "_Softmax":
        """Scores `[Hk, R, N, T]` over values `[Hk, T, D]`; every query sees at least one key."""
        hk, r, n, t = scores.shape
        maximum = scores.max(-1)
        p = mx.exp(scores - maximum[..., None])
        output = (p.reshape(hk, r * n, t) @ values).reshape(hk, r, n, -1)
        return cls(maximum, p.sum(-1), output)

    @classmethod
    def empty(cls, query: array) -> "_Softmax":
        rows = query.shape[:-1]
        return cls(mx.full(rows, -mx.inf), mx.zeros(rows), mx.zeros_like(query))

    @classmethod
    def concatenate(cls, parts: "list[_Softmax]") -> "_Softmax":
        """The same keys' softmax for the queries of all parts, in order."""
        return cls(*(mx.concatenate([getattr(p, x) for p in parts], axis=2) for x in ("maximum", "total", "output")))

    def queries(self, low: int, high: int) -> "_Softmax":
        return _Softmax(self.maximum[:, :, low:high], self.total[:, :, low:high], self.output[:, :, low:high])

    def merge(self, other: "_Softmax") -> "_Softmax":
        """Over the keys of both; `other` may be empty, or `self`, not both."""
        maximum = mx.maximum(self.maximum, other.maximum)
        a, b = mx.exp(self.maximum - maximum), mx.exp(other.maximum - maximum)
        output = self.output * a[..., None] + other.output * b[..., None]
        return _Softmax(maximum, self.total * a + other.total * b, output)


def attend(
    query: array,
    sink: array,
    window: array,
    tiles: array,
    flags: array,
    blocks: array,
    start: int,
    scale: float,
    fmt: TileFormat,
) -> array:
    """Attention of one sequence in one sealed layer under the visibility rule, decode (N = 1) and prefill alike.

    query `[N, H, D]` at positions start ... start+N-1; sink `[2, Hk, G, D]`, keys and values of tile 0, read by queries
    beyond it; window `[2, Hk, W, D]`, exact keys and values from the first token of tile start//G to the last query;
    tiles `uint8 [M, Hk, tile_nbytes]` and flags `uint8 [M, Hk]`, this layer's pool; blocks `int32 [B]`, where tiles
    1, 2, ... stand in it, as far as the last query reads. Returns float32 `[N, H, D]`.

    Sealed tiles are read a group at a time and never turned into a whole cache. Keys are not unsealed: the query is
    rotated once and takes on a tile's scales (docs/format.md, Reading without materializing).
    """
    n, h, d = query.shape
    hk, g = window.shape[1], fmt.tile_tokens
    plain = query.astype(mx.float32).reshape(n, hk, h // hk, d).transpose(1, 2, 0, 3) * scale  # [Hk, R, N, D]
    base = start // g * g  # position of the window's first token
    parts = []
    for piece in pieces(start, start + n, g):
        own = window[:, :, piece.tile * g - base : piece.stop - base]
        seen = mx.concatenate([sink, own], axis=2) if piece.tile > 0 else own
        scores = _scores(plain[:, :, piece.start - start : piece.stop - start], seen[0])
        count, length = scores.shape[-2:]
        visible = mx.arange(length) <= mx.arange(length - count, length)[:, None]
        scores = mx.where(visible, scores, -mx.inf)
        parts.append(_Softmax.of(scores, seen[1].astype(mx.float32)))
    exact = _Softmax.concatenate(parts)
    if not len(blocks):
        return _rows(exact)

    sealed = _Softmax.empty(plain)
    turned = rotate(plain)
    before = max(start // g - 1, 0)  # sealed tiles that every query of this span reads
    groups = [(i, min(i + TILES_PER_GROUP, before), 0) for i in range(0, before, TILES_PER_GROUP)]
    # A tile that this span itself completes is read only by the queries after it.
    groups += [(i, i + 1, max((i + 2) * g - start, 0)) for i in range(before, len(blocks))]
    for low, high, first in groups:
        # MLX is lazy: a group waits for the one before it, so that only one is in memory at a time.
        wanted = mx.depends(blocks[low:high], sealed.output)
        group = tiles[wanted].swapaxes(0, 1)  # [Hk, B, nbytes]
        rotated = (flags[wanted].T & FLAG_KEYS_ROTATED).astype(mx.bool_)[..., None, None, None]  # [Hk, B, 1, 1, 1]
        rows = mx.where(rotated, turned[:, None, :, first:], plain[:, None, :, first:]).flatten(2, 3)
        k_codes, k_scale, k_zero, k_token = (
            _field(group, name, fmt) for name in ("k_codes", "k_scale", "k_zero", "k_token")
        )
        dots = (rows * k_scale[..., None, :]) @ k_codes.astype(mx.float32) + rows @ k_zero[..., None]
        scores = (dots * k_token[..., None, :]).swapaxes(1, 2).flatten(2)  # [Hk, R*n, B*G]
        values = _sealed_values(group, fmt).flatten(1, 2)  # [Hk, B*G, D]
        part = _Softmax.of(scores.reshape(hk, h // hk, n - first, -1), values)
        merged = sealed.queries(first, n).merge(part)
        sealed = _Softmax.concatenate([sealed.queries(0, first), merged]) if first else merged
    return _rows(exact.merge(_Softmax(sealed.maximum, sealed.total, rotate(sealed.output))))


def _scores(rows: array, keys: array) -> array:
    """Scaled queries `[Hk, R, n, D]` against keys `[Hk, T, D]`: float32 `[Hk, R, n, T]`."""
    hk, r, n, d = rows.shape
    return (rows.reshape(hk, r * n, d) @ keys.astype(mx.float32).swapaxes(-1, -2)).reshape(hk, r, n, -1)


def _rows(softmax: _Softmax) -> array:
    """The outputs `[N, H, D]` of `[Hk, R, N, D]`."""
    return (softmax.output / softmax.total[..., None]).transpose(2, 0, 1, 3).flatten(1, 2)


def attend_exact(
    query: array, keys: array, values: array, start: int, scale: float, *, window: int | None = None
) -> array:
    """Attention of one sequence in an exact layer, in the model's dtype.

    query `[N, H, D]` at positions start ... start+N-1; keys, values `[T, Hk, D]` of positions 0 ... start+N-1. window:
    how many tokens a query reads, its own included. Returns `[N, H, D]`.
    """
    position = mx.arange(start, start + len(query))[:, None]
    other = mx.arange(len(keys))
    visible = other <= position
    if window is not None:
        visible = visible & (other > position - window)
    q, k, v = (x.swapaxes(0, 1)[None] for x in (query, keys, values))  # [1, heads, tokens, D]
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=visible)[0].swapaxes(0, 1)
