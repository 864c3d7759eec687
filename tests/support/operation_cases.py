"""Tiles and sequences on which every backend's operations are compared with the oracle, in NumPy."""

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from kvarn import reference
from kvarn.errors import SealError
from kvarn.format import SealStatus, TileFormat
from kvarn.tile import Bytes
from kvarn.visibility import num_sealed

Floats = NDArray[np.float32]

AWKWARD = (
    *("random", "zero keys", "zero values", "constant", "dead row", "dead column", "large bias in a channel"),
    *("scaled by 40", "scaled by 2^-60", "keys overflow", "values overflow", "NaN", "infinity", "minus infinity"),
    *("negative zeros", "one channel x1000", "one token x1000", "subnormal"),
)


def make(d: int, g: int = 128, key_bits: int = 4, value_bits: int = 2) -> TileFormat:
    return TileFormat(key_bits=key_bits, value_bits=value_bits, tile_tokens=g, head_dim=d)


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rounded(x: Floats, dtype: str) -> Floats:
    """float32 numbers as a dtype by name holds them."""
    if dtype == "float32":
        return x
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    assert dtype == "bfloat16"
    bits = x.view(np.uint32)
    nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return nearest_even.astype(np.uint32).view(np.float32)


def awkward_tile(name: str, fmt: TileFormat, seed: int) -> tuple[Floats, Floats]:
    """One named tile, keys and values `[G, D]`."""
    keys, values = normal(seed, 2, fmt.tile_tokens, fmt.head_dim)
    match name:
        case "zero keys":
            keys[:] = 0
        case "zero values":
            values[:] = 0
        case "constant":
            keys[:], values[:] = 3.25, -0.7
        case "dead row":
            keys[:, 5] = values[7] = 0
        case "dead column":
            keys[9] = values[:, 11] = 0
        case "large bias in a channel":
            keys[:, 3] += 3000
            values[:, 3] += 3000
        case "scaled by 40":
            keys, values = keys * np.float32(40), values * np.float32(40)
        case "scaled by 2^-60":
            keys, values = keys * np.float32(2.0**-60), values * np.float32(2.0**-60)
        case "keys overflow":
            keys *= np.float32(1e6)
        case "values overflow":
            values *= np.float32(1e6)
        case "NaN":
            keys[1, 2] = np.nan
        case "infinity":
            values[3, 4] = np.inf
        case "minus infinity":
            keys[-1, -1] = -np.inf
        case "negative zeros":
            keys[::2], values[::3] = -0.0, -0.0
        case "one channel x1000":
            keys[:, 17] *= 1000
            values[:, 17] *= 1000
        case "one token x1000":
            keys[17] *= 1000
            values[17] *= 1000
        case "subnormal":
            keys, values = keys * np.float32(2.0**-140), values * np.float32(2.0**-140)
    return keys, values


def awkward_tiles(fmt: TileFormat) -> tuple[Floats, Floats]:
    """All of them in one batch, `[T, G, D]` each."""
    pairs = [awkward_tile(name, fmt, seed) for seed, name in enumerate(AWKWARD)]
    return np.stack([k for k, _ in pairs]), np.stack([v for _, v in pairs])


def oracle_seal(keys: Floats, values: Floats, fmt: TileFormat) -> tuple[Bytes, int, SealStatus]:
    """The oracle's bytes, flags and status of one tile; zero bytes where it refuses."""
    try:
        return *reference.seal(keys, values, fmt), SealStatus.OK
    except SealError as error:
        status = next(s for s in SealStatus if s.reason == error.reason)
        return np.zeros(fmt.tile_nbytes, np.uint8), 0, status


def assert_oracles_tiles(
    tiles: Bytes, flags: Bytes, status: Bytes, keys: Floats, values: Floats, fmt: TileFormat
) -> list[tuple[int, int]]:
    """Sealed tiles `[T, nbytes]` are the oracle's for keys and values `[T, G, D]`; returns (flags, status) of each."""
    assert tiles.dtype == flags.dtype == status.dtype == np.uint8
    assert tiles.shape == (len(keys), fmt.tile_nbytes)
    assert flags.shape == status.shape == (len(keys),)
    for t in range(len(keys)):
        want, flag, word = oracle_seal(keys[t], values[t], fmt)
        assert status[t] == word, f"tile {t}: {SealStatus(int(status[t])).name}, the oracle says {word.name}"
        if word == SealStatus.OK:
            np.testing.assert_array_equal(tiles[t], want, err_msg=f"tile {t} of {fmt.name}, D={fmt.head_dim}")
            assert flags[t] == flag, f"tile {t}"
    return list(zip(flags.tolist(), status.tolist(), strict=True))


