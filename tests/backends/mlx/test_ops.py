"""The plain MLX operations against the oracle, kvarn.reference: sealing by the byte, attention within TOLERANCE."""

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx.core import array
from numpy.typing import NDArray

from kvarn import reference, tile
from kvarn.backends.mlx import ops
from kvarn.backends.triton import ops as torch_ops
from kvarn.errors import SealError
from kvarn.format import BIT_WIDTHS, HEAD_DIMS, TILE_TOKENS, SealStatus, TileFormat
from kvarn.visibility import num_sealed

TOLERANCE = 1e-5  # of the largest output, float32 arithmetic against the oracle's float64
ROOT = Path(__file__).resolve().parents[3]
Floats = NDArray[np.float32]

LENGTHS = (1, 127, 128, 129, 255, 256, 257, 385)
PAIRS = ((4, 2), (2, 2), (3, 5), (5, 6), (6, 3), (8, 8))
AWKWARD = (
    *("random", "zero keys", "zero values", "constant", "dead row", "dead column", "large bias in a channel"),
    *("scaled by 40", "scaled by 2^-60", "keys overflow", "values overflow", "NaN", "infinity", "minus infinity"),
    *("negative zeros", "one channel x1000", "one token x1000", "subnormal"),
)


def make(d: int, g: int = 128, key_bits: int = 4, value_bits: int = 2) -> TileFormat:
    return TileFormat(key_bits=key_bits, value_bits=value_bits, tile_tokens=g, head_dim=d)


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


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


def oracle_seal(keys: Floats, values: Floats, fmt: TileFormat) -> tuple[tile.Bytes, int, SealStatus]:
    """The oracle's bytes, flags and status of one tile; zero bytes where it refuses."""
    try:
        return *reference.seal(keys, values, fmt), SealStatus.OK
    except SealError as error:
        status = next(s for s in SealStatus if s.reason == error.reason)
        return np.zeros(fmt.tile_nbytes, np.uint8), 0, status


def assert_sealed_alike(keys: Floats, values: Floats, fmt: TileFormat) -> None:
    """Tiles `[B, G, D]` sealed in one batch have the oracle's bytes, flags, status words and read-back."""
    sealed = ops.seal(mx.array(keys), mx.array(values), fmt)
    back = [np.array(x) for x in ops.unseal(*sealed[:2], fmt)]
    assert {x.dtype for x in sealed} == {mx.uint8}
    tiles, flags, status = (np.array(x) for x in sealed)
    assert tiles.shape == (len(keys), fmt.tile_nbytes)
    for b in range(len(keys)):
        want, flag, word = oracle_seal(keys[b], values[b], fmt)
        assert status[b] == word, f"tile {b}: {SealStatus(int(status[b])).name}, the oracle says {word.name}"
        if word == SealStatus.OK:
            np.testing.assert_array_equal(tiles[b], want, err_msg=f"tile {b} of {fmt.name}, D={fmt.head_dim}")
            assert flags[b] == flag
            for x, y in zip(back, reference.unseal(want, flag, fmt), strict=True):
                np.testing.assert_array_equal(x[b].view(np.uint32), y.view(np.uint32))


# --- bit streams


@pytest.mark.parametrize("bits", BIT_WIDTHS)
def test_bit_streams_are_those_of_the_tile_format(bits: int) -> None:
    rng = np.random.default_rng(bits)
    for length in (32, 64, 96, 128, 512):
        codes = rng.integers(0, 2**bits, (2, 3, length), np.uint8)
        got = ops.pack_codes(mx.array(codes), bits)
        np.testing.assert_array_equal(np.array(got), tile.pack_codes(codes, bits).view(np.uint8))
        np.testing.assert_array_equal(np.array(ops.unpack_codes(got, bits)), codes)


