"""The device functions that read packed tiles, in Triton's interpreter, against kvarn.tile and kvarn.reference."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kvarn import reference, tile
from kvarn.backends.triton.kernels import tile as device
from kvarn.format import BIT_WIDTHS, HEAD_DIMS, TILE_TOKENS, TileFormat


@triton.jit
def read_codes(
    source, rows, out, order, unit, R: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, STRIDE: tl.constexpr
):
    c = tl.arange(0, C)
    x = device.codes(device.words(source, 0), tl.load(rows + tl.arange(0, R)), C, BITS, STRIDE)
    tl.store(out + tl.arange(0, R)[:, None] * C + c[None, :], x)
    tl.store(order + c, device.order(C, BITS))
    tl.store(unit + c, device.unit(C, BITS))


@triton.jit
def read_constants(source, out, COUNT: tl.constexpr, OFFSET: tl.constexpr):
    index = COUNT - 1 - tl.arange(0, COUNT)
    tl.store(out + index, device.constants_of(device.halves(source, OFFSET), index))


@triton.jit
def rotate_rows(source, out, R: tl.constexpr, D: tl.constexpr):
    at = tl.arange(0, R)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + at, device.rotate(tl.load(source + at), R, D))


@triton.jit
def read_base(tiles, out, block, head, stride, TILE_NBYTES: tl.constexpr):
    base = device.tile_base(tiles, tl.load(block), head, stride, TILE_NBYTES)
    tl.store(out + tl.arange(0, TILE_NBYTES), tl.load(base + tl.arange(0, TILE_NBYTES)))


def read(stream: NDArray[np.uint8], rows: list[int], columns: int, bits: int, stride: int) -> NDArray[np.float64]:
    """The codes that the device reads, back in the order of the elements."""
    out = torch.full((len(rows), columns), torch.nan, dtype=torch.float16)
    order, unit = torch.zeros(columns, dtype=torch.int32), torch.zeros(columns)
    read_codes[(1,)](
        torch.from_numpy(stream),
        torch.tensor(rows, dtype=torch.int32),
        out,
        order,
        unit,
        R=len(rows),
        C=columns,
        BITS=bits,
        STRIDE=stride,
    )
    assert sorted(order.tolist()) == list(range(columns))
    codes = np.zeros((len(rows), columns))
    codes[:, order.numpy()] = out.double().numpy() / unit.numpy()
    return codes


@pytest.mark.parametrize("columns", [32, 64, 128, 512])
@pytest.mark.parametrize("bits", BIT_WIDTHS)
def test_codes_are_those_of_the_bit_stream(bits: int, columns: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (4, columns), np.uint8)
    codes[0], codes[1] = 0, 2**bits - 1
    stream = tile.pack_codes(codes, bits).view(np.uint8).reshape(-1)
    np.testing.assert_array_equal(read(stream, [0, 1, 2, 3], columns, bits, columns * bits // 32), codes)


@pytest.mark.parametrize("bits", BIT_WIDTHS)
def test_rows_come_in_any_order_and_columns_from_any_word_group(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (16, 128), np.uint8)
    stream = tile.pack_codes(codes, bits).view(np.uint8).reshape(-1)
    rows = [9, 0, 15, 2]
    part = np.ascontiguousarray(stream[4 * 2 * bits :])  # from column 64 on
    np.testing.assert_array_equal(read(part, rows, 32, bits, 128 * bits // 32), codes[rows, 64:96])


@pytest.mark.parametrize("g", TILE_TOKENS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_constants_and_offsets_are_those_of_the_format(d: int, g: int) -> None:
    fmt = TileFormat(key_bits=3, value_bits=6, tile_tokens=g, head_dim=d)
    names = device.constants(fmt)
    assert (names["D"], names["G"], names["KEY_BITS"], names["VALUE_BITS"]) == (d, g, 3, 6)
    assert all(names[name.upper()] == field.offset for name, field in fmt.fields.items())
    halves = np.random.default_rng(d).standard_normal(fmt.tile_nbytes // 2).astype(np.float16)
    halves[::7] = 2.0**-24  # subnormal
    fields = tile.split(halves.view(np.uint8), fmt)
    for name in ("k_scale", "k_zero", "k_token", "v_scale", "v_zero", "v_channel"):
        want = getattr(fields, name).astype(np.float32)
        out = torch.full((len(want),), torch.nan)
        read_constants[(1,)](torch.from_numpy(halves.view(np.uint8)), out, COUNT=len(want), OFFSET=names[name.upper()])
        np.testing.assert_array_equal(out.numpy(), want)


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_rotation_is_the_oracles_but_for_its_factor(d: int) -> None:
    x = np.random.default_rng(d).standard_normal((4, d), np.float32)
    out = torch.full((4, d), torch.nan)
    rotate_rows[(1,)](torch.from_numpy(x), out, R=4, D=d)
    np.testing.assert_array_equal(out.numpy() * np.float32(1 / np.sqrt(d)), reference.rotate(x))


def test_every_tile_of_a_pool_is_found_in_a_layer_of_it_too() -> None:
    pool = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 5, 3, 256), np.uint8))
    for layer, block, head in ((0, 0, 0), (1, 4, 2), (1, 2, 1)):
        tiles, out = pool[layer], torch.zeros(256, dtype=torch.uint8)
        read_base[(1,)](tiles, out, torch.tensor([block], dtype=torch.int32), head, tiles.stride(0), TILE_NBYTES=256)
        assert torch.equal(out, tiles[block, head])


@pytest.mark.parametrize("bits", BIT_WIDTHS)
def test_the_read_back_is_the_oracles(bits: int) -> None:
    """Codes in their units with the constants of their rows and columns give what kvarn.reference reads back."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (64, 128), np.uint8)
    scale, zero = rng.uniform(-1, 1, (2, 64)).astype(np.float16)
    other = rng.uniform(0.5, 2, 128).astype(np.float16)
    stream = tile.pack_codes(codes, bits).view(np.uint8).reshape(-1)
    got = read(stream, list(range(64)), 128, bits, 4 * bits) * scale[:, None].astype(np.float64) + zero[:, None]
    want = reference.read_back(codes, scale, zero, other)
    np.testing.assert_allclose(got * other, want, rtol=1e-5, atol=1e-5)
