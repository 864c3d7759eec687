"""Tile bytes and their fields; bit streams."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvarn.errors import FormatError
from kvarn.format import BIT_WIDTHS, HEAD_DIMS, TILE_TOKENS, TileFormat
from kvarn.tile import TileFields, join, pack_codes, split, unpack_codes

relaxed = settings(deadline=None)  # a shared machine may stall
formats = st.builds(
    TileFormat,
    key_bits=st.sampled_from(BIT_WIDTHS),
    value_bits=st.sampled_from(BIT_WIDTHS),
    tile_tokens=st.sampled_from(TILE_TOKENS),
    head_dim=st.sampled_from(HEAD_DIMS[:3]),
)


def _random_bytes(seed: int, *shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@st.composite
def rows_of_codes(draw: st.DrawFn) -> tuple[NDArray[np.uint8], int]:
    bits = draw(st.sampled_from(BIT_WIDTHS))
    length = 32 * draw(st.integers(1, 5))
    rows = draw(st.integers(1, 3))
    codes = draw(st.lists(st.integers(0, 2**bits - 1), min_size=rows * length, max_size=rows * length))
    return np.array(codes, np.uint8).reshape(rows, length), bits


@relaxed
@given(rows_of_codes())
def test_codes_survive_packing(case: tuple[NDArray[np.uint8], int]) -> None:
    codes, bits = case
    words = pack_codes(codes, bits)
    assert words.dtype == np.dtype("<u4")
    assert words.shape == (len(codes), codes.shape[1] * bits // 32)
    np.testing.assert_array_equal(unpack_codes(words, bits), codes)


@relaxed
@given(rows_of_codes())
def test_element_c_starts_at_bit_c_times_bits(case: tuple[NDArray[np.uint8], int]) -> None:
    codes, bits = case
    for row, words in zip(codes.tolist(), pack_codes(codes, bits), strict=True):
        stream = sum(code << (c * bits) for c, code in enumerate(row))
        assert int.from_bytes(words.tobytes(), "little") == stream


def test_codes_of_strided_rows_are_read_by_value() -> None:
    codes = _random_bytes(1, 128, 64) % np.uint8(8)
    np.testing.assert_array_equal(unpack_codes(pack_codes(codes.T, 3), 3), codes.T)
    words = pack_codes(codes, 3)
    np.testing.assert_array_equal(unpack_codes(words[::2], 3), codes[::2])


@relaxed
@given(formats, st.integers(0, 2**32), st.sampled_from([(), (1,), (3,), (2, 3)]))
def test_splitting_and_joining_give_back_the_bytes(fmt: TileFormat, seed: int, lead: tuple[int, ...]) -> None:
    tiles = _random_bytes(seed, *lead, fmt.tile_nbytes)
    parts = split(tiles, fmt)
    for field in fields(parts):
        assert getattr(parts, field.name).shape == (*lead, *fmt.fields[field.name].shape)
    np.testing.assert_array_equal(join(parts, fmt), tiles)


def test_no_tiles_are_no_bytes() -> None:
    fmt = TileFormat(head_dim=64)
    tiles = np.zeros((0, fmt.tile_nbytes), np.uint8)
    assert join(split(tiles, fmt), fmt).shape == tiles.shape
    assert pack_codes(np.zeros((0, 64), np.uint8), 3).shape == (0, 6)
    assert unpack_codes(np.zeros((0, 6), np.uint32), 3).shape == (0, 64)


def test_split_returns_views_in_the_order_of_the_bytes() -> None:
    fmt = TileFormat(head_dim=64)
    tile = _random_bytes(2, fmt.tile_nbytes)
    parts = split(tile, fmt)
    assert all(np.shares_memory(getattr(parts, field.name), tile) for field in fields(parts))
    assert b"".join(getattr(parts, name).tobytes() for name in fmt.fields) == tile.tobytes()
    assert [field.name for field in fields(TileFields)] == list(fmt.fields)


@pytest.mark.parametrize("by", [-1, 1, -2])
def test_another_length_is_refused(by: int) -> None:
    fmt = TileFormat(head_dim=64)
    with pytest.raises(FormatError, match=rf"uint8 \[{fmt.tile_nbytes}\], not uint8 \[{fmt.tile_nbytes + by}\]"):
        split(np.zeros(fmt.tile_nbytes + by, np.uint8), fmt)


def test_another_dtype_or_no_axis_is_refused() -> None:
    fmt = TileFormat(head_dim=64)
    with pytest.raises(FormatError, match="not int8"):
        split(np.zeros(fmt.tile_nbytes, np.int8), fmt)
    with pytest.raises(FormatError, match=r"not uint8 \[\]"):
        split(np.array(0, np.uint8), fmt)


def test_a_field_of_another_shape_or_dtype_is_refused_by_name() -> None:
    fmt, wide = TileFormat(head_dim=64), TileFormat(head_dim=128)
    parts = split(_random_bytes(3, wide.tile_nbytes), wide)
    with pytest.raises(FormatError, match="k_codes is uint32"):
        join(parts, fmt)
    good = split(_random_bytes(4, fmt.tile_nbytes), fmt)
    swapped = {f.name: getattr(good, f.name) for f in fields(good)} | {"k_token": good.k_token.astype(np.float32)}
    with pytest.raises(FormatError, match="k_token is float32"):
        join(TileFields(**swapped), fmt)