@pytest.mark.parametrize("bits", BIT_WIDTHS)
def test_any_bytes_unpack_as_the_tile_format_says(bits: int) -> None:
    stream = np.random.default_rng(bits).integers(0, 256, (5, 16 * bits), np.uint8)
    want = tile.unpack_codes(stream.view("<u4"), bits)
    np.testing.assert_array_equal(np.array(ops.unpack_codes(mx.array(stream), bits)), want)


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_rotation_is_the_oracles_by_the_bit(d: int) -> None:
    x = normal(d, 3, 5, d) * np.float32(10.0) ** np.arange(-2, 3, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(np.array(ops.rotate(mx.array(x))), reference.rotate(x))


def test_mlx_rounds_every_single_operation_as_numpy_does() -> None:
    """What byte-equal sealing rests on: square root, division, half-to-even and the casts to float16."""
    a = np.concatenate([np.random.default_rng(0).random(100_000, np.float32), [2**-126, 3e38]]).astype(np.float32)
    b = a[::-1].copy()
    x, y = mx.array(a), mx.array(b)
    halves = np.arange(-300, 300, dtype=np.float32) / 2
    with np.errstate(over="ignore"):
        pairs: list[tuple[array, Any]] = [
            (mx.sqrt(x), np.sqrt(a)),
            (x / y, a / b),
            (x * y + x, a * b + a),
            (mx.round(mx.array(halves)), np.rint(halves)),
            ((x * 1e-4).astype(mx.float16), (a * np.float32(1e-4)).astype(np.float16)),
            ((x * 1e5).astype(mx.float16), (a * np.float32(1e5)).astype(np.float16)),
        ]
    for i, (got, want) in enumerate(pairs):
        np.testing.assert_array_equal(np.array(got), want, err_msg=str(i))


# --- seal and unseal


@pytest.mark.parametrize(("key_bits", "value_bits"), list(product(BIT_WIDTHS, BIT_WIDTHS)))
def test_every_pair_of_widths_seals_to_the_oracles_bytes(key_bits: int, value_bits: int) -> None:
    fmt = make(64, 64, key_bits, value_bits)
    keys, values = normal(key_bits * 10 + value_bits, 2, 3, 64, 64)
    keys[1, :, 3] += 50  # large key biases keep the plain candidate
    assert_sealed_alike(keys, values, fmt)


@pytest.mark.parametrize("g", TILE_TOKENS)
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize(("key_bits", "value_bits"), PAIRS)
def test_every_shape_seals_to_the_oracles_bytes(key_bits: int, value_bits: int, d: int, g: int) -> None:
    keys, values = normal(d + g + key_bits, 2, 2, g, d)
    keys[1, :, d // 3] += 80
    assert_sealed_alike(keys, values, make(d, g, key_bits, value_bits))


@pytest.mark.parametrize("fmt", [make(64, 64), make(128, 128), make(64, 128, 2, 2), make(128, 64, 3, 5)], ids=str)
def test_an_awkward_tile_seals_as_the_oracle_says(fmt: TileFormat) -> None:
    pairs = [awkward_tile(name, fmt, seed) for seed, name in enumerate(AWKWARD)]
    assert_sealed_alike(np.stack([k for k, _ in pairs]), np.stack([v for _, v in pairs]), fmt)


def test_the_awkward_tiles_reach_every_status_and_both_flags() -> None:
    fmt = make(64, 64)
    sealed = [oracle_seal(*awkward_tile(name, fmt, seed), fmt) for seed, name in enumerate(AWKWARD)]
    assert {status for _, _, status in sealed} == set(SealStatus)
    assert {flag for _, flag, status in sealed if status == SealStatus.OK} == {0, 1}


@pytest.mark.parametrize("fmt", [make(64, 128), make(128, 64, 2, 2)], ids=str)
def test_a_tile_in_a_batch_has_the_bytes_that_it_has_alone(fmt: TileFormat) -> None:
    pairs = [awkward_tile(name, fmt, seed) for seed, name in enumerate(AWKWARD)]
    pairs += [
        (k * np.float32(40), v * np.float32(40)) for k, v in (normal(90 + i, 2, *pairs[0][0].shape) for i in range(6))
    ]
    keys, values = (mx.array(np.stack(x)) for x in zip(*pairs, strict=True))
    batch = ops.seal(keys, values, fmt)
    for b in range(len(keys)):
        for x, y in zip(batch, ops.seal(keys[b], values[b], fmt), strict=True):
            np.testing.assert_array_equal(np.array(x[b]), np.array(y), err_msg=f"tile {b}")


def test_leading_axes_and_strides_do_not_change_bytes() -> None:
    fmt = make(64, 64)
    keys, values = (mx.array(x) for x in normal(5, 2, 6, 64, 64))
    want = ops.seal(keys, values, fmt)
    shaped = ops.seal(keys.reshape(2, 3, 64, 64), values.reshape(2, 3, 64, 64), fmt)
    strided = ops.seal(mx.contiguous(keys.swapaxes(1, 2)).swapaxes(1, 2), values[::-1][::-1], fmt)
    for x, y, z in zip(want, shaped, strided, strict=True):
        np.testing.assert_array_equal(np.array(x), np.array(y.flatten(0, 1)))
        np.testing.assert_array_equal(np.array(x), np.array(z))
    for x, y in zip(ops.unseal(*want[:2], fmt), ops.unseal(*shaped[:2], fmt), strict=True):
        np.testing.assert_array_equal(np.array(x), np.array(y.flatten(0, 1)))


# --- one hash for all backends


def load_tool(name: str) -> ModuleType:
    """A module of tools/, which is not a package; registered, so that its neighbours can import it."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


Seal = Callable[[Floats, Floats, TileFormat], tuple[NDArray[np.uint8], int, int]]


def torch_seal(keys: Floats, values: Floats, fmt: TileFormat) -> tuple[NDArray[np.uint8], int, int]:
    tiles, flags, status = torch_ops.seal(torch.from_numpy(keys), torch.from_numpy(values), fmt)
    return tiles.numpy(), int(flags), int(status)


def mlx_seal(keys: Floats, values: Floats, fmt: TileFormat) -> tuple[NDArray[np.uint8], int, int]:
    tiles, flags, status = ops.seal(mx.array(keys), mx.array(values), fmt)
    return np.array(tiles), int(flags.item()), int(status.item())


def golden_hash(seal: Seal) -> str:
    """One sha256 over status, flags and tile of every golden vector; a refused tile counts by its status alone."""
    load_tool("golden_mutants")
    digest = hashlib.sha256()
    for vector in load_tool("make_golden").VECTORS:
        fmt = vector.fmt
        tiles, flags, status = seal(vector.keys.array(fmt), vector.values.array(fmt), fmt)
        digest.update(bytes([status]) + (bytes([flags]) + tiles.tobytes() if status == SealStatus.OK else b""))
    return digest.hexdigest()


def test_numpy_torch_and_mlx_seal_the_whole_golden_set_to_one_hash() -> None:
    want = golden_hash(oracle_seal)
    assert golden_hash(torch_seal) == want
    assert golden_hash(mlx_seal) == want


# --- attention over sealed tiles


@dataclass
class Sequence:
    """Keys and values of one sequence, `[T, Hk, D]` in float32, with its tiles scattered over a pool of garbage."""

    fmt: TileFormat
    keys: Floats
    values: Floats
    tiles: tile.Bytes  # [B, Hk, nbytes]: tiles 1, 2, ...
    flags: tile.Bytes
    pool_tiles: array
    pool_flags: array
    blocks: array


def sequence(length: int, fmt: TileFormat, hk: int, seed: int, dtype: mx.Dtype = mx.float32) -> Sequence:
    both = normal(seed, 2, length, hk, fmt.head_dim)
    both[0, :, 0, 1] += 9  # so that one head keeps its keys unrotated
    keys, values = np.array(mx.array(both).astype(dtype).astype(mx.float32))
    return seal_sequence(keys, values, fmt, seed)


def seal_sequence(keys: Floats, values: Floats, fmt: TileFormat, seed: int) -> Sequence:
    g, hk = fmt.tile_tokens, keys.shape[1]
    count = max(len(keys) // g - 1, 0)
    tiles, flags = np.zeros((count, hk, fmt.tile_nbytes), np.uint8), np.zeros((count, hk), np.uint8)
    for b, j in product(range(count), range(hk)):
        part = slice((b + 1) * g, (b + 2) * g)
        tiles[b, j], flags[b, j] = reference.seal(
            np.ascontiguousarray(keys[part, j]), np.ascontiguousarray(values[part, j]), fmt
        )
    blocks = np.random.default_rng(seed).permutation(2 * count + 5)[:count]
    pool_tiles = np.full((2 * count + 5, hk, fmt.tile_nbytes), 0xFF, np.uint8)  # float16 0xFFFF is a NaN
    pool_flags = np.full((2 * count + 5, hk), 0xFF, np.uint8)
    pool_tiles[blocks], pool_flags[blocks] = tiles, flags
    pool = (mx.array(x) for x in (pool_tiles, pool_flags, blocks.astype(np.int32)))
    return Sequence(fmt, keys, values, tiles, flags, *pool)


def attend(query: Floats, seq: Sequence, start: int, scale: float, dtype: mx.Dtype = mx.float32) -> Floats:
    """ops.attend with NaN wherever the queries from `start` must not look."""
    g, (_, hk, d), stop = seq.fmt.tile_tokens, seq.keys.shape, start + len(query)
    both = np.stack([seq.keys, seq.values]).swapaxes(1, 2)  # [2, Hk, T, D]
    sink = both[:, :, :g] if stop > g else np.full((2, hk, g, d), np.nan, np.float32)
    base = start // g * g
    q, s, window = (mx.array(x).astype(dtype) for x in (query, sink, both[:, :, base:stop]))
    blocks = seq.blocks[: num_sealed(stop - 1, g)]
    out = ops.attend(q, s, window, seq.pool_tiles, seq.pool_flags, blocks, start, scale, seq.fmt)
    assert out.dtype == mx.float32
    return np.array(out)


def assert_attends(query: Floats, seq: Sequence, start: int, dtype: mx.Dtype = mx.float32) -> None:
    scale = seq.fmt.head_dim**-0.5
    stop = start + len(query)
    reads = num_sealed(stop - 1, seq.fmt.tile_tokens)
    want = reference.attend(
        query, seq.keys[:stop], seq.values[:stop], seq.tiles[:reads], seq.flags[:reads], start, scale, seq.fmt
    )
    got = attend(query, seq, start, scale, dtype)
    assert np.isfinite(got).all(), "garbage was read"
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error < TOLERANCE, f"start {start}, {len(query)} queries: {error:.2g}"


@pytest.mark.parametrize("g", TILE_TOKENS)
@pytest.mark.parametrize("length", LENGTHS)
def test_attention_is_the_oracles_at_every_length(length: int, g: int) -> None:
    """Decode at the end, prefill of everything, and chunks that begin in the middle of a tile and at its edges."""
    seq = sequence(length, make(64, g), 2, seed=length)
    query = normal(length + 1, length, 4, 64)
    for start in sorted({0, length - 1, length // 2, length // g * g, length - length % 100}):
        if start < length:
            assert_attends(query[start:], seq, start)


@pytest.mark.parametrize("ratio", [1, 3, 5, 6, 7, 8])
def test_attention_is_the_oracles_at_every_ratio_of_heads(ratio: int) -> None:
    seq = sequence(4 * 64 + 9, make(64, 64, 5, 3), 2, seed=ratio)
    query = normal(ratio, 4 * 64 + 9, 2 * ratio, 64)
    for start in (4 * 64 + 8, 150):
        assert_attends(query[start:], seq, start)


@pytest.mark.parametrize(("d", "g"), [(128, 64), (128, 128), (256, 128), (512, 64)])
@pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 2), (8, 6)])
def test_attention_is_the_oracles_at_every_head_dim(d: int, g: int, key_bits: int, value_bits: int) -> None:
    seq = sequence(4 * g + 1, make(d, g, key_bits, value_bits), 2, seed=d)
    query = normal(d, 4 * g + 1, 6, d)
    for start in (4 * g, 4 * g - 10, 2 * g + 50):
        assert_attends(query[start : start + 20], seq, start)


@pytest.mark.parametrize(("key_bits", "value_bits"), PAIRS)
def test_attention_reads_every_width(key_bits: int, value_bits: int) -> None:
    seq = sequence(3 * 64 + 5, make(64, 64, key_bits, value_bits), 2, seed=key_bits)
    assert_attends(normal(1, 7, 4, 64), seq, 3 * 64 - 2)


@pytest.mark.parametrize("start", [0, 200, 384])
def test_bfloat16_queries_and_keys_lose_nothing_more(start: int) -> None:
    """The inputs are rounded to bfloat16; the arithmetic on them is float32, so the tolerance stays."""
    seq = sequence(385, make(64), 2, seed=7, dtype=mx.bfloat16)
    query = np.array(mx.array(normal(8, 385, 6, 64)).astype(mx.bfloat16).astype(mx.float32))
    assert_attends(query[start:], seq, start, mx.bfloat16)


@pytest.mark.parametrize("sealed", [15, 16, 17, 33])
def test_groups_of_sealed_tiles_meet_without_a_seam(sealed: int) -> None:
    assert ops.TILES_PER_GROUP == 16
    length = (sealed + 1) * 64 + 3
    seq = sequence(length, make(64, 64), 1, seed=sealed)
    query = normal(sealed, length, 2, 64)
    for start in (length - 1, length - 100, 64 * 3 + 1):
        assert_attends(query[start : start + 100], seq, start)


@pytest.mark.parametrize("changed", [0, 63, 64, 127, 128, 200])
def test_a_token_never_moves_an_output_before_it(changed: int) -> None:
    fmt, length = make(64, 64), 3 * 64 + 20
    seq = sequence(length, fmt, 2, seed=11)
    query = normal(12, length, 4, 64)
    keys, values, other_query = seq.keys.copy(), seq.values.copy(), query.copy()
    keys[changed], values[changed], other_query[changed] = 7, -300, 5
    other = seal_sequence(keys, values, fmt, seed=13)
    for start in (0, 60, 100):
        before, after = (attend(q[start:], s, start, 0.125) for q, s in ((query, seq), (other_query, other)))
        np.testing.assert_array_equal(before[: max(changed - start, 0)], after[: max(changed - start, 0)])
        if changed >= start:
            assert (before[changed - start] != after[changed - start]).any()


@pytest.mark.parametrize("start", [0, 64, 100])
def test_a_query_gives_the_same_alone_and_in_a_chunk(start: int) -> None:
    seq = sequence(3 * 64 + 20, make(64, 64), 2, seed=21)
    query = normal(22, 3 * 64 + 20, 4, 64)
    together = attend(query[start:], seq, start, 0.125)
    for i in range(start, len(query), 29):
        alone = attend(query[i : i + 1], seq, i, 0.125)
        assert np.abs(alone[0] - together[i - start]).max() < TOLERANCE * np.abs(together).max()


# --- exact attention


def brute_force(
    query: Floats, keys: Floats, values: Floats, start: int, scale: float, window: int | None
) -> NDArray[np.float64]:
    n, h, d = query.shape
    out = np.zeros((n, h, d))
    for i, head in product(range(n), range(h)):
        p = start + i
        first = 0 if window is None else max(p - window + 1, 0)
        j = head * keys.shape[1] // h
        score = keys[first : p + 1, j].astype(np.float64) @ query[i, head].astype(np.float64) * scale
        weights = np.exp(score - score.max())
        out[i, head] = (weights / weights.sum()) @ values[first : p + 1, j].astype(np.float64)
    return out


@pytest.mark.parametrize("heads", [2, 6, 14])
@pytest.mark.parametrize("window", [None, 1, 7, 50, 1000])
@pytest.mark.parametrize(("start", "n"), [(0, 1), (0, 130), (129, 1), (100, 30)])
def test_exact_attention_honours_the_window(start: int, n: int, window: int | None, heads: int) -> None:
    keys, values = normal(start + n, 2, start + n, 2, 64)
    query = normal(1, n, heads, 64)
    want = brute_force(query, keys, values, start, 0.2, window)
    q, k, v = (mx.array(x) for x in (query, keys, values))
    got = ops.attend_exact(q, k, v, start, 0.2, window=window)
    assert got.dtype == mx.float32
    assert np.abs(np.array(got) - want).max() < TOLERANCE * np.abs(want).max()
    q, k, v = (x.astype(mx.bfloat16) for x in (q, k, v))
    half = ops.attend_exact(q, k, v, start, 0.2, window=window)
    assert half.dtype == mx.bfloat16
    # Inputs, scores and output in bfloat16.
    assert np.abs(np.array(half.astype(mx.float32)) - want).max() < 0.05 * np.abs(want).max()


def test_exact_attention_agrees_with_sealed_attention_inside_tile_zero() -> None:
    seq = sequence(100, make(64), 2, seed=31)
    query = normal(32, 100, 4, 64)
    exact = np.array(ops.attend_exact(*(mx.array(x) for x in (query, seq.keys, seq.values)), 0, 0.125))
    assert np.abs(exact - attend(query, seq, 0, 0.125)).max() < TOLERANCE * np.abs(exact).max()
