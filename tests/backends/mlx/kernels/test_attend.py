"""attend.metal, prefill.metal and combine.metal against the oracle: decode, verify of 2 to 8 tokens, prefill."""

from collections.abc import Callable

import numpy as np
import pytest
from cases import PRESETS, TOLERANCE, assert_attends, attend, make, sequence
from metal_host import MetalHostError
from operation_cases import normal, rounded, seal_sequence, with_changed_token

from kvarn.backends.mlx.kernels import kernels, source
from kvarn.format import HEAD_DIMS, TILE_TOKENS

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 385)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_and_verify_at_every_tile_edge(length: int) -> None:
    seq = sequence(length, make(64), 2, seed=length)
    query = normal(length + 1, length, 6, 64)
    for count in (1, 2, 8):
        if count <= length:
            assert_attends(query[-count:], seq, length - count)


# Every preset with every head_dim; tile lengths and ratios of heads go round.
SHAPES = [
    (d, (64, 128)[(i + j) % 2], bits, (1, 3, 4, 7, 8)[(4 * i + j) % 5], 1 + (i + 2 * j) % 4)
    for i, d in enumerate(HEAD_DIMS)
    for j, bits in enumerate(PRESETS)
]


@pytest.mark.parametrize(("d", "g", "bits", "ratio", "count"), SHAPES)
def test_decode_and_verify_at_every_shape(d: int, g: int, bits: tuple[int, int], ratio: int, count: int) -> None:
    length = 3 * g + 1  # verify of two and more stands on both sides of an edge
    seq = sequence(length, make(d, g, bits), 2 if d < 256 else 1, seed=d + ratio)
    assert_attends(normal(d, length, seq.keys.shape[1] * ratio, d)[-count:], seq, length - count)


# --- the shape lists of the Triton kernels' tests


def edges(g: int) -> tuple[int, ...]:
    """Lengths around every tile edge."""
    return (1, g - 1, g, g + 1, 2 * g - 1, 2 * g, 2 * g + 1, 3 * g - 1, 3 * g, 3 * g + 5, 4 * g)


@pytest.mark.parametrize("g", TILE_TOKENS)
@pytest.mark.parametrize("bits", [*PRESETS, (2, 2), (5, 6)])
@pytest.mark.usefixtures("one_schedule")
def test_every_preset_decodes_at_every_tile_edge(bits: tuple[int, int], g: int) -> None:
    seq = sequence(4 * g, make(64, g, bits), 1, seed=g)
    query = normal(g, 4 * g, 3, 64)
    for length in edges(g):
        assert_attends(query[length - 1 : length], seq, length - 1)


@pytest.mark.parametrize("ratio", [1, 3, 4, 7, 8, 16])
@pytest.mark.usefixtures("one_schedule")
def test_every_ratio_of_heads_decodes_and_verifies(ratio: int) -> None:
    seq = sequence(3 * 64 + 5, make(64), 2, seed=ratio)
    query = normal(ratio, 3 * 64 + 5, 2 * ratio, 64)
    for start, stop in ((39, 40), (3 * 64 + 4, 3 * 64 + 5), (3 * 64 - 2, 3 * 64 + 5), (2 * 64 - 1, 2 * 64 + 1)):
        assert_attends(query[start:stop], seq, start)


@pytest.mark.parametrize("g", TILE_TOKENS)
@pytest.mark.parametrize("length", ["9", "16", "G-1", "G", "G+1", "3G+5"])
@pytest.mark.usefixtures("one_schedule")
def test_prefill_around_tile_edges(length: str, g: int) -> None:
    n = {"9": 9, "16": 16, "G-1": g - 1, "G": g, "G+1": g + 1, "3G+5": 3 * g + 5}[length]
    starts = (0, 1, g - 1, g, 2 * g + 3, 4 * g)
    if n > g + 1:  # a long chunk crosses every kind of edge whatever its start
        starts = (1, 2 * g + 3)
    seq = sequence(starts[-1] + n, make(64, g), 1, seed=n)
    query = normal(n, starts[-1] + n, 1, 64)
    for start in starts:
        assert_attends(query[start : start + n], seq, start)


