"""The prefill kernels in Triton's interpreter against kvarn.reference.attend and ops.attend."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from kvarn import reference
from kvarn.backends.triton import ops
from kvarn.backends.triton.kernels import prefill as kernel
from kvarn.backends.triton.kernels.prefill_plan import Span, Work, plan
from kvarn.errors import FormatError
from kvarn.format import HEAD_DIMS, TILE_TOKENS, Preset, TileFormat
from kvarn.visibility import num_sealed

TOLERANCE = 2e-3  # of the largest output: float16 products, float32 sums
EXACT_TOLERANCE = 1e-5  # where only exact tokens are read
PRESETS = ("k4v2", "k4v4", "k3v5", "k8v8")
Floats = NDArray[np.float32]
Double = NDArray[np.float64]


def make(widths: str, d: int, g: int) -> TileFormat:
    return Preset.parse(f"kvarn_{widths}_g{g}").with_head_dim(d)


@dataclass
class Prompt:
    """One sequence up to the end of its span, as the oracle reads it."""

    start: int
    query: Floats  # [N, H, D]
    keys: Floats  # [T, Hk, D]
    values: Floats
    blocks: list[int]


@dataclass
class Case:
    """Spans of a step and the pools that they read, with NaN wherever no span must look."""

    fmt: TileFormat
    sequences: list[Prompt]
    spans: list[Span]
    query: Tensor
    keys: Tensor
    values: Tensor
    pool: Tensor
    tiles: Tensor
    flags: Tensor
    blocks: Tensor

    def work(self, *, int8: bool = False) -> Work:
        ratio = self.query.shape[1] // self.keys.shape[1]
        return plan(self.spans, ratio, self.fmt, self.query.dtype, "cpu", int8=int8)

    def run(self, *, int8: bool = False) -> list[Floats]:
        """The outputs of every span; scratch and output are poisoned first."""
        work = self.work(int8=int8)
        scratch = kernel.prefill_scratch(work, self.query.shape[1], "cpu")
        for x in (scratch.stats, scratch.parts):
            x.fill_(torch.nan)
        for x in (scratch.lists, scratch.before):
            x.fill_(2**30)
        output = torch.full(self.query.shape, torch.nan)
        got = kernel.prefill(
            self.query, self.keys, self.values, self.pool, self.tiles, self.flags, self.blocks, work,
            self.fmt.head_dim**-0.5, scratch, output,
        )  # fmt: skip
        assert got is output
        return [output[s.query_at : s.query_at + s.num_tokens].numpy() for s in self.spans]

    def want(self, index: int) -> Double:
        s = self.sequences[index]
        tiles, flags = self.tiles.numpy()[s.blocks], self.flags.numpy()[s.blocks]
        return reference.attend(s.query, s.keys, s.values, tiles, flags, s.start, self.fmt.head_dim**-0.5, self.fmt)

    def check(self, got: Sequence[Floats], tolerance: float = TOLERANCE) -> None:
        for i, s in enumerate(self.sequences):
            assert np.isfinite(got[i]).all(), f"span {i}: garbage was read, or an output was not written"
            error = worst(got[i], self.want(i))
            assert error <= (tolerance if s.blocks else EXACT_TOLERANCE), (
                f"{len(got[i])} tokens at {s.start}: {error:.2g}"
            )


def worst(got: Floats, want: Floats | Double) -> float:
    """The largest error, relative to the largest output."""
    return float(np.abs(got - want).max() / np.abs(want).max())


def make_case(
    fmt: TileFormat,
    spans: Sequence[tuple[int, int]],
    ratio: int,
    *,
    hk: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[float, float, float] = (1.5, 1.0, 1.0),
) -> Case:
    """Sequences whose last tokens, `(start, number)`, are the spans of one step; sizes of queries, keys and values."""
    rng = np.random.default_rng([seed, fmt.head_dim, fmt.tile_tokens, ratio])
    g, d = fmt.tile_tokens, fmt.head_dim
    counts = [num_sealed(start + n - 1, g) for start, n in spans]
    total = sum(counts) + 3
    ids = rng.permutation(total)
    ids = np.roll(ids, -int(np.argmax(ids))).tolist()  # the first block read is the last of the pool
    tiles = np.full((total, hk, fmt.tile_nbytes), 0xFF, np.uint8)  # float16 0xFFFF is a NaN
    flags = np.full((total, hk), 0xFF, np.uint8)
    blocks = np.full((len(spans), max(counts) + 2), 2**30, np.int32)  # what must not be read is far outside of the pool
    pool = torch.full((2 * len(spans) + 1, 2, 2, hk, g, d), torch.nan, dtype=dtype)[:, 1]  # one layer of two
    slots = rng.permutation(len(pool)).tolist()
    rows = [n for _, n in spans]
    query = torch.full((sum(rows) + 1, ratio * hk, d), torch.nan, dtype=dtype)
    fresh = torch.full((2, sum(rows) + 2, hk, d), torch.nan, dtype=dtype)
    sequences, made = [], []
    row = 1
    for i, (start, n) in enumerate(spans):
        stop, own = start + n, start // g
        both = torch.from_numpy(rng.standard_normal((2, stop, hk, d), np.float32))
        both = (both * torch.tensor(sizes[1:])[:, None, None, None]).to(dtype)
        keys, values = both.float().numpy()
        query[row : row + n] = torch.from_numpy(
            rng.standard_normal((n, ratio * hk, d), np.float32) * np.float32(sizes[0])
        )
        mine = [ids.pop(0) for _ in range(counts[i])]
        blocks[i, : counts[i]] = mine
        for t, block in enumerate(mine, 1):
            for j in range(hk):
                at = slice(t * g, (t + 1) * g)
                tiles[block, j], _ = reference.seal(keys[at, j].copy(), values[at, j].copy(), fmt)
                flags[block, j] = rng.integers(0, 2)  # what the codes are of does not matter here
        sink, tail = slots.pop(), slots.pop()
        for slot, t in ((sink, 0), (tail, own)):
            before = both[:, t * g : min(start, (t + 1) * g)].transpose(1, 2)
            if slot == sink or own > 0:
                pool[slot, :, :, : before.shape[2]] = before
        fresh[:, row : row + n] = both[:, start:]
        made.append(
            Span(
                query_at=row, num_tokens=n, start=start, key_at=row, key_start=start,
                sink=sink, tail=tail if start % g and own > 0 else 2**30,
            )
        )  # fmt: skip
        sequences.append(Prompt(start, query[row : row + n].float().numpy(), keys, values, mine))
        row += n
    return Case(
        fmt=fmt,
        sequences=sequences,
        spans=made,
        query=query,
        keys=fresh[0],
        values=fresh[1],
        pool=pool,
        tiles=torch.from_numpy(tiles),
        flags=torch.from_numpy(flags),
        blocks=torch.from_numpy(blocks),
    )


@pytest.mark.parametrize("g", TILE_TOKENS)
@pytest.mark.parametrize("length", ["1", "16", "G-1", "G", "G+1", "3G+5"])
def test_chunks_around_tile_edges(length: str, g: int) -> None:
    n = {"1": 1, "16": 16, "G-1": g - 1, "G": g, "G+1": g + 1, "3G+5": 3 * g + 5}[length]
    starts = (0, 1, g - 1, g, 2 * g + 3, 4 * g)
    if n * g > 20_000:  # a long chunk crosses every kind of edge whatever its start
        starts = (1, 2 * g + 3)
    case = make_case(make("k4v2", 64, g), [(start, n) for start in starts], 1)
    case.check(case.run())


@pytest.mark.parametrize("g", TILE_TOKENS)
@pytest.mark.parametrize("widths", PRESETS)
def test_every_preset(widths: str, g: int) -> None:
    case = make_case(make(widths, 64, g), [(4 * g - 5, 8), (3 * g - 2, 40)], 3)
    case.check(case.run())


@pytest.mark.parametrize("ratio", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_every_head_dim_and_ratio(d: int, ratio: int) -> None:
    g = TILE_TOKENS[(ratio + d // 64) % 2]
    dtype = torch.float16 if d == 512 else torch.float32
    case = make_case(make("k4v2" if ratio > 3 else "k3v5", d, g), [(3 * g - 3, 6)], ratio, hk=2, dtype=dtype)
    case.check(case.run())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_16_bits(dtype: torch.dtype) -> None:
    case = make_case(make("k4v4", 128, 64), [(5, 3), (150, 50)], 2, dtype=dtype)
    case.check(case.run())


def test_a_long_context_of_a_short_span_is_split() -> None:
    fmt = make("k4v2", 64, 64)
    case = make_case(fmt, [(12 * 64 + 60, 6), (20, 10), (11 * 64, 2)], 4)
    work = case.work()
    assert work.num_parts > 6
    assert {int(row) for row in work.merges[:, 3]} == {3}  # ten or eleven tiles, four or fewer in a part
    case.check(case.run())


def test_one_sequence_has_the_arguments_and_the_result_of_the_plain_version() -> None:
    fmt, hk, start, n = make("k3v5", 64, 64), 2, 150, 50
    case = make_case(fmt, [(start, n)], 3, hk=hk)
    prompt = case.sequences[0]
    sink, window = (
        torch.from_numpy(np.stack([prompt.keys[part], prompt.values[part]]).swapaxes(1, 2).copy())
        for part in (slice(0, 64), slice(128, start + n))
    )
    arguments = (
        torch.from_numpy(prompt.query), sink, window, case.tiles, case.flags, torch.tensor(prompt.blocks), start,
        0.2, fmt,
    )  # fmt: skip
    got = kernel.attend(*arguments)
    want = ops.attend(*arguments)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert worst(got.numpy(), want.numpy()) < TOLERANCE


def test_keys_may_reach_back_to_the_tiles_start() -> None:
    case = make_case(make("k4v2", 64, 64), [(150, 20)], 2)
    want = case.run()[0]
    prompt = case.sequences[0]
    case.keys, case.values = (torch.from_numpy(x[128:].copy()) for x in (prompt.keys, prompt.values))
    case.spans = [replace(case.spans[0], key_at=0, key_start=128, tail=2**30)]
    np.testing.assert_array_equal(case.run()[0], want)


@pytest.mark.parametrize("changed", [70, 127, 128, 190])
def test_a_token_does_not_move_what_comes_before_it(changed: int) -> None:
    """To the bit, though the tile that it stands in is sealed anew and read by later queries of the same chunk."""
    fmt, start, n = make("k4v2", 64, 64), 61, 140
    first = make_case(fmt, [(start, n)], 3)
    second = make_case(fmt, [(start, n)], 3)
    at, prompt = changed - start, second.sequences[0]
    for x in (prompt.keys, prompt.values):
        x[changed] += np.float32(3)
    row = second.spans[0].key_at + at
    second.keys[row] += 3
    second.values[row] += 3
    for t, block in enumerate(prompt.blocks, 1):
        if t == changed // 64:
            tokens = slice(t * 64, (t + 1) * 64)
            tile, _ = reference.seal(prompt.keys[tokens, 0].copy(), prompt.values[tokens, 0].copy(), fmt)
            assert (tile != second.tiles[block, 0].numpy()).any()
            second.tiles[block, 0] = torch.from_numpy(tile)
    before, after = first.run()[0], second.run()[0]
    np.testing.assert_array_equal(after[:at], before[:at])
    assert (after[at] != before[at]).any()
    second.check([after])


def test_a_span_gets_the_same_bits_alone_and_beside_others() -> None:
    fmt = make("k4v2", 64, 64)
    case = make_case(fmt, [(300, 4), (130, 70), (2, 3), (700, 2)], 2)
    together = case.run()
    for i, span in enumerate(case.spans):
        alone = replace(case, sequences=[case.sequences[i]], spans=[span], blocks=case.blocks[i : i + 1])
        np.testing.assert_array_equal(alone.run()[0], together[i])


@pytest.mark.parametrize("sizes", [(1e-3, 2.0**12, 2.0**12), (3e4, 2.0**-14, 2.0**-14), (1e-20, 1.0, 2.0**-20)])
def test_constants_and_queries_near_the_limits_of_float16(sizes: tuple[float, float, float]) -> None:
    case = make_case(make("k4v2", 64, 64), [(200, 8)], 2, sizes=sizes)
    case.check(case.run())


def test_scores_of_4_bit_keys_as_integers_are_within_their_measured_error() -> None:
    """A query rounded to int8 per row and tile: 0.8 % of the largest output here, against 0.05 % in float16."""
    case = make_case(make("k4v4", 128, 64), [(300, 16)], 4)
    want = case.want(0)
    exact, rounded = worst(case.run()[0], want), worst(case.run(int8=True)[0], want)
    assert exact < TOLERANCE
    assert exact < rounded < 2e-2


@given(
    spans=st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 600)), min_size=1, max_size=4),
    ratio=st.sampled_from([1, 3, 4, 7, 16]),
    d=st.sampled_from(HEAD_DIMS),
    g=st.sampled_from(TILE_TOKENS),
)
def test_items_cover_every_position_and_every_sealed_tile_once(
    spans: list[tuple[int, int]], ratio: int, d: int, g: int
) -> None:
    fmt = make("k4v2", d, g)
    made, at = [], 0
    for start, n in spans:
        made.append(Span(query_at=at, num_tokens=n, start=start, key_at=at, key_start=start, sink=0, tail=1))
        at += n
    work = plan(made, ratio, fmt, torch.bfloat16, "cpu")
    read: dict[int, list[int]] = {row: [] for row in range(at)}
    exact, parts, split = [], [], set()
    for launch in work.launches:
        for item in launch.items.tolist():
            row, count, start, key_at, key_start, _, _, span, low, high, own, part = item
            assert 1 <= count <= launch.rows // ratio
            assert start // g == (start + count - 1) // g
            assert (row - made[span].query_at, key_at + key_start) == (start - spans[span][0], made[span].key_at)
            for i in range(count):
                read[row + i] += range(low, high)
                exact += [row + i] * own
            if part >= 0:
                parts += range(part, part + count)
                split |= set(range(row, row + count))
    assert sorted(exact) == list(range(at))
    assert sorted(parts) == list(range(work.num_parts))
    merges = work.merges.tolist()
    assert sorted(row for row, *_ in merges) == sorted(split)
    assert sorted(p + i * step for _, p, step, n in merges for i in range(n)) == list(range(work.num_parts))
    for span, (start, n) in zip(made, spans, strict=True):
        for i in range(n):
            assert sorted(read[span.query_at + i]) == list(range(num_sealed(start + i, g)))
        assert work.num_tiles >= num_sealed(start + n - 1, g)


def test_what_the_kernel_does_not_take_is_refused_by_name() -> None:
    span = Span(query_at=0, num_tokens=4, start=9, key_at=0, key_start=9, sink=0, tail=1)
    with pytest.raises(FormatError, match="float32 at head_dim 512"):
        plan([span], 1, make("k4v2", 512, 64), torch.float32, "cpu")
    with pytest.raises(FormatError, match="48 query heads per kv head at head_dim 256 are more than the 32"):
        plan([span], 48, make("k4v2", 256, 64), torch.bfloat16, "cpu")
    with pytest.raises(FormatError, match="0 tokens at 9"):
        plan([replace(span, num_tokens=0)], 1, make("k4v2", 64, 64), torch.bfloat16, "cpu")
    with pytest.raises(FormatError, match="keys from 10 on"):
        plan([replace(span, key_start=10)], 1, make("k4v2", 64, 64), torch.bfloat16, "cpu")
