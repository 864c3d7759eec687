"""Tiles and sequences that the kernel tests share, and the oracle's answers."""

from dataclasses import dataclass
from itertools import product

import mlx.core as mx
import numpy as np
from mlx.core import array
from numpy.typing import NDArray

from kvarn import reference
from kvarn.backends.mlx.kernels import kernels
from kvarn.errors import SealError
from kvarn.format import SealStatus, TileFormat
from kvarn.visibility import num_sealed

PRESETS = ((4, 2), (4, 4), (3, 5), (8, 8))
TOLERANCE = 2e-5  # of the largest output: sums in float32, in an order of its own
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def make(d: int, g: int = 64, bits: tuple[int, int] = (4, 2)) -> TileFormat:
    return TileFormat(key_bits=bits[0], value_bits=bits[1], tile_tokens=g, head_dim=d)


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def oracle_seal(keys: Floats, values: Floats, fmt: TileFormat) -> tuple[Bytes, int, SealStatus]:
    """The oracle's bytes, flags and status of one tile; zero bytes where it refuses."""
    try:
        return *reference.seal(keys, values, fmt), SealStatus.OK
    except SealError as error:
        status = next(s for s in SealStatus if s.reason == error.reason)
        return np.zeros(fmt.tile_nbytes, np.uint8), 0, status


def assert_sealed_alike(keys: Floats, values: Floats, fmt: TileFormat) -> list[tuple[int, int]]:
    """Tiles `[T, G, D]` have the oracle's bytes, flags and status words; returns (flags, status) of each."""
    tiles, flags, status = (np.array(x) for x in kernels.seal(mx.array(keys), mx.array(values), fmt))
    assert tiles.shape == (len(keys), fmt.tile_nbytes)
    for t in range(len(keys)):
        want, flag, word = oracle_seal(keys[t], values[t], fmt)
        assert status[t] == word, f"tile {t}: {SealStatus(int(status[t])).name}, the oracle says {word.name}"
        if word == SealStatus.OK:
            np.testing.assert_array_equal(tiles[t], want, err_msg=f"tile {t} of {fmt.name}, D={fmt.head_dim}")
            assert flags[t] == flag, f"tile {t}"
    return list(zip(flags.tolist(), status.tolist(), strict=True))


@dataclass
class Sequence:
    """Keys and values of one sequence, `[T, Hk, D]`, with its tiles scattered over a pool of garbage."""

    fmt: TileFormat
    keys: Floats
    values: Floats
    tiles: Bytes  # [B, Hk, nbytes]: tiles 1, 2, ...
    flags: Bytes
    pool_tiles: array
    pool_flags: array
    blocks: array


def sequence(length: int, fmt: TileFormat, hk: int, seed: int, dtype: mx.Dtype = mx.float32) -> Sequence:
    """A sequence rounded to dtype; the first kv head has large key biases, so that it keeps its keys unrotated."""
    both = normal(seed, 2, length, hk, fmt.head_dim)
    both[0, :, 0] += 30 * normal(seed, fmt.head_dim)
    keys, values = np.array(mx.array(both).astype(dtype).astype(mx.float32))
    return seal_sequence(keys, values, fmt, seed)


def seal_sequence(keys: Floats, values: Floats, fmt: TileFormat, seed: int) -> Sequence:
    g, hk = fmt.tile_tokens, keys.shape[1]
    count = max(len(keys) // g - 1, 0)
    tiles, flags = np.zeros((count, hk, fmt.tile_nbytes), np.uint8), np.zeros((count, hk), np.uint8)
    for b, j in product(range(count), range(hk)):
        part = slice((b + 1) * g, (b + 2) * g)
        k, v = (np.ascontiguousarray(x[part, j]) for x in (keys, values))
        tiles[b, j], flags[b, j] = reference.seal(k, v, fmt)
    blocks = np.random.default_rng(seed).permutation(2 * count + 5)[:count]
    pool_tiles = np.full((2 * count + 5, hk, fmt.tile_nbytes), 0xFF, np.uint8)  # float16 0xFFFF is a NaN
    pool_flags = np.full((2 * count + 5, hk), 0xFF, np.uint8)
    pool_tiles[blocks], pool_flags[blocks] = tiles, flags
    pool = (mx.array(x) for x in (pool_tiles, pool_flags, blocks.astype(np.int32)))
    return Sequence(fmt, keys, values, tiles, flags, *pool)


def attend(query: Floats, seq: Sequence, start: int, scale: float, dtype: mx.Dtype = mx.float32) -> Floats:
    """kernels.attend with a NaN wherever the queries must not look; the window is a view of a page, as in a step."""
    g, (_, hk, d), stop = seq.fmt.tile_tokens, seq.keys.shape, start + len(query)
    base = start // g * g
    page = np.full((2, hk, -(-(stop - base) // g) * g + 3, d), np.nan, np.float32)
    both = np.stack([seq.keys, seq.values]).swapaxes(1, 2)  # [2, Hk, T, D]
    page[:, :, : stop - base] = both[:, :, base:stop]
    sink = both[:, :, :g] if stop > g else np.full((2, hk, g, d), np.nan, np.float32)
    q, s, window = (mx.array(x).astype(dtype) for x in (query, sink, page))
    mx.eval(window)
    blocks = seq.blocks[: num_sealed(stop - 1, g)]
    pool = (seq.pool_tiles, seq.pool_flags, blocks)
    out = kernels.attend(q, s, window[:, :, : stop - base], *pool, start, scale, seq.fmt)
    assert out.dtype == mx.float32
    return np.array(out)


def assert_attends(query: Floats, seq: Sequence, start: int, dtype: mx.Dtype = mx.float32) -> None:
    """The outputs of queries `[N, H, D]` are the oracle's."""
    scale, stop = seq.fmt.head_dim**-0.5, start + len(query)
    reads = num_sealed(stop - 1, seq.fmt.tile_tokens)
    exact = (seq.keys[:stop], seq.values[:stop])
    want = reference.attend(query, *exact, seq.tiles[:reads], seq.flags[:reads], start, scale, seq.fmt)
    got = attend(query, seq, start, scale, dtype)
    assert np.isfinite(got).all(), "garbage was read"
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error < TOLERANCE, f"start {start}, {len(query)} queries: {error:.2g}"
