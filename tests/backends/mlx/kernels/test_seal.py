"""seal.metal against the oracle: bytes, flags and status words."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from cases import assert_sealed_alike, make
from golden_tiles import golden_batches
from metal_host import MetalHostError
from metal_host.compiler import can_contract
from operation_cases import awkward_tiles, normal

from kvarn.backends.mlx.kernels import kernels
from kvarn.backends.mlx.kernels.source import NO_CONTRACTION
from kvarn.format import FLAG_KEYS_ROTATED, HEAD_DIMS, SealStatus

# Every preset with every head_dim, both tile lengths with each of either; formats of the golden set where it has them.
LENGTHS = {
    (4, 2): (64, 128, 128, 64),
    (4, 4): (128, 64, 64, 128),
    (3, 5): (64, 128, 128, 64),
    (8, 8): (128, 128, 64, 64),
}
SHAPES = [(d, g, bits) for bits, lengths in LENGTHS.items() for d, g in zip(HEAD_DIMS, lengths, strict=True)]


@pytest.mark.parametrize(("d", "g", "bits"), SHAPES)
def test_bytes_flags_and_status_are_the_oracles(d: int, g: int, bits: tuple[int, int]) -> None:
    keys, values = normal(d + g, 2, 1, g, d)
    keys[0, :, 3] *= 50
    assert_sealed_alike(keys, values, make(d, g, bits))


@pytest.mark.parametrize("bits", [(2, 3), (3, 2), (4, 6), (5, 8), (6, 5), (8, 4)])
@pytest.mark.usefixtures("one_schedule")
def test_every_width(bits: tuple[int, int]) -> None:
    """The pairs of the Triton kernels' tests."""
    keys, values = normal(bits[0], 2, 2, 64, 64)
    keys[1, :, 3] += 50  # a large bias keeps the plain candidate
    assert_sealed_alike(keys, values, make(64, 64, bits))


@pytest.mark.parametrize("bits", [(4, 2), (2, 4)])
def test_awkward_tiles_have_the_oracles_bytes_and_refusals(bits: tuple[int, int]) -> None:
    fmt = make(64, 64, bits)
    keys, values = awkward_tiles(fmt)
    biased = normal(9, 2, 1, 64, 64)  # of every channel: kept unrotated
    biased[0] += 30 * normal(3, 64)
    words = assert_sealed_alike(np.concatenate([keys, biased[0]]), np.concatenate([values, biased[1]]), fmt)
    assert {status for _, status in words} == {int(status) for status in SealStatus}
    assert {flags for flags, status in words if status == SealStatus.OK} == {0, FLAG_KEYS_ROTATED}


@pytest.mark.usefixtures("one_schedule")
def test_a_tile_in_a_batch_has_the_bytes_that_it_has_alone() -> None:
    fmt = make(64, 64, (2, 2))
    keys, values = normal(2, 2, 3, 64, 64)
    keys[1:], values[1:] = keys[1:] * 40, values[1:] * 40
    batch = kernels.seal(mx.array(keys), mx.array(values), fmt)
    for together, alone in zip(batch, kernels.seal(mx.array(keys[0]), mx.array(values[0]), fmt), strict=True):
        np.testing.assert_array_equal(np.array(together[0]), np.array(alone))


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
    keys, values = golden_batches()[fmt]
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
