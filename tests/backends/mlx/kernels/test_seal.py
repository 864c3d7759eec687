"""seal.metal against the oracle: bytes, flags and status words, and one hash for every implementation."""

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from cases import Floats, assert_sealed_alike, make, normal, oracle_seal
from metal_host import MetalHostError
from metal_host.compiler import can_contract
from small_models import Fed, run

from kvarn.backend import LoadOptions
from kvarn.backends.mlx import ops as mlx_ops
from kvarn.backends.mlx.kernels import kernels
from kvarn.backends.mlx.kernels.source import NO_CONTRACTION
from kvarn.backends.triton import backend as torch_backend
from kvarn.backends.triton import ops as torch_ops
from kvarn.format import FLAG_KEYS_ROTATED, HEAD_DIMS, Preset, SealStatus, TileFormat
from kvarn.serve.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[4]
# Every preset with every head_dim, both tile lengths with each of either; formats of the golden set where it has them.
LENGTHS = {
    (4, 2): (64, 128, 128, 64),
    (4, 4): (128, 64, 64, 128),
    (3, 5): (64, 128, 128, 64),
    (8, 8): (128, 128, 64, 64),
}
SHAPES = [(d, g, bits) for bits, lengths in LENGTHS.items() for d, g in zip(HEAD_DIMS, lengths, strict=True)]


