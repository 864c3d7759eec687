"""The oracle: what seal, unseal and attend promise."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvarn.errors import FormatError, SealError
from kvarn.format import BIT_WIDTHS, SealStatus, TileFormat
from kvarn.reference import (
    Floats,
    attend,
    balance,
    choose_keys,
    prescale,
    quantize,
    read_back,
    rotate,
    seal,
    tile_sum,
    tree_sum,
    unseal,
)
from kvarn.tile import Bytes, split, unpack_codes
from kvarn.visibility import num_sealed

relaxed = settings(deadline=None, max_examples=25)  # a shared machine may stall
SMALL = TileFormat(key_bits=4, value_bits=2, tile_tokens=64, head_dim=64)
SHAPES = list(product((64, 128), (64, 128, 256, 512)))
seeds = st.integers(0, 2**32 - 1)


def _normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _tile(seed: int, fmt: TileFormat) -> Floats:
    return _normal(seed, fmt.tile_tokens, fmt.head_dim)


def _outlying(seed: int, fmt: TileFormat) -> Floats:
    """Keys whose channels hold a few outliers each: a rotation spreads them."""
    return np.random.default_rng(seed).standard_t(2, (fmt.tile_tokens, fmt.head_dim)).astype(np.float32)


def _biased(seed: int, fmt: TileFormat) -> Floats:
    """Keys with five large channel biases, after RoPE: a rotation would spread their swings over every channel."""
    g, half = fmt.tile_tokens, fmt.head_dim // 2
    keys = _tile(seed, fmt)
    keys[:, 1:6] += np.float32(40)  # pairs that turn fast
    angle = np.arange(1000, 1000 + g)[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    a, b = keys[:, :half], keys[:, half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)


def _distance(got: Floats, want: Floats) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want.astype(np.float64)))


# Sums and the rotation.


def test_sums_halve_and_never_add_neighbours() -> None:
    x = np.array([1, 2.0**24, 1, -(2.0**24)], np.float32)
    assert tree_sum(x, 0) == np.float32(2)  # (1 + 1) + (2^24 - 2^24); neighbours first would give 0 or 1
    y = np.array([2.0**24, 1, -(2.0**24), 1], np.float32)
    assert tree_sum(y, 0) == np.float32(2)


def test_a_tile_sum_is_axis_0_then_axis_1() -> None:
    x = _normal(1, 64, 128) * np.float32(1000)
    assert tile_sum(x) == tree_sum(tree_sum(x, 0), 0)


@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_the_rotation_is_the_sylvester_matrix_and_its_own_inverse(d: int) -> None:
    index = np.arange(d)
    signs = np.array([[(-1.0) ** bin(i & j).count("1") for j in index] for i in index])
    x = _normal(d, 3, d)
    np.testing.assert_allclose(rotate(x), x @ signs / np.sqrt(d), atol=2e-6)
    np.testing.assert_allclose(rotate(rotate(x)), x, atol=2e-6)


# Balance and rounding.


@relaxed
@given(seeds, st.sampled_from(SHAPES))
def test_a_balanced_tile_has_unit_rms_rows_and_nearly_so_columns(seed: int, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    scales = [np.exp(rng.standard_normal(n)) for n in (shape[0], shape[1])]
    x = (rng.standard_normal(shape) * scales[0][:, None] * scales[1]).astype(np.float32)
    col, row = balance(x / prescale(x))
    b = (x / prescale(x) / col) / row[:, None]
    np.testing.assert_allclose(np.sqrt((b * b).mean(1)), 1, rtol=1e-5)
    np.testing.assert_allclose(np.sqrt((b * b).mean(0)), 1, rtol=1e-2)


# Median over seeds of |read-back - input| / |input| of normal tiles, with room above.
EXPECTED = {2: (0.55, 0.42), 3: (0.26, 0.26), 4: (0.13, 0.13), 5: (0.06, 0.06), 6: (0.03, 0.03), 8: (0.008, 0.008)}


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize(("g", "d"), SHAPES)
def test_a_sealed_tile_reads_back_within_the_error_of_its_width(bits: int, g: int, d: int) -> None:
    fmt = TileFormat(key_bits=bits, value_bits=bits, tile_tokens=g, head_dim=d)
    keys, values = _tile(g + d, fmt), _tile(g + d + 1, fmt)
    read_keys, read_values = unseal(*seal(keys, values, fmt), fmt)
    for got, want, most in zip((read_keys, read_values), (keys, values), EXPECTED[bits], strict=True):
        assert got.dtype == np.float32
        assert got.shape == want.shape
        assert most / 4 < _distance(got, want) < most


@relaxed
@given(seeds, st.sampled_from(BIT_WIDTHS), st.booleans())
def test_every_element_is_within_half_a_step_where_nothing_is_clipped(seed: int, bits: int, values: bool) -> None:
    bits = max(bits, 3)
    x = _normal(seed, 64, 64)
    q = quantize(x, bits, values=values)
    got = read_back(q.codes, q.scale, q.zero, q.other)
    step = q.scale.astype(np.float32)[:, None] * q.other.astype(np.float32)
    halves = 2.0**-11 * ((2**bits - 1) * step + np.abs(x) + np.abs(q.zero.astype(np.float32))[:, None] * q.other)
    assert (np.abs(got - x) <= 0.5001 * step + 2 * halves).all()


@relaxed
@given(seeds, st.booleans())
def test_the_two_bit_gain_makes_the_read_back_unbiased(seed: int, values: bool) -> None:
    x = _normal(seed, 64, 64)
    q = quantize(x, 2, values=values)
    b = (x / q.g / q.col) / q.row[:, None]
    again = q.codes * q.s[:, None] + q.lo[:, None]
    np.testing.assert_allclose((b * again).sum(1), (b * b).sum(1), rtol=1e-4)


def test_two_bit_values_are_clipped_and_others_are_not() -> None:
    x = _normal(3, 128, 128)
    for bits, values in product((2, 3), (False, True)):
        q = quantize(x, bits, values=values)
        span = (q.s * (2**bits - 1)).max()
        assert (span < 3.2 * 1.2) == (bits == 2 and values)


@relaxed
@given(seeds, st.integers(-12, 12), st.sampled_from(BIT_WIDTHS), st.sampled_from(BIT_WIDTHS))
def test_a_power_of_two_changes_no_code_and_no_flag(seed: int, exponent: int, kb: int, vb: int) -> None:
    fmt = TileFormat(key_bits=kb, value_bits=vb, tile_tokens=64, head_dim=64)
    keys = _outlying(seed, fmt) if seed % 2 else _biased(seed, fmt)
    values = _tile(seed + 2, fmt)
    factor = np.float32(2.0**exponent)
    keys = keys / np.abs(keys).max(1, keepdims=True) * 8  # so that no float16 constant is subnormal at either end
    (tile, flags), (scaled, scaled_flags) = seal(keys, values, fmt), seal(keys * factor, values * factor, fmt)
    one, other = split(tile, fmt), split(scaled, fmt)
    assert flags == scaled_flags
    for name in ("k_codes", "v_codes", "k_scale", "k_zero", "v_scale", "v_zero"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    for name in ("k_token", "v_channel"):
        np.testing.assert_array_equal(getattr(one, name).astype(np.float32) * factor, getattr(other, name))


# Dead, constant and unusual tiles.


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("dead", [slice(0, 1), slice(5, 9), slice(0, 63), slice(None)])
def test_dead_tokens_of_values_read_back_as_zero_and_harm_no_other(bits: int, dead: slice) -> None:
    fmt = TileFormat(key_bits=bits, value_bits=bits, tile_tokens=64, head_dim=64)
    keys, values = _tile(7, fmt), _tile(8, fmt)
    keys[dead], values[dead] = 0, 0
    read_keys, read_values = unseal(*seal(keys, values, fmt), fmt)
    np.testing.assert_array_equal(read_values[dead], 0)
    assert np.isfinite(read_keys).all()
    if values.any():
        assert _distance(read_values, values) < 1.3 * EXPECTED[bits][1]
        assert _distance(read_keys, keys) < 1.3 * EXPECTED[bits][0]
    else:
        np.testing.assert_array_equal(read_keys, 0)


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("dead", [slice(0, 1), slice(8, 12), slice(6, 32), slice(None)])
def test_dead_channels_of_plain_keys_read_back_as_zero_and_harm_no_other(bits: int, dead: slice) -> None:
    fmt = TileFormat(key_bits=bits, value_bits=bits, tile_tokens=64, head_dim=64)
    keys, values = _biased(1, fmt), _tile(8, fmt)
    keys[:, dead], values[:, dead] = 0, 0
    tile, flags = seal(keys, values, fmt)
    read_keys, read_values = unseal(tile, flags, fmt)
    assert flags == int(not keys.any())
    np.testing.assert_array_equal(read_keys[:, dead], 0)
    assert np.isfinite(read_values).all()
    if keys.any():
        assert _distance(read_keys, keys) < EXPECTED[bits][0]
        assert _distance(read_values, values) < 1.3 * EXPECTED[bits][1]


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("constant", [0.0, -0.0, 1.0, -3.25, 2.0**-60, 2.0**-10])
def test_a_constant_tile_reads_back_as_the_constant(bits: int, constant: float) -> None:
    fmt = TileFormat(key_bits=bits, value_bits=bits, tile_tokens=64, head_dim=64)
    x = np.full((64, 64), constant, np.float32)
    keys, values = unseal(*seal(x, x, fmt), fmt)
    np.testing.assert_allclose(keys, x, rtol=2e-3, atol=1e-8)
    if bits > 2:  # two-bit values clip the one rotated channel that holds everything
        np.testing.assert_allclose(values, x, rtol=2e-2, atol=1e-8)
    assert np.isfinite(values).all()


@pytest.mark.parametrize("channel", [0, 40, 63])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_one_channel_at_1000_times_the_others_does_not_blind_them(channel: int, bits: int) -> None:
    fmt = TileFormat(key_bits=bits, value_bits=bits, tile_tokens=64, head_dim=64)
    keys = _tile(9, fmt)
    keys[:, channel] *= 1000
    choice = choose_keys(keys, fmt)
    plain = read_back(choice.plain.codes, choice.plain.scale, choice.plain.zero, choice.plain.other).T
    others = np.arange(64) != channel
    assert _distance(plain[:, others], keys[:, others]) < 2 * EXPECTED[bits][0]


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_mean_of_thousands_of_deviations_does_not_break_a_tile(bits: int) -> None:
    fmt = TileFormat(key_bits=bits, value_bits=bits, tile_tokens=64, head_dim=64)
    keys = _tile(10, fmt) + np.float32(4000)
    read_keys, _ = unseal(*seal(keys, _tile(11, fmt), fmt), fmt)
    assert _distance(read_keys, keys) < 1e-3


def test_no_zero_is_stored_negative() -> None:
    keys, values = -np.zeros((64, 64), np.float32), -np.zeros((64, 64), np.float32)
    keys[:, 1], values[1] = -1e-12, -1e-12
    keys[:, 2], values[2] = -3, -3
    parts = split(seal(keys, values, SMALL)[0], SMALL)
    for constants in (parts.k_scale, parts.k_zero, parts.k_token, parts.v_scale, parts.v_zero, parts.v_channel):
        assert not (np.signbit(constants) & (constants == 0)).any()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("place", [(0, 0), (63, 63), (17, 40)])
def test_an_infinity_or_a_nan_is_refused_by_name(bad: float, which: str, place: tuple[int, int]) -> None:
    arrays = {"keys": _tile(1, SMALL), "values": _tile(2, SMALL)}
    arrays[which][place] = bad
    with pytest.raises(SealError, match=r"hold an infinity or a NaN.*--kv-cache-dtype exact") as caught:
        seal(arrays["keys"], arrays["values"], SMALL)
    assert caught.value.reason == SealStatus.NON_FINITE.reason


@pytest.mark.parametrize("size", [2.0**17, 2.0**60, 2.0**100, 2.0**124])
def test_keys_and_values_beyond_float16_are_told_apart(size: float) -> None:
    normal = _tile(1, SMALL)
    large = normal * np.float32(size)
    for keys, values, status in (
        (large, normal, SealStatus.KEYS_OVERFLOW),
        (normal, large, SealStatus.VALUES_OVERFLOW),
        (large, large, SealStatus.KEYS_OVERFLOW),
    ):
        with pytest.raises(SealError, match=r"beyond float16's 65504") as caught:
            seal(keys, values, SMALL)
        assert caught.value.reason == status.reason


def test_keys_are_kept_in_the_only_basis_that_fits() -> None:
    keys = _normal(5, 64, 64) * np.float32(28000)
    keys[:, 3] *= 8
    tile, flags = seal(keys, keys / np.float32(2**16), SMALL)
    assert flags == 0
    assert _distance(unseal(tile, flags, SMALL)[0], keys) < 0.15
    tile, flags = seal(rotate(keys), keys / np.float32(2**16), SMALL)
    assert flags == 1
    assert _distance(unseal(tile, flags, SMALL)[0], rotate(keys)) < 0.15


@pytest.mark.parametrize(
    ("keys", "values", "what"),
    [
        (np.zeros((64, 128), np.float32), np.zeros((64, 64), np.float32), r"keys are float32 \[64, 128\]"),
        (np.zeros((63, 64), np.float32), np.zeros((64, 64), np.float32), r"keys are float32 \[63, 64\]"),
        (np.zeros((64, 64), np.float32), np.zeros((1, 64, 64), np.float32), r"values are float32 \[1, 64, 64\]"),
        (np.zeros((64, 64)), np.zeros((64, 64), np.float32), r"keys are float64"),
        (np.zeros((64, 64), np.float32), np.zeros((64, 64), np.float16), r"values are float16"),
    ],
)
def test_another_shape_or_dtype_is_refused(keys: Floats, values: Floats, what: str) -> None:
    with pytest.raises(FormatError, match=what):
        seal(keys, values, SMALL)


def test_the_layout_of_the_input_in_memory_does_not_matter() -> None:
    keys, values = _tile(1, SMALL), _tile(2, SMALL)
    tile, flags = seal(keys, values, SMALL)
    again, again_flags = seal(np.asfortranarray(keys), np.repeat(values, 2, axis=1)[:, ::2], SMALL)
    np.testing.assert_array_equal(tile, again)
    assert flags == again_flags


# The choice between rotated and plain keys.


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("d", [64, 128])
def test_large_channel_biases_keep_the_keys_plain_and_outliers_rotate_them(bits: int, d: int) -> None:
    fmt = TileFormat(key_bits=bits, value_bits=2, tile_tokens=128, head_dim=d)
    assert seal(_biased(bits, fmt), _tile(1, fmt), fmt)[1] == 0
    assert seal(_outlying(bits, fmt), _tile(1, fmt), fmt)[1] == 1


@relaxed
@given(seeds, st.sampled_from(BIT_WIDTHS), st.sampled_from([_tile, _biased, _outlying]))
def test_the_smaller_error_always_wins(seed: int, bits: int, make: Callable[[int, TileFormat], Floats]) -> None:
    fmt = TileFormat(key_bits=bits, value_bits=2, tile_tokens=64, head_dim=64)
    keys = make(seed, fmt)
    choice = choose_keys(keys, fmt)
    assert choice.keep_rotated == (choice.rotated_error <= choice.plain_error)
    tile, flags = seal(keys, _tile(1, fmt), fmt)
    assert flags == int(bool(choice.keep_rotated))
    error = float(((unseal(tile, flags, fmt)[0] - keys).astype(np.float64) ** 2).sum())
    assert error == pytest.approx(min(choice.rotated_error, choice.plain_error), rel=1e-3)
    np.testing.assert_array_equal(unpack_codes(split(tile, fmt).k_codes, bits), choice.kept.codes)


def test_a_tie_and_a_dead_tile_keep_the_rotated_keys() -> None:
    z = np.random.default_rng(1).integers(-7, 8, (64, 64)).astype(np.float32)
    tied = 8 * z + 8 * rotate(z)  # an eigenvector of the rotation: both candidates are the same tile
    np.testing.assert_array_equal(rotate(tied), tied)
    choice = choose_keys(tied, SMALL)
    assert choice.rotated_error == choice.plain_error
    assert choice.keep_rotated
    dead = _biased(1, SMALL) * np.float32(2.0**-50)
    assert choose_keys(dead, SMALL).keep_rotated
    assert not choose_keys(_biased(1, SMALL), SMALL).keep_rotated


@relaxed
@given(seeds, st.sampled_from(SHAPES[:3]))
def test_keys_and_values_do_not_influence_each_other(seed: int, shape: tuple[int, int]) -> None:
    fmt = TileFormat(key_bits=3, value_bits=2, tile_tokens=shape[0], head_dim=shape[1])
    keys, values = _tile(seed, fmt), _tile(seed + 1, fmt)
    edge = fmt.fields["v_codes"].offset
    tile, flags = seal(keys, values, fmt)
    other_keys, other_flags = seal(keys, values * np.float32(40), fmt)
    np.testing.assert_array_equal(tile[:edge], other_keys[:edge])
    assert flags == other_flags
    np.testing.assert_array_equal(tile[edge:], seal(_biased(seed, fmt), values, fmt)[0][edge:])


# Reading without unsealing.


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("make", [_biased, _outlying])
def test_the_folded_formulas_equal_unsealing(bits: int, make: Callable[[int, TileFormat], Floats]) -> None:
    fmt = TileFormat(key_bits=bits, value_bits=bits, tile_tokens=64, head_dim=128)
    tile, flags = seal(make(bits, fmt), _tile(2, fmt), fmt)
    keys, values = unseal(tile, flags, fmt)
    query, p = _normal(3, 128), np.abs(_normal(4, 64))
    parts = split(tile, fmt)
    k_codes, v_codes = (unpack_codes(x, bits).astype(np.float32) for x in (parts.k_codes, parts.v_codes))
    k_scale, k_zero, k_token, v_scale, v_zero, v_channel = (
        getattr(parts, name).astype(np.float32)
        for name in ("k_scale", "k_zero", "k_token", "v_scale", "v_zero", "v_channel")
    )
    r = rotate(query) if flags else query
    scores = k_token * ((r * k_scale) @ k_codes + (r * k_zero).sum())
    want = keys @ query
    np.testing.assert_allclose(scores, want, atol=1e-5 * np.abs(keys).max() * 128)
    output = rotate(v_channel * ((p * v_scale) @ v_codes + (p * v_zero).sum()))
    np.testing.assert_allclose(output, p @ values, atol=1e-4)


# Attention.


def _read(tile: Bytes, flags: int, fmt: TileFormat) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Unseal, written again from the text with Python integers and a float64 matrix."""
    d, g = fmt.head_dim, fmt.tile_tokens
    raw = tile.tobytes()
    position = 0

    def codes(rows: int, columns: int, bits: int) -> NDArray[np.float64]:
        nonlocal position
        out = np.empty((rows, columns))
        for r in range(rows):
            stream = int.from_bytes(raw[position : position + columns * bits // 8], "little")
            out[r] = [(stream >> (c * bits)) % 2**bits for c in range(columns)]
            position += columns * bits // 8
        return out

    def halves(n: int) -> NDArray[np.float64]:
        nonlocal position
        position += 2 * n
        return np.frombuffer(raw[position - 2 * n : position], "<f2").astype(np.float64)

    k, k_scale, k_zero, k_token = codes(d, g, fmt.key_bits), halves(d), halves(d), halves(g)
    v, v_scale, v_zero, v_channel = codes(g, d, fmt.value_bits), halves(g), halves(g), halves(d)
    assert position == len(raw)
    hadamard = np.ones((1, 1))
    while len(hadamard) < d:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    hadamard /= np.sqrt(d)
    keys = ((k * k_scale[:, None] + k_zero[:, None]) * k_token).T
    values = (v * v_scale[:, None] + v_zero[:, None]) * v_channel
    return keys @ hadamard if flags & 1 else keys, values @ hadamard


class Sequence:
    """Random keys and values of a sequence, its sealed tiles, and brute-force attention over them."""

    def __init__(self, length: int, fmt: TileFormat, heads: int, kv_heads: int, seed: int) -> None:
        g, d = fmt.tile_tokens, fmt.head_dim
        self.fmt, self.scale = fmt, d**-0.5
        self.query = _normal(seed, length, heads, d)
        self.keys = _normal(seed + 1, length, kv_heads, d) + 3 * _normal(seed + 2, kv_heads, d)
        self.values = _normal(seed + 3, length, kv_heads, d)
        blocks = max(length // g - 1, 0)
        self.tiles = np.zeros((blocks, kv_heads, fmt.tile_nbytes), np.uint8)
        self.flags = np.zeros((blocks, kv_heads), np.uint8)
        for b, j in product(range(blocks), range(kv_heads)):
            span = slice((b + 1) * g, (b + 2) * g)
            self.tiles[b, j], self.flags[b, j] = seal(self.keys[span, j], self.values[span, j], fmt)

    def attend(self, start: int, stop: int) -> NDArray[np.float64]:
        """The oracle for the queries `start` to `stop`, with only what they may read."""
        seen = num_sealed(stop - 1, self.fmt.tile_tokens)
        return attend(
            self.query[start:stop],
            self.keys[:stop],
            self.values[:stop],
            self.tiles[:seen],
            self.flags[:seen],
            start,
            self.scale,
            self.fmt,
        )

    def brute_force(self, positions: range) -> NDArray[np.float64]:
        """Attention key by key, each read as the text says that a query at p reads it."""
        g = self.fmt.tile_tokens
        ratio = self.query.shape[1] // self.keys.shape[1]
        sealed_keys, sealed_values = self.keys.astype(np.float64), self.values.astype(np.float64)
        for b, j in np.ndindex(self.flags.shape):
            span = slice((b + 1) * g, (b + 2) * g)
            sealed_keys[span, j], sealed_values[span, j] = _read(self.tiles[b, j], int(self.flags[b, j]), self.fmt)
        out = np.zeros((len(positions), self.query.shape[1], self.fmt.head_dim))
        for i, p in enumerate(positions):
            tile_of = np.arange(p + 1) // g
            exact = ((tile_of == 0) | (tile_of == p // g))[:, None, None]
            keys = np.where(exact, self.keys[: p + 1], sealed_keys[: p + 1])
            values = np.where(exact, self.values[: p + 1], sealed_values[: p + 1])
            grouped = self.query[p].reshape(-1, ratio, self.fmt.head_dim).astype(np.float64)
            weights = np.exp(np.einsum("jrd,tjd->jrt", grouped, keys) * self.scale)
            mixed = np.einsum("jrt,tjd->jrd", weights, values) / weights.sum(-1, keepdims=True)
            out[i] = mixed.reshape(-1, self.fmt.head_dim)
        return out


LENGTHS = (1, 127, 128, 129, 255, 256, 257, 385)
HEADS = ((1, 1), (3, 1), (6, 2), (7, 1), (8, 1))


def _format(g: int, d: int, kb: int = 4, vb: int = 2) -> TileFormat:
    return TileFormat(key_bits=kb, value_bits=vb, tile_tokens=g, head_dim=d)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("g", "d"), [(128, 64), (128, 128), (64, 64), (64, 128)])
def test_decode_equals_brute_force(g: int, d: int, heads: int, kv_heads: int) -> None:
    longest = Sequence(max(LENGTHS) * g // 128, _format(g, d), heads, kv_heads, seed=heads)
    lengths = LENGTHS if g == 128 else (1, 63, 64, 65, 127, 128, 129, 192)
    for length in lengths:
        got = longest.attend(length - 1, length)
        want = longest.brute_force(range(length - 1, length))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("g", "d", "heads", "kv_heads"), [(128, 64, 3, 1), (64, 128, 4, 2)])
def test_prefill_equals_brute_force(length: int, g: int, d: int, heads: int, kv_heads: int) -> None:
    sequence = Sequence(length, _format(g, d, kb=2), heads, kv_heads, seed=length)
    got, want = sequence.attend(0, length), sequence.brute_force(range(length))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_the_sealed_tiles_are_what_is_read() -> None:
    """A guard for the tests above: reading exact keys instead would fall far outside their tolerance."""
    sequence = Sequence(385, _format(128, 64, kb=2), 1, 1, seed=5)
    got = sequence.attend(384, 385)
    sequence.tiles = sequence.tiles[:0]
    sequence.flags = sequence.flags[:0]
    assert np.abs(got - sequence.brute_force(range(384, 385))).max() > 1e-2


@pytest.mark.parametrize("g", [64, 128])
def test_chunks_do_not_change_a_bit(g: int) -> None:
    length = 385
    sequence = Sequence(length, _format(g, 64), 2, 1, seed=9)
    whole = sequence.attend(0, length)
    for size in (1, 63, 64, 100, 128, 129, 384):
        parts = [sequence.attend(start, min(start + size, length)) for start in range(0, length, size)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("g", [64, 128])
def test_a_later_token_never_moves_an_earlier_output(g: int) -> None:
    length, fmt = 385, _format(g, 64)
    before = Sequence(length, fmt, 2, 1, seed=11)
    whole = before.attend(0, length)
    for i in (0, 1, g - 1, g, g + 1, 2 * g - 1, 2 * g, 256, 384):
        after = Sequence(length, fmt, 2, 1, seed=11)
        after.keys[i] += 100
        after.values[i] -= 100
        tile = i // g
        if 1 <= tile <= len(after.tiles):
            span = slice(tile * g, (tile + 1) * g)
            after.tiles[tile - 1, 0], after.flags[tile - 1, 0] = seal(after.keys[span, 0], after.values[span, 0], fmt)
        changed = after.attend(0, length)
        np.testing.assert_array_equal(changed[:i], whole[:i])
        assert (changed[i] != whole[i]).any()


def test_what_the_rule_hides_is_not_read() -> None:
    sequence = Sequence(385, _format(128, 64), 2, 1, seed=13)
    want = sequence.attend(384, 385)
    sequence.keys[128:384] = np.nan
    sequence.values[128:384] = np.nan
    np.testing.assert_array_equal(sequence.attend(384, 385), want)