@dataclass
class Sequence:
    """Keys and values of one sequence, `[T, Hk, D]` in float32, with its tiles scattered over a pool of garbage."""

    fmt: TileFormat
    keys: Floats
    values: Floats
    tiles: Bytes  # [B, Hk, nbytes]: tiles 1, 2, ...
    flags: Bytes
    pool_tiles: Bytes
    pool_flags: Bytes
    blocks: NDArray[np.int32]

    def reads(self, stop: int) -> int:
        """How many of its sealed tiles the queries before `stop` read."""
        return num_sealed(stop - 1, self.fmt.tile_tokens)

    def exact_parts(self, start: int, stop: int, spare: int) -> tuple[Floats, Floats]:
        """The sink and, from the tile of `start` on, a page of the exact tokens before `stop`: `[2, Hk, tokens, D]`.

        Both hold NaN where queries start ... stop-1 must not look; the page ends with `spare` such tokens.
        """
        g, (_, hk, d) = self.fmt.tile_tokens, self.keys.shape
        both = np.stack([self.keys, self.values]).swapaxes(1, 2)
        sink = both[:, :, :g].copy() if stop > g else np.full((2, hk, g, d), np.nan, np.float32)
        base = start // g * g
        page = np.full((2, hk, stop - base + spare, d), np.nan, np.float32)
        page[:, :, : stop - base] = both[:, :, base:stop]
        return sink, page

    def want(self, query: Floats, start: int, scale: float) -> NDArray[np.float64]:
        """The oracle's attention of queries `[N, H, D]` from position `start` on."""
        stop = start + len(query)
        sealed = self.tiles[: self.reads(stop)], self.flags[: self.reads(stop)]
        return reference.attend(query, self.keys[:stop], self.values[:stop], *sealed, start, scale, self.fmt)


def seal_sequence(keys: Floats, values: Floats, fmt: TileFormat, seed: int) -> Sequence:
    """A sequence of given keys and values; the oracle seals it."""
    g, hk = fmt.tile_tokens, keys.shape[1]
    count = max(len(keys) // g - 1, 0)
    tiles, flags = np.zeros((count, hk, fmt.tile_nbytes), np.uint8), np.zeros((count, hk), np.uint8)
    for b, j in product(range(count), range(hk)):
        part = slice((b + 1) * g, (b + 2) * g)
        k, v = (np.ascontiguousarray(x[part, j]) for x in (keys, values))
        tiles[b, j], flags[b, j] = reference.seal(k, v, fmt)
    blocks = np.random.default_rng(seed).permutation(2 * count + 5)
    blocks = np.roll(blocks, -int(np.argmax(blocks)))[:count]  # the first block read is the last of the pool
    pool_tiles = np.full((2 * count + 5, hk, fmt.tile_nbytes), 0xFF, np.uint8)  # float16 0xFFFF is a NaN
    pool_flags = np.full((2 * count + 5, hk), 0xFF, np.uint8)
    pool_tiles[blocks], pool_flags[blocks] = tiles, flags
    return Sequence(fmt, keys, values, tiles, flags, pool_tiles, pool_flags, blocks.astype(np.int32))


def sequence(length: int, fmt: TileFormat, hk: int, seed: int, dtype: str = "float32") -> Sequence:
    """A sequence of random numbers of a dtype, one channel of its first kv head with a bias."""
    both = normal(seed, 2, length, hk, fmt.head_dim)
    both[0, :, 0, 1] += 9
    keys, values = rounded(both, dtype)
    return seal_sequence(keys, values, fmt, seed)


def with_changed_token(seq: Sequence, query: Floats, changed: int, seed: int) -> tuple[Sequence, Floats]:
    """The sequence and its queries with another key, value and query at one position, sealed anew, scattered anew."""
    keys, values, other = seq.keys.copy(), seq.values.copy(), query.copy()
    keys[changed], values[changed], other[changed] = 7, -300, 5
    return seal_sequence(keys, values, seq.fmt, seed), other


def brute_force(
    query: Floats,
    keys: Floats,
    values: Floats,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Floats | None = None,
) -> NDArray[np.float64]:
    """Exact attention of one sequence, query by query and head by head."""
    n, h, d = query.shape
    out = np.zeros((n, h, d))
    for i, head in product(range(n), range(h)):
        p = start + i
        first = 0 if window is None else max(p - window + 1, 0)
        j = head * keys.shape[1] // h
        score = keys[first : p + 1, j].astype(np.float64) @ query[i, head].astype(np.float64) * scale
        if softcap is not None:
            score = softcap * np.tanh(score / softcap)
        extra = [] if sinks is None else [float(sinks[head])]
        weights = np.exp(np.concatenate([score, extra]) - max(score.max(), *extra, score.max()))
        out[i, head] = (weights[: len(score)] / weights.sum()) @ values[first : p + 1, j].astype(np.float64)
    return out