@pytest.mark.parametrize("g", TILE_TOKENS)
@pytest.mark.parametrize("bits", PRESETS)
@pytest.mark.usefixtures("one_schedule")
def test_every_preset_prefills(bits: tuple[int, int], g: int) -> None:
    seq = sequence(3 * g + 38, make(64, g, bits), 1, seed=g)
    query = normal(g, 3 * g + 38, 3, 64)
    for start, n in ((3 * g - 5, 10), (3 * g - 2, 40)):
        assert_attends(query[start : start + n], seq, start)


@pytest.mark.parametrize("ratio", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.usefixtures("one_schedule")
def test_every_head_dim_and_ratio_prefills(d: int, ratio: int) -> None:
    g = TILE_TOKENS[(ratio + d // 64) % 2]
    seq = sequence(3 * g + 6, make(d, g, (4, 2) if ratio > 3 else (3, 5)), 2, seed=d)
    query = normal(d + 1, 3 * g + 6, 2 * ratio, d)
    assert_attends(query[3 * g - 3 :], seq, 3 * g - 3)


@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.usefixtures("one_schedule")
def test_flags_choose_the_basis_of_every_tile(count: int) -> None:
    """Any flags on any tiles: the oracle reads them by the same rule, whatever they were sealed in."""
    seq = sequence(6 * 64, make(64), 2, seed=3)
    query = normal(4, 6 * 64, 4, 64)[-count:]
    for flags in ([0], [1], [[0, 1], [1, 0], [1, 1], [0, 0], [0, 1]]):
        seq.flags[:] = flags
        seq.pool_flags[seq.blocks] = seq.flags
        assert_attends(query, seq, 6 * 64 - count)


@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.parametrize(
    ("keys", "values", "queries"), [(1e-3, 2.0**12, 2.0**12), (3e4, 2.0**-14, 2.0**-14), (1e-20, 1.0, 2.0**-20)]
)
@pytest.mark.usefixtures("one_schedule")
def test_constants_and_queries_near_the_limits_of_float16(
    keys: float, values: float, queries: float, count: int
) -> None:
    both = normal(5, 2, 3 * 64 + 8, 2, 64) * np.array([keys, values], np.float32).reshape(2, 1, 1, 1)
    seq = seal_sequence(*both, make(64), seed=5)
    query = normal(6, count, 4, 64) * np.float32(queries)
    assert_attends(query, seq, 3 * 64 + 8 - count)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keys_and_queries_of_16_bits_lose_nothing_more(dtype: str) -> None:
    seq = sequence(3 * 64 + 9, make(64), 2, seed=7, dtype=dtype)
    query = rounded(normal(8, 3 * 64 + 9, 6, 64), dtype)
    for start in (3 * 64 + 8, 3 * 64 + 1, 3 * 64 - 4):
        assert_attends(query[start:], seq, start, dtype)


def test_parts_of_several_tiles_meet_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WANTED_THREADGROUPS", 4)
    seq = sequence(12 * 64 + 3, make(64), 1, seed=5)
    query = normal(6, 12 * 64 + 3, 3, 64)
    for count in (1, 3, 12):  # parts of 2 tiles and more, the last one shorter
        assert_attends(query[-count:], seq, len(query) - count)


PREFILL = [
    *((length, start, 64, 64, (4, 2), 3) for length, start in ((9, 0), (64, 0), (65, 0), (129, 60), (257, 200))),
    (150, 120, 128, 128, (4, 2), 4),
    (280, 250, 64, 128, (8, 8), 1),
    (200, 185, 256, 64, (3, 5), 7),
    (200, 188, 512, 64, (4, 4), 8),
]


@pytest.mark.parametrize(("length", "start", "d", "g", "bits", "ratio"), PREFILL)
def test_prefill_on_matrices(length: int, start: int, d: int, g: int, bits: tuple[int, int], ratio: int) -> None:
    seq = sequence(length, make(d, g, bits), 2 if d < 128 else 1, seed=length)
    assert_attends(normal(1, length, seq.keys.shape[1] * ratio, d)[start:], seq, start)


def test_prefill_of_bfloat16() -> None:
    seq = sequence(150, make(64), 1, seed=7, dtype="bfloat16")
    query = rounded(normal(8, 150, 3, 64), "bfloat16")
    assert_attends(query[130:], seq, 130, "bfloat16")


def test_prefill_and_decode_give_the_same() -> None:
    seq = sequence(3 * 64 + 5, make(64), 1, seed=3)
    query = normal(4, 3 * 64 + 5, 3, 64)[-20:]
    together = attend(query, seq, len(seq.keys) - 20, 0.125)
    alone = np.concatenate([attend(query[i : i + 1], seq, len(seq.keys) - 20 + i, 0.125) for i in range(20)])
    assert np.abs(alone - together).max() < TOLERANCE * np.abs(together).max()


# --- causality


def assert_causal(start: int, stop: int, changed: int) -> None:
    """A token never moves an output before it by a bit, and moves its own."""
    seq = sequence(stop, make(64), 1, seed=11)
    query = normal(12, stop, 3, 64)
    other, other_query = with_changed_token(seq, query, changed, seed=13)
    before, after = (attend(q[start:], s, start, 0.125) for q, s in ((query, seq), (other_query, other)))
    np.testing.assert_array_equal(before[: changed - start], after[: changed - start])
    assert (before[changed - start] != after[changed - start]).any()


CAUSAL = [
    (186, 194, 190),
    (186, 194, 191),
    (186, 194, 192),
    (60, 68, 63),
    (40, 80, 50),
    (120, 150, 127),
    (120, 150, 128),
]


@pytest.mark.parametrize(("start", "stop", "changed"), CAUSAL)
def test_a_token_never_moves_an_output_before_it(start: int, stop: int, changed: int) -> None:
    assert_causal(start, stop, changed)


LEAKS = [
    ("attend", "position % TILE_TOKENS + 1", "position % TILE_TOKENS + 2", CAUSAL[0]),  # the next token
    ("attend", "unit + 1 < tile ?", "unit + 1 <= tile ?", CAUSAL[0]),  # a tile that is not finished
    ("prefill", "position % TILE_TOKENS + 1 : 0", "position % TILE_TOKENS + 2 : 0", CAUSAL[4]),
]


@pytest.mark.parametrize(("name", "old", "new", "case"), LEAKS)
def test_a_planted_causality_leak_is_caught(
    name: str, old: str, new: str, case: tuple[int, int, int], plant: Callable[..., None]
) -> None:
    plant(name, old, new, schedules=("forward",), optimize="-O0")
    with pytest.raises((AssertionError, MetalHostError)):
        assert_causal(*case)


# --- other planted faults


@pytest.mark.parametrize(
    ("name", "occurrence"),
    [(name, i) for name in ("attend", "prefill") for i in range(source.read(name).count(BARRIER))],
)
def test_every_barrier_is_missed(name: str, occurrence: int, plant: Callable[..., None]) -> None:
    plant(name, BARRIER, "", occurrence, optimize="-O0")
    seq = sequence(4 * 64 + 30, make(64), 1, seed=1)
    count = 3 if name == "attend" else 30
    with pytest.raises(MetalHostError, match=r"race|uninitialized"):
        attend(normal(2, count, 3, 64), seq, len(seq.keys) - count, 0.125)


READS = [
    ("attend", "strides[3], most, weights, outputs, me);\n    }", "strides[3], 64, weights, outputs, me);\n    }", 1),
    ("attend", "blocks[unit]", "blocks[unit + 1]", 1),
    (
        "prefill",
        "window_strides[2], window_strides[3], count, square",
        "window_strides[2], window_strides[3], 64, square",
        30,
    ),
]


@pytest.mark.parametrize(("name", "old", "new", "count"), READS)
def test_a_planted_read_beyond_a_buffer_is_caught(
    name: str, old: str, new: str, count: int, plant: Callable[..., None]
) -> None:
    plant(name, old, new, schedules=("forward",), optimize="-O0")
    seq = sequence(2 * 64 + 30, make(64), 1, seed=1)
    with pytest.raises(MetalHostError, match=r"out of bounds|uninitialized"):
        attend(normal(2, count, 3, 64), seq, len(seq.keys) - count, 0.125)
