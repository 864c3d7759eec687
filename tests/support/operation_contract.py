"""The tests that the plain operations of every backend pass: sealing by the byte, attention within TOLERANCE.

A backend's test file subclasses `OperationContract` and gives its operations over NumPy arrays.
"""

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray
from operation_cases import (
    AWKWARD,
    Floats,
    Sequence,
    assert_oracles_tiles,
    awkward_tile,
    awkward_tiles,
    brute_force,
    make,
    normal,
    oracle_seal,
    rounded,
    sequence,
    with_changed_token,
)

from kvarn import reference, tile
from kvarn.format import BIT_WIDTHS, HEAD_DIMS, TILE_TOKENS, SealStatus, TileFormat
from kvarn.tile import Bytes

TOLERANCE = 1e-5  # of the largest output, float32 arithmetic against the oracle's float64
LENGTHS = (1, 127, 128, 129, 255, 256, 257, 385)
WIDTHS = list(product(BIT_WIDTHS, BIT_WIDTHS))
PAIRS = ((4, 2), (2, 2), (3, 5), (5, 6), (6, 3), (8, 8))


class Arrays:
    """A backend's plain operations with NumPy arrays in and out; names and arguments as in its ops.py."""

    def pack_codes(self, codes: Bytes, bits: int) -> Bytes:
        raise NotImplementedError

    def unpack_codes(self, stream: Bytes, bits: int) -> Bytes:
        raise NotImplementedError

    def rotate(self, x: Floats) -> Floats:
        raise NotImplementedError

    def seal(self, keys: Floats, values: Floats, fmt: TileFormat) -> tuple[Bytes, Bytes, Bytes]:
        raise NotImplementedError

    def unseal(self, tiles: Bytes, flags: Bytes, fmt: TileFormat) -> tuple[Floats, Floats]:
        raise NotImplementedError

    def attend(self, query: Floats, seq: Sequence, start: int, scale: float, dtype: str) -> Floats:
        """Attention of queries `[N, H, D]` over `seq.exact_parts` in a dtype and the pool of `seq`; float32."""
        raise NotImplementedError

    def attend_exact(
        self, query: Floats, keys: Floats, values: Floats, start: int, scale: float, window: int | None, dtype: str
    ) -> Floats:
        """Exact attention in a dtype, whose output has that dtype."""
        raise NotImplementedError