def load_tool(name: str) -> ModuleType:
    """A module of tools/, which is not a package; registered, so that its neighbours can import it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def golden() -> dict[TileFormat, list[tuple[Floats, Floats]]]:
    """Keys and values of every golden vector, by format."""
    load_tool("golden_mutants")
    batches: dict[TileFormat, list[tuple[Floats, Floats]]] = {}
    for vector in load_tool("make_golden").VECTORS:
        pair = vector.keys.array(vector.fmt), vector.values.array(vector.fmt)
        batches.setdefault(vector.fmt, []).append(pair)
    return batches


@pytest.mark.parametrize(("d", "g", "bits"), SHAPES)
def test_bytes_flags_and_status_are_the_oracles(d: int, g: int, bits: tuple[int, int]) -> None:
    keys, values = normal(d + g, 2, 1, g, d)
    keys[0, :, 3] *= 50
    assert_sealed_alike(keys, values, make(d, g, bits))


def awkward() -> tuple[Floats, Floats]:
    """Tiles of 64 by 64 with every kind of trouble, `[T, G, D]`."""
    keys, values = normal(9, 2, 17, 64, 64)
    keys[0], values[1] = 0, 0
    keys[2], values[2] = 3.25, -0.7
    keys[3, :, 5] = values[3, 7] = 0
    keys[4, 9] = values[4, :, 11] = 0
    keys[5, :, 3] += 3000
    values[5, :, 3] += 3000
    for x in (keys, values):
        x[6] *= np.float32(40)
        x[7] *= np.float32(2.0**-60)
        x[8] *= np.float32(2.0**-140)
        x[9, ::2] = -0.0
    keys[10] *= np.float32(1e6)
    values[11] *= np.float32(1e6)
    keys[12, 1, 2], values[13, 3, 4], keys[14, -1, -1] = np.nan, np.inf, -np.inf
    keys[15, 17] *= 1000
    keys[16] += 30 * normal(3, 64)
    return keys, values


@pytest.mark.parametrize("bits", [(4, 2), (2, 4)])
def test_awkward_tiles_have_the_oracles_bytes_and_refusals(bits: tuple[int, int]) -> None:
    words = assert_sealed_alike(*awkward(), make(64, 64, bits))
    assert {status for _, status in words} == {int(status) for status in SealStatus}
    assert {flags for flags, status in words if status == SealStatus.OK} == {0, FLAG_KEYS_ROTATED}


def test_leading_axes_and_strides_do_not_change_bytes() -> None:
    fmt = make(64)
    keys, values = (mx.array(x) for x in normal(5, 2, 6, 64, 64))
    want = [np.array(x) for x in kernels.seal(keys, values, fmt)]
    shaped = kernels.seal(keys.reshape(2, 3, 64, 64), values.reshape(2, 3, 64, 64), fmt)
    strided = kernels.seal(mx.contiguous(keys.swapaxes(1, 2)).swapaxes(1, 2), values[::-1][::-1], fmt)
    for x, y, z in zip(want, shaped, strided, strict=True):
        assert y.shape[:2] == (2, 3)
        np.testing.assert_array_equal(x, np.array(y.flatten(0, 1)))
        np.testing.assert_array_equal(x, np.array(z))


# --- contraction


def test_the_source_that_mlx_compiles_forbids_contraction(launches: list[str]) -> None:
    assert_sealed_alike(*normal(1, 2, 1, 64, 64), make(64))
    for text in launches[-3:]:  # two rotations and the seal
        assert text.startswith(NO_CONTRACTION)


@pytest.mark.skipif(not can_contract(), reason="this CPU has no fused multiply-add")
def test_sealing_without_the_pragma_gives_other_bytes(plant: Callable[..., None]) -> None:
    fmt = make(64)
    keys, values = (np.stack(x) for x in zip(*golden()[fmt], strict=True))
    plant("seal", NO_CONTRACTION, "", schedules=("forward",), unroll=True)
    with pytest.raises(AssertionError, match=r"Mismatched|tile"):
        assert_sealed_alike(keys, values, fmt)
    plant("seal", NO_CONTRACTION, NO_CONTRACTION, schedules=("forward",), unroll=True)
    assert_sealed_alike(keys, values, fmt)


# --- planted faults


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def barriers(name: str) -> range:
    from kvarn.backends.mlx.kernels import source

    return range(source.read(name).count(BARRIER))


@pytest.mark.parametrize("occurrence", barriers("seal"))
def test_every_barrier_is_missed(occurrence: int, plant: Callable[..., None]) -> None:
    plant("seal", BARRIER, "", occurrence, optimize="-O0")
    with pytest.raises(MetalHostError, match=r"race|uninitialized"):
        kernels.seal(*(mx.array(x) for x in normal(3, 2, 1, 64, 64)), make(64))


def test_a_read_beyond_the_tile_is_caught(plant: Callable[..., None]) -> None:
    plant("seal", "keys[first + i]", "keys[first + i + 1]", optimize="-O0")
    with pytest.raises(MetalHostError, match="out of bounds: byte 16384 of keys"):
        kernels.seal(*(mx.array(x) for x in normal(3, 2, 1, 64, 64)), make(64))


# --- one hash for all implementations

Sealed = tuple[Any, Any, Any]
Seal = Callable[[Floats, Floats, TileFormat], Sealed]


def numpy_seal(keys: Floats, values: Floats, fmt: TileFormat) -> Sealed:
    return tuple(np.stack(x) for x in zip(*map(oracle_seal, keys, values, [fmt] * len(keys)), strict=True))  # type: ignore[return-value]


def torch_seal(keys: Floats, values: Floats, fmt: TileFormat) -> Sealed:
    tiles, flags, status = torch_ops.seal(torch.from_numpy(keys), torch.from_numpy(values), fmt)
    return tiles.numpy(), flags.numpy(), status.numpy()


def mlx_seal(keys: Floats, values: Floats, fmt: TileFormat) -> Sealed:
    tiles, flags, status = mlx_ops.seal(mx.array(keys), mx.array(values), fmt)
    return np.array(tiles), np.array(flags), np.array(status)


def metal_seal(keys: Floats, values: Floats, fmt: TileFormat) -> Sealed:
    tiles, flags, status = kernels.seal(mx.array(keys), mx.array(values), fmt)
    return np.array(tiles), np.array(flags), np.array(status)


SEALS: tuple[Seal, ...] = (numpy_seal, torch_seal, mlx_seal, metal_seal)


def digest(sealed: list[Sealed]) -> str:
    """One sha256 over status, flags and tile of every tile; a refused tile counts by its status alone."""
    whole = hashlib.sha256()
    for batch in sealed:
        for tile, flags, status in zip(*batch, strict=True):
            whole.update(bytes([status]))
            whole.update(bytes([flags]) + tile.tobytes() if status == SealStatus.OK else b"")
    return whole.hexdigest()


def test_the_whole_golden_set_seals_to_one_hash(plant: Callable[..., None]) -> None:
    plant("seal", BARRIER, BARRIER, schedules=("random",), races=False)  # one schedule: three run above
    inputs = [(*(np.stack(x) for x in zip(*pairs, strict=True)), fmt) for fmt, pairs in golden().items()]
    hashes = {seal.__name__: digest([seal(*each) for each in inputs]) for seal in SEALS}
    assert len(set(hashes.values())) == 1, hashes


def test_a_layer_of_a_real_model_seals_to_one_hash(demo_dir: Path) -> None:
    """Two tiles of every kv head of layer 14."""
    text = "Rotate, balance, then round: a tile of keys and values in few bits. " * 12
    prompt = tuple(Tokenizer(demo_dir).encode(text))[:128]
    options = LoadOptions(dtype="float32", device="cpu")
    exact = torch_backend.load(demo_dir, Preset(tile_tokens=64), options).share(None)
    exact.allocate(0, 2)
    run(exact, Fed(exact, prompt).span(128))
    keys, values = exact.pool.slot(14, 0).numpy().reshape(2, -1, 64, 64)
    hashes = {seal.__name__: digest([seal(keys, values, make(64))]) for seal in SEALS}
    assert len(set(hashes.values())) == 1, hashes
