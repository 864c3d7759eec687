"""The plain torch version of every operation: runs on any torch device, a CPU too. Reference: kvarn.reference.

Sealing and unsealing are bit-equal to the reference: every line is one float32 operation in the reference's order.
Attention agrees within 1e-5 relative in float32. Arguments stand as in the reference, with leading batch axes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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

TILES_PER_GROUP = 16  # sealed tiles that prefill reads at a time: bounds the scratch memory of attention
DECODE_SCRATCH = 1 << 21  # numbers of unpacked codes that decode holds at a time, likewise


def tree_sum(x: Tensor) -> Tensor:
    """Sum of the last axis (a power of two) by halving."""
    while x.shape[-1] > 1:
        low, high = x.chunk(2, dim=-1)
        x = low + high
    return x[..., 0]


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded float32 square root; torch's own is one ulp off for a fifth of its inputs on a CPU."""
    return x.double().sqrt().float()


def rotate(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last axis, float32 `[..., D]`; its own inverse."""
    d = x.shape[-1]
    stride = 1
    while stride < d:
        a, b = x.reshape(*x.shape[:-1], d // (2 * stride), 2, stride).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        stride *= 2
    scale: float = 1 / d**0.5
    return x * scale


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes `uint8 [..., n]` -> little-endian bit stream `uint8 [..., n*bits/8]`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
    ones = (codes[..., None] >> shifts[:bits]) & 1
    octets = ones.reshape(*codes.shape[:-1], -1, 8)
    return (octets << shifts).sum(-1, dtype=torch.uint8)


def unpack_codes(stream: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_codes`: bytes `uint8 [..., n*bits/8]` -> codes `uint8 [..., n]`."""
    if bits == 8:
        return stream
    mask = (1 << bits) - 1
    if bits in (2, 4):
        return torch.stack([(stream >> shift) & mask for shift in range(0, 8, bits)], dim=-1).flatten(-2)
    start = torch.arange(stream.shape[-1] * 8 // bits, device=stream.device) * bits
    first = start // 8
    second = (first + 1).clamp(max=stream.shape[-1] - 1)
    pair = stream[..., first].int() | (stream[..., second].int() << 8)
    return ((pair >> (start % 8).int()) & mask).to(torch.uint8)


@dataclass(frozen=True)
class Quantized:
    """Oriented tiles `[..., R, C]`, quantized: codes uint8, constants float16, mean square of the input `[...]`."""

    mean_square: Tensor
    codes: Tensor
    scale: Tensor
    zero: Tensor
    other: Tensor

    @property
    def finite(self) -> Tensor:
        """Whether every stored constant is finite, bool `[...]`."""
        return self.scale.isfinite().all(-1) & self.zero.isfinite().all(-1) & self.other.isfinite().all(-1)


def quantize(tile: Tensor, bits: int, *, values: bool) -> Quantized:
    """Quantize oriented tiles, float32 `[..., R, C]`: steps 2 to 6 of docs/format.md, each tile by itself."""
    rows, columns = tile.shape[-2:]
    mean_square = tree_sum((tile * tile).flatten(-2)) / (rows * columns)
    g = torch.where(mean_square < float(DEAD_MEAN_SQUARE), 1.0, sqrt(mean_square))
    t = tile / g[..., None, None]
    col, row = torch.ones_like(t[..., :1, :]), torch.ones_like(t[..., :1])
    for _ in range(BALANCE_ITERATIONS):
        b = (t / col) / row
        col = col * _live_rms(b.transpose(-1, -2)).unsqueeze(-2)
        b = (t / col) / row
        row = row * _live_rms(b).unsqueeze(-1)
    b = (t / col) / row
    lo, hi = b.amin(-1, keepdim=True), b.amax(-1, keepdim=True)
    if bits == 2 and values:
        lo, hi = lo.clamp(min=-float(VALUE_CLIP)), hi.clamp(max=float(VALUE_CLIP))
    elif bits == 2:
        center, half = (lo + hi) * 0.5, ((hi - lo) * 0.5) * float(KEY_SHRINK)
        lo, hi = center - half, center + half
    top = 2**bits - 1
    s = ((hi - lo) / top).clamp(min=float(SMALLEST_STEP))
    codes = ((b - lo) / s).round().clamp(0, top)
    if bits == 2:
        q = codes * s
        q = q + lo
        bq = tree_sum(b * q).unsqueeze(-1)
        gain = tree_sum(b * b).unsqueeze(-1) / bq
        gain = torch.where((bq > 0) & (gain >= 0.5) & (gain <= 2), gain, 1.0)
        s, lo = s * gain, lo * gain
    return Quantized(
        mean_square=mean_square,
        codes=codes.nan_to_num(0.0).to(torch.uint8),
        scale=_half(row * s).squeeze(-1),
        zero=_half(row * lo).squeeze(-1),
        other=_half(col * g[..., None, None]).squeeze(-2),
    )


def _live_rms(b: Tensor) -> Tensor:
    r = sqrt(tree_sum(b * b) / b.shape[-1])
    return torch.where(r <= float(DEAD_RMS), 1.0, r)


def _half(x: Tensor) -> Tensor:
    half = x.to(torch.float16)
    return torch.where(half == 0, 0.0, half)


def read_back(codes: Tensor, scale: Tensor, zero: Tensor, other: Tensor) -> Tensor:
    """`(code * scale[row] + zero[row]) * other[col]` of oriented tiles `[..., R, C]`: three float32 roundings."""
    x = codes.float() * scale.float()[..., None]
    x = x + zero.float()[..., None]
    return x * other.float()[..., None, :]


def seal(keys: Tensor, values: Tensor, fmt: TileFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize tiles, each by itself.

    keys (after RoPE) and values: float32 `[..., G, D]`. Returns tiles `uint8 [..., tile_nbytes]`, flags `uint8 [...]`
    and status words `uint8 [...]` (kvarn.format.SealStatus); the bytes of a tile whose status is not OK mean nothing.
    """
    candidates = torch.stack([rotate(keys), keys]).transpose(-1, -2).contiguous()
    k = quantize(candidates, fmt.key_bits, values=False)
    e = read_back(k.codes, k.scale, k.zero, k.other) - candidates
    error = tree_sum((e * e).flatten(-2))
    usable = k.finite & error.isfinite()
    dead = (k.mean_square < float(DEAD_MEAN_SQUARE)).any(0)
    rotated = usable[0] & (dead | ~usable[1] | (error[0] <= error[1]))
    v = quantize(rotate(values).contiguous(), fmt.value_bits, values=True)

    def kept(x: Tensor) -> Tensor:
        return torch.where(rotated.reshape(rotated.shape + (1,) * (x.ndim - 1 - rotated.ndim)), x[0], x[1])

    parts = [pack_codes(kept(k.codes), fmt.key_bits), kept(k.scale), kept(k.zero), kept(k.other)]
    parts += [pack_codes(v.codes, fmt.value_bits), v.scale, v.zero, v.other]
    lead = keys.dim() - 2
    tiles = torch.cat([x.contiguous().flatten(lead).view(torch.uint8) for x in parts], dim=-1)
    flags = rotated.to(torch.uint8) * FLAG_KEYS_ROTATED
    finite = (keys.isfinite() & values.isfinite()).flatten(-2).all(-1)
    status = torch.full_like(flags, SealStatus.OK)
    status = torch.where(v.finite, status, SealStatus.VALUES_OVERFLOW.value)
    status = torch.where(usable.any(0), status, SealStatus.KEYS_OVERFLOW.value)
    return tiles, flags, torch.where(finite, status, SealStatus.NON_FINITE.value)


def _field(tiles: Tensor, name: str, fmt: TileFormat) -> Tensor:
    """One field of tiles `uint8 [..., tile_nbytes]`: codes unpacked to `uint8 [..., R, C]`, constants as float32."""
    spec = fmt.fields[name]
    raw = tiles[..., spec.offset : spec.offset + spec.nbytes]
    if name.endswith("codes"):
        bits = fmt.key_bits if name == "k_codes" else fmt.value_bits
        return unpack_codes(raw.reshape(*raw.shape[:-1], spec.shape[0], -1), bits)
    return raw.contiguous().view(torch.float16).float()


def unseal(tiles: Tensor, flags: Tensor, fmt: TileFormat) -> tuple[Tensor, Tensor]:
    """Read tiles back: `uint8 [..., tile_nbytes]`, flags `uint8 [...]` -> keys and values, float32 `[..., G, D]`."""
    k = [_field(tiles, name, fmt) for name in ("k_codes", "k_scale", "k_zero", "k_token")]
    keys = read_back(*k).transpose(-1, -2)
    keys = torch.where((flags & FLAG_KEYS_ROTATED).bool()[..., None, None], rotate(keys), keys)
    return keys, rotate(_sealed_values(tiles, fmt))


def _sealed_values(tiles: Tensor, fmt: TileFormat) -> Tensor:
    """The values of tiles in the rotated basis, float32 `[..., G, D]`."""
    v = [_field(tiles, name, fmt) for name in ("v_codes", "v_scale", "v_zero", "v_channel")]
    return read_back(*v)


@dataclass
class _Softmax:
    """A running softmax over key groups: maximum and sum `[Hk, R, N]`, output `[Hk, R, N, D]`, all float32."""

    maximum: Tensor
    total: Tensor
    output: Tensor

    @classmethod
    def empty(cls, query: Tensor) -> "_Softmax":
        rows = query.shape[:-1]
        return cls(query.new_full(rows, -torch.inf), query.new_zeros(rows), torch.zeros_like(query))

    def add(self, first: int, stop: int, scores: Tensor, values: Tensor) -> None:
        """Take in keys with scores `[Hk, R, n, T]` and values `[Hk, T, D]` for the queries `first` to `stop`."""
        old = self.maximum[..., first:stop]
        new = torch.maximum(old, scores.amax(-1))
        p = (scores - new[..., None]).exp_()
        shrink = (old - new).exp_()
        hk, r, n, t = p.shape
        weighted = (p.reshape(hk, r * n, t) @ values).reshape(hk, r, n, -1)
        self.total[..., first:stop] = self.total[..., first:stop] * shrink + p.sum(-1)
        self.output[..., first:stop, :] = self.output[..., first:stop, :] * shrink[..., None] + weighted
        self.maximum[..., first:stop] = new


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
    """Attention of one sequence in one sealed layer under the visibility rule, decode (N = 1) and prefill alike.

    query `[N, H, D]` at positions start ... start+N-1; sink `[2, Hk, G, D]`, keys and values of tile 0, read by queries
    beyond it; window `[2, Hk, W, D]`, exact keys and values from the first token of tile start//G to the last query;
    tiles `uint8 [M, Hk, tile_nbytes]` and flags `uint8 [M, Hk]`, this layer's pool; blocks `int64 [B]`, where tiles
    1, 2, ... stand in it, as far as the last query reads. Returns float32 `[N, H, D]`.

    Sealed tiles are read a group at a time and never turned into a whole cache. Keys are not unsealed: the query is
    rotated once and takes on a tile's scales (docs/format.md, Reading without materializing).
    """
    n, h, d = query.shape
    hk, g = window.shape[1], fmt.tile_tokens
    stop = start + n
    plain = query.float().reshape(n, hk, h // hk, d).permute(1, 2, 0, 3) * scale  # [Hk, R, N, D]
    exact = _Softmax.empty(plain)
    base = start // g * g  # position of the window's first token
    for piece in pieces(start, stop, g):
        first, last = piece.start - start, piece.stop - start
        rows = plain[..., first:last, :]
        if piece.tile > 0:
            exact.add(first, last, _scores(rows, sink[0]), sink[1].float())
        own = window[:, :, piece.tile * g - base : piece.stop - base]
        scores = _scores(rows, own[0])
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores.masked_fill_(hidden.triu(piece.start - piece.tile * g + 1), -torch.inf)
        exact.add(first, last, scores, own[1].float())
    if not len(blocks):
        return _rows(exact.output / exact.total[..., None])

    sealed = _Softmax.empty(plain)
    bases = torch.stack([plain, rotate(plain)])  # [2, Hk, R, N, D]
    before = max(start // g - 1, 0)  # sealed tiles that every query of this span reads
    groups = [(i, min(i + TILES_PER_GROUP, before), 0) for i in range(0, before, TILES_PER_GROUP)]
    # A tile that this span itself completes is read only by the queries after it.
    groups += [(i, i + 1, max((i + 2) * g - start, 0)) for i in range(before, len(blocks))]
    for low, high, first in groups:
        group = tiles[blocks[low:high]].transpose(0, 1)  # [Hk, B, nbytes]
        flag = flags[blocks[low:high]].T.long() & FLAG_KEYS_ROTATED  # [Hk, B]
        rows = bases[flag, torch.arange(hk, device=flag.device)[:, None], :, first:]  # [Hk, B, R, n, D]
        rows = rows.flatten(2, 3)
        scores = _folded_scores(rows, group, fmt).transpose(1, 2).flatten(2)  # [Hk, R*n, B*G]
        values = _sealed_values(group, fmt).flatten(1, 2)  # [Hk, B*G, D]
        sealed.add(first, n, scores.reshape(hk, h // hk, n - first, -1), values)

    maximum = torch.maximum(exact.maximum, sealed.maximum)
    e, s = (exact.maximum - maximum).exp(), (sealed.maximum - maximum).exp()
    output = exact.output * e[..., None] + rotate(sealed.output) * s[..., None]
    return _rows(output / (exact.total * e + sealed.total * s)[..., None])


def _scores(rows: Tensor, keys: Tensor) -> Tensor:
    """Scaled queries `[Hk, R, n, D]` against keys `[Hk, T, D]`: float32 `[Hk, R, n, T]`."""
    hk, r, n, d = rows.shape
    return (rows.reshape(hk, r * n, d) @ keys.float().transpose(-1, -2)).reshape(hk, r, n, -1)


def _rows(output: Tensor) -> Tensor:
    """`[Hk, R, N, D]` -> `[N, H, D]`."""
    return output.permute(2, 0, 1, 3).flatten(1, 2)


@dataclass(frozen=True)
class Pages:
    """What the rows of a decode step read in an exact pool, flat: row `int64 [P]`, page id, valid tokens of it."""

    row: Tensor
    index: Tensor
    valid: Tensor


@dataclass(frozen=True)
class Tiles:
    """What the rows of a decode step read in a sealed pool, flat: row `int64 [P]` and block id."""

    row: Tensor
    index: Tensor


@dataclass(frozen=True)
class _Partial:
    """Attention of rows to parts of what they read: maximum and sum `[P, Hk, R]`, output `[P, Hk, R, D]`, float32."""

    row: Tensor
    maximum: Tensor
    total: Tensor
    output: Tensor

    @classmethod
    def of(cls, row: Tensor, scores: Tensor, values: Tensor) -> "_Partial":
        """From scores `[P, Hk, R, T]` and values `[P, Hk, T, D]`."""
        maximum = scores.amax(-1)
        p = (scores - maximum[..., None]).exp_()
        return cls(row, maximum, p.sum(-1), p @ values)


def decode(
    query: Tensor,
    pool: Tensor,
    pages: Pages,
    tiles: Tensor | None,
    flags: Tensor | None,
    blocks: Tiles,
    scale: float,
    fmt: TileFormat | None,
) -> Tensor:
    """Attention of many sequences in one layer, one query each; `attend` for N = 1, without padding.

    query `[B, H, D]`; pool `[S, 2, Hk, G, D]`, this layer's exact pages, and `pages`, the ones that each row reads
    (sink and own tile, or all of them under `exact`); tiles `uint8 [M, Hk, tile_nbytes]`, flags `uint8 [M, Hk]` and
    `blocks`, the sealed tiles that each row reads. Every page and tile gives a partial result; a row's are combined
    by their log-sum-exp. Returns float32 `[B, H, D]`.
    """
    b, h, d = query.shape
    hk, g = pool.shape[2:4]
    plain = query.float().reshape(b, hk, h // hk, d) * scale
    step = max(DECODE_SCRATCH // (hk * g * d), 1)
    exact, sealed = [], []
    for part in range(0, len(pages.row), step):
        row, index, valid = (x[part : part + step] for x in (pages.row, pages.index, pages.valid))
        keys, values = pool[index].float().unbind(1)  # [P, Hk, G, D] each, copies
        scores = plain[row] @ keys.transpose(-1, -2)
        # What was never written may hold anything, and 0 * NaN is NaN.
        hidden = torch.arange(g, device=query.device) >= valid[:, None]
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
        exact.append(_Partial.of(row, scores, values.masked_fill_(hidden[:, None, :, None], 0.0)))
    if len(blocks.row):
        assert tiles is not None
        assert flags is not None
        assert fmt is not None
        bases = torch.stack([plain, rotate(plain)])  # [2, B, Hk, R, D]
        heads = torch.arange(hk, device=query.device)
        for part in range(0, len(blocks.row), step):
            row, index = blocks.row[part : part + step], blocks.index[part : part + step]
            group, flag = tiles[index], flags[index].long() & FLAG_KEYS_ROTATED
            scores = _folded_scores(bases[flag, row[:, None], heads], group, fmt)
            sealed.append(_Partial.of(row, scores, _sealed_values(group, fmt)))
    return _combine(plain, exact, sealed).flatten(1, 2)


def _folded_scores(rows: Tensor, group: Tensor, fmt: TileFormat) -> Tensor:
    """Scores of queries `[..., n, D]`, in the basis of each tile's keys, against tiles `uint8 [..., tile_nbytes]`.

    Keys are not unsealed: the query takes on a tile's scales (docs/format.md, Reading without materializing).
    """
    k_codes, k_scale, k_zero, k_token = (
        _field(group, name, fmt) for name in ("k_codes", "k_scale", "k_zero", "k_token")
    )
    dots = (rows * k_scale[..., None, :]) @ k_codes.float() + rows @ k_zero[..., None]
    scores: Tensor = dots * k_token[..., None, :]
    return scores


def _combine(query: Tensor, exact: list[_Partial], sealed: list[_Partial]) -> Tensor:
    """Merge partial results by row: `[B, Hk, R, D]`; what sealed tiles gave is rotated back, once."""
    rows = query.shape[:-1]
    maximum = query.new_full(rows, -torch.inf)
    for part in (*exact, *sealed):
        at = part.row[:, None, None].expand_as(part.maximum)
        maximum.scatter_reduce_(0, at, part.maximum, "amax")
    total = query.new_zeros(rows)
    outputs = []
    for parts in (exact, sealed):
        output = torch.zeros_like(query)
        for part in parts:
            weight = (part.maximum - maximum[part.row]).exp_()
            total.index_add_(0, part.row, part.total * weight)
            output.index_add_(0, part.row, part.output * weight[..., None])
        outputs.append(output)
    merged = outputs[0] + rotate(outputs[1]) if sealed else outputs[0]
    return merged / total[..., None]


def attend_exact(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence in an exact layer, in the model's dtype.

    query `[N, H, D]` at positions start ... start+N-1; keys, values `[T, Hk, D]` of positions 0 ... start+N-1. window:
    how many tokens a query reads, its own included; softcap: c * tanh(score / c); sinks `[H]`: a learned logit per
    head that takes part in the softmax and carries no value. Returns `[N, H, D]`.
    """
    n, length = len(query), len(keys)
    position = torch.arange(start, start + n, device=query.device)[:, None]
    other = torch.arange(length, device=query.device)
    visible = other <= position
    if window is not None:
        visible &= other > position - window
    q, k, v = (x.transpose(0, 1) for x in (query, keys, values))  # [heads, tokens, D]
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=q.shape[0] != k.shape[0]
        )
        return out[0].transpose(0, 1)
    repeat = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(repeat, 0) for x in (k, v))
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, n, 1)], dim=-1)
    p = scores.softmax(-1)[..., :length]
    return (p @ v.float()).transpose(0, 1).to(query.dtype)