class OperationContract:
    """See the first lines."""

    arrays: Arrays
    half_tolerance: float  # of exact attention in bfloat16, of the largest output

    def assert_sealed_alike(self, keys: Floats, values: Floats, fmt: TileFormat) -> None:
        """Tiles `[T, G, D]` sealed in one batch have the oracle's bytes, flags, status words and read-back."""
        tiles, flags, status = self.arrays.seal(keys, values, fmt)
        assert_oracles_tiles(tiles, flags, status, keys, values, fmt)
        back = self.arrays.unseal(tiles, flags, fmt)
        for t in np.flatnonzero(status == SealStatus.OK):
            for x, y in zip(back, reference.unseal(tiles[t], int(flags[t]), fmt), strict=True):
                np.testing.assert_array_equal(x[t].view(np.uint32), y.view(np.uint32))

    def assert_attends(self, query: Floats, seq: Sequence, start: int, dtype: str = "float32") -> None:
        scale = seq.fmt.head_dim**-0.5
        want = seq.want(query, start, scale)
        got = self.arrays.attend(query, seq, start, scale, dtype)
        assert np.isfinite(got).all(), "garbage was read"
        error = np.abs(got - want).max() / np.abs(want).max()
        assert error < TOLERANCE, f"start {start}, {len(query)} queries: {error:.2g}"

    # --- bit streams and rotation

    @pytest.mark.parametrize("bits", BIT_WIDTHS)
    def test_bit_streams_are_those_of_the_tile_format(self, bits: int) -> None:
        rng = np.random.default_rng(bits)
        for length in (32, 64, 96, 128, 512):
            codes = rng.integers(0, 2**bits, (2, 3, length), np.uint8)
            got = self.arrays.pack_codes(codes, bits)
            np.testing.assert_array_equal(got, tile.pack_codes(codes, bits).view(np.uint8))
            np.testing.assert_array_equal(self.arrays.unpack_codes(got, bits), codes)

    @pytest.mark.parametrize("bits", BIT_WIDTHS)
    def test_any_bytes_unpack_as_the_tile_format_says(self, bits: int) -> None:
        stream = np.random.default_rng(bits).integers(0, 256, (5, 16 * bits), np.uint8)
        want = tile.unpack_codes(stream.view("<u4"), bits)
        np.testing.assert_array_equal(self.arrays.unpack_codes(stream, bits), want)

    @pytest.mark.parametrize("d", HEAD_DIMS)
    def test_rotation_is_the_oracles_by_the_bit(self, d: int) -> None:
        x = normal(d, 3, 5, d) * np.float32(10.0) ** np.arange(-2, 3, dtype=np.float32)[:, None]
        np.testing.assert_array_equal(self.arrays.rotate(x), reference.rotate(x))

    # --- seal and unseal

    @pytest.mark.parametrize(("key_bits", "value_bits"), WIDTHS)
    def test_every_pair_of_widths_seals_to_the_oracles_bytes(self, key_bits: int, value_bits: int) -> None:
        fmt = make(64, 64, key_bits, value_bits)
        keys, values = normal(key_bits * 10 + value_bits, 2, 3, 64, 64)
        keys[1, :, 3] += 50  # large key biases keep the plain candidate
        self.assert_sealed_alike(keys, values, fmt)

    @pytest.mark.parametrize("g", TILE_TOKENS)
    @pytest.mark.parametrize("d", HEAD_DIMS)
    @pytest.mark.parametrize(("key_bits", "value_bits"), PAIRS)
    def test_every_shape_seals_to_the_oracles_bytes(self, key_bits: int, value_bits: int, d: int, g: int) -> None:
        keys, values = normal(d + g + key_bits, 2, 2, g, d)
        keys[1, :, d // 3] += 80
        self.assert_sealed_alike(keys, values, make(d, g, key_bits, value_bits))

    @pytest.mark.parametrize("fmt", [make(64, 64), make(128, 128), make(64, 128, 2, 2), make(128, 64, 3, 5)], ids=str)
    def test_an_awkward_tile_seals_as_the_oracle_says(self, fmt: TileFormat) -> None:
        self.assert_sealed_alike(*awkward_tiles(fmt), fmt)

    def test_the_awkward_tiles_reach_every_status_and_both_flags(self) -> None:
        fmt = make(64, 64)
        sealed = [oracle_seal(*awkward_tile(name, fmt, seed), fmt) for seed, name in enumerate(AWKWARD)]
        assert {status for _, _, status in sealed} == set(SealStatus)
        assert {flag for _, flag, status in sealed if status == SealStatus.OK} == {0, 1}

    @pytest.mark.parametrize("fmt", [make(64, 128), make(128, 64, 2, 2)], ids=str)
    def test_a_tile_in_a_batch_has_the_bytes_that_it_has_alone(self, fmt: TileFormat) -> None:
        keys, values = awkward_tiles(fmt)
        large = normal(90, 2, 6, *keys.shape[1:]) * np.float32(40)
        keys, values = np.concatenate([keys, large[0]]), np.concatenate([values, large[1]])
        batch = self.arrays.seal(keys, values, fmt)
        for t in range(len(keys)):
            for x, y in zip(batch, self.arrays.seal(keys[t], values[t], fmt), strict=True):
                np.testing.assert_array_equal(x[t], y, err_msg=f"tile {t}")

    # --- attention over sealed tiles

    @pytest.mark.parametrize("g", TILE_TOKENS)
    @pytest.mark.parametrize("length", LENGTHS)
    def test_attention_is_the_oracles_at_every_length(self, length: int, g: int) -> None:
        """Decode at the end, prefill of everything, and chunks that begin in the middle of a tile and at its edges."""
        seq = sequence(length, make(64, g), 2, seed=length)
        query = normal(length + 1, length, 4, 64)
        for start in sorted({0, length - 1, length // 2, length // 3, length // g * g, length - length % 100}):
            if start < length:
                self.assert_attends(query[start:], seq, start)

    @pytest.mark.parametrize("ratio", [1, 3, 5, 6, 7, 8])
    def test_attention_is_the_oracles_at_every_ratio_of_heads(self, ratio: int) -> None:
        seq = sequence(4 * 64 + 9, make(64, 64, 5, 3), 2, seed=ratio)
        query = normal(ratio, 4 * 64 + 9, 2 * ratio, 64)
        for start in (4 * 64 + 8, 150):
            self.assert_attends(query[start:], seq, start)

    @pytest.mark.parametrize(("d", "g"), [(128, 64), (128, 128), (256, 128), (512, 64)])
    @pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 2), (2, 2), (8, 6)])
    def test_attention_is_the_oracles_at_every_head_dim(self, d: int, g: int, key_bits: int, value_bits: int) -> None:
        seq = sequence(4 * g + 1, make(d, g, key_bits, value_bits), 2, seed=d)
        query = normal(d, 4 * g + 1, 6, d)
        for start in (4 * g, 4 * g - 10, 2 * g + 50):
            self.assert_attends(query[start : start + 60], seq, start)

    @pytest.mark.parametrize(("key_bits", "value_bits"), WIDTHS)
    def test_attention_reads_every_pair_of_widths(self, key_bits: int, value_bits: int) -> None:
        seq = sequence(3 * 64 + 5, make(64, 64, key_bits, value_bits), 2, seed=key_bits)
        self.assert_attends(normal(1, 7, 4, 64), seq, 3 * 64 - 2)

    @pytest.mark.parametrize("start", [0, 100, 200, 384])
    def test_bfloat16_queries_and_keys_lose_nothing_more(self, start: int) -> None:
        """The inputs are rounded to bfloat16; the arithmetic on them is float32, so the tolerance stays."""
        seq = sequence(385, make(64), 2, seed=7, dtype="bfloat16")
        query = rounded(normal(8, 385, 6, 64), "bfloat16")
        self.assert_attends(query[start:], seq, start, "bfloat16")

    def test_large_scores_neither_overflow_nor_vanish(self) -> None:
        seq = sequence(4 * 64, make(64, 64), 1, seed=3)
        query = normal(4, 4 * 64, 2, 64) * np.float32(100)
        got, want = self.arrays.attend(query, seq, 0, 1.0, "float32"), seq.want(query, 0, 1.0)
        assert np.abs(got - want).max() < 0.01 * np.abs(want).max()  # scores of thousands: float32 knows them to 1e-3

    @pytest.mark.parametrize("changed", [0, 63, 64, 100, 127, 128, 191, 192, 200])
    def test_a_token_never_moves_an_output_before_it(self, changed: int) -> None:
        fmt, length = make(64, 64), 3 * 64 + 20
        seq = sequence(length, fmt, 2, seed=11)
        query = normal(12, length, 4, 64)
        other, other_query = with_changed_token(seq, query, changed, seed=13)
        for start in (0, 60, 100):
            before = self.arrays.attend(query[start:], seq, start, 0.125, "float32")
            after = self.arrays.attend(other_query[start:], other, start, 0.125, "float32")
            np.testing.assert_array_equal(before[: max(changed - start, 0)], after[: max(changed - start, 0)])
            if changed >= start:
                assert (before[changed - start] != after[changed - start]).any()

    @pytest.mark.parametrize("start", [0, 64, 100])
    def test_a_query_gives_the_same_alone_and_in_a_chunk(self, start: int) -> None:
        seq = sequence(3 * 64 + 20, make(64, 64), 2, seed=21)
        query = normal(22, 3 * 64 + 20, 4, 64)
        together = self.arrays.attend(query[start:], seq, start, 0.125, "float32")
        for i in range(start, len(query), 13):
            alone = self.arrays.attend(query[i : i + 1], seq, i, 0.125, "float32")
            assert np.abs(alone[0] - together[i - start]).max() < TOLERANCE * np.abs(together).max()

    # --- exact attention

    @pytest.mark.parametrize("heads", [2, 6, 14])
    @pytest.mark.parametrize("window", [None, 1, 7, 50, 1000])
    @pytest.mark.parametrize(("start", "n"), [(0, 1), (0, 130), (129, 1), (100, 30)])
    def test_exact_attention_honours_the_window(self, start: int, n: int, window: int | None, heads: int) -> None:
        keys, values = normal(start + n, 2, start + n, 2, 64)
        query = normal(1, n, heads, 64)
        want: NDArray[np.float64] = brute_force(query, keys, values, start, 0.2, window)
        for dtype, tolerance in (("float32", TOLERANCE), ("bfloat16", self.half_tolerance)):
            got = self.arrays.attend_exact(query, keys, values, start, 0.2, window, dtype)
            assert np.abs(got - want).max() < tolerance * np.abs(want).max()

    def test_exact_attention_agrees_with_sealed_attention_inside_tile_zero(self) -> None:
        seq = sequence(100, make(64), 2, seed=31)
        query = normal(32, 100, 4, 64)
        exact = self.arrays.attend_exact(query, seq.keys, seq.values, 0, 0.125, None, "float32")
        sealed = self.arrays.attend(query, seq, 0, 0.125, "float32")
        assert np.abs(exact - sealed).max() < TOLERANCE * np.abs(exact).max()
