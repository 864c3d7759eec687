"""The decode kernels in Triton's interpreter against kvarn.reference.attend and ops.decode."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from kvarn import reference, tile
from kvarn.backend import LoadOptions
from kvarn.backends.triton import ops
from kvarn.backends.triton.kernels import decode as kernel
from kvarn.backends.triton.model import Attention, load_model
from kvarn.errors import FormatError
from kvarn.format import TILE_TOKENS, Preset, TileFormat
from kvarn.visibility import num_sealed

TOLERANCE = 2e-3  # of the largest output: float16 products, float32 sums
EXACT_TOLERANCE = 1e-5  # where only exact tiles are read
PRESETS = ("k4v2", "k4v4", "k3v5", "k8v8", "k2v2", "k5v6")
Floats = NDArray[np.float32]


def make(widths: str, d: int, g: int) -> TileFormat:
    return Preset.parse(f"kvarn_{widths}_g{g}").with_head_dim(d)


def random_tiles(rng: np.random.Generator, count: int, hk: int, fmt: TileFormat) -> tile.Bytes:
    """Tiles of random codes, centered on zero as sealed ones are, `uint8 [count, Hk, nbytes]`."""

    def half(name: str, low: float, high: float) -> tile.Halves:
        return rng.uniform(low, high, (count, hk, *fmt.fields[name].shape)).astype(np.float16)

    def codes(name: str, bits: int) -> tile.Words:
        shape = (count, hk, *fmt.fields[name].shape)
        return rng.integers(0, 2**32, shape, np.uint32)

    k_step, v_step = 4 / 2**fmt.key_bits, 4 / 2**fmt.value_bits
    return tile.join(
        tile.TileFields(
            k_codes=codes("k_codes", fmt.key_bits),
            k_scale=half("k_scale", 0.5 * k_step, 1.5 * k_step),
            k_zero=half("k_zero", -2.5, -1.5),
            k_token=half("k_token", 0.3, 1.7),
            v_codes=codes("v_codes", fmt.value_bits),
            v_scale=half("v_scale", 0.5 * v_step, 1.5 * v_step),
            v_zero=half("v_zero", -2.5, -1.5),
            v_channel=half("v_channel", 0.3, 1.7),
        ),
        fmt,
    )


@dataclass
class Case:
    """A batch of unequal rows and the pools that hold them, with NaN wherever no row must look."""

    fmt: TileFormat
    hk: int
    lengths: Sequence[int]
    query: Tensor  # [B, H, D]
    pool: Tensor
    pages: kernel.Pages
    tiles: Tensor
    flags: Tensor
    blocks: Tensor
    keys: list[Floats]  # of every row, [T, Hk, D]
    values: list[Floats]
    splits: int

    def run(self) -> Floats:
        """The kernels' output; what they must write before they read it is NaN."""
        b, h, d = self.query.shape
        plan = kernel.DecodePlan(self.splits)
        scratch = plan.scratch(b, h, d, "cpu")
        for x in (scratch.folded, scratch.peaks, scratch.stats, scratch.parts):
            x.fill_(torch.nan)
        output = torch.full((b, h, d), torch.nan)
        pools = self.pool, self.pages, self.tiles, self.flags, self.blocks
        assert kernel.decode(self.query, *pools, d**-0.5, self.fmt, plan, scratch, output) is output
        got: Floats = output.numpy()
        return got

    def sealed(self, row: int) -> list[int]:
        return self.blocks[row, : num_sealed(self.lengths[row] - 1, self.fmt.tile_tokens)].tolist()

    def want(self, row: int) -> NDArray[np.float64]:
        length, d = self.lengths[row], self.fmt.head_dim
        if length == 0:
            return np.zeros(self.query.shape[1:])
        query = self.query[row : row + 1].float().numpy()
        tiles, flags = self.tiles.numpy()[self.sealed(row)], self.flags.numpy()[self.sealed(row)]
        return reference.attend(query, self.keys[row], self.values[row], tiles, flags, length - 1, d**-0.5, self.fmt)[0]

    def check(self, got: Floats, rows: Sequence[int] | None = None) -> None:
        assert np.isfinite(got).all(), "garbage was read, or an output was not written"
        for row in range(len(self.lengths)) if rows is None else rows:
            want = self.want(row)
            tolerance = TOLERANCE if self.sealed(row) else EXACT_TOLERANCE
            error = np.abs(got[row] - want).max() / max(np.abs(want).max(), 1e-30)
            assert error <= tolerance, f"row {row} of {self.lengths[row]} tokens: {error:.2g}"


def make_case(
    fmt: TileFormat,
    lengths: Sequence[int],
    ratio: int,
    *,
    hk: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    splits: int = 1,
    spare: int = 2,
) -> Case:
    rng = np.random.default_rng([seed, fmt.head_dim, fmt.tile_tokens, ratio])
    b, g, d = len(lengths), fmt.tile_tokens, fmt.head_dim
    counts = [num_sealed(length - 1, g) for length in lengths]
    width = max(counts) + spare
    total = sum(counts) + 3
    ids = rng.permutation(total)
    ids = np.roll(ids, -int(np.argmax(ids)))  # the first block read is the last of the pool
    tiles = np.full((total, hk, fmt.tile_nbytes), 0xFF, np.uint8)  # float16 0xFFFF is a NaN
    flags = np.full((total, hk), 0xFF, np.uint8)
    blocks = np.full((b, width), 2**30, np.int32)  # what must not be read is far outside of the pool
    at = 0
    for row, count in enumerate(counts):
        blocks[row, :count] = ids[at : at + count]
        at += count
    used = ids[:at]
    tiles[used] = random_tiles(rng, at, hk, fmt)
    flags[used] = rng.integers(0, 2, (at, hk))
    pool = torch.full((2 * b + 2, 2, 2, hk, g, d), torch.nan, dtype=dtype)[:, 1]  # one layer of two
    slots = rng.permutation(2 * b + 2)[: 2 * b].reshape(2, b)
    keys, values = [], []
    for row, length in enumerate(lengths):
        both = torch.from_numpy(rng.standard_normal((2, length, hk, d), np.float32)).to(dtype)
        keys.append(both[0].float().numpy())
        values.append(both[1].float().numpy())
        own = max(length - 1, 0) // g
        for slot, t in ((slots[0, row], 0), (slots[1, row], own)):
            if (t > 0 or slot == slots[0, row]) and length:
                part = both[:, t * g : (t + 1) * g].transpose(1, 2)
                pool[slot, :, :, : part.shape[2]] = part
    sink, tail = (torch.from_numpy(x.astype(np.int32)) for x in slots)
    tail[torch.tensor([length <= g for length in lengths])] = 2**30
    return Case(
        fmt=fmt,
        hk=hk,
        lengths=lengths,
        query=torch.from_numpy(rng.standard_normal((b, ratio * hk, d), np.float32) * np.float32(2)).to(dtype),
        pool=pool,
        pages=kernel.Pages(sink, tail, torch.tensor(lengths, dtype=torch.int32)),
        tiles=torch.from_numpy(tiles),
        flags=torch.from_numpy(flags),
        blocks=torch.from_numpy(blocks),
        keys=keys,
        values=values,
        splits=splits,
    )


def edges(g: int) -> tuple[int, ...]:
    """Lengths around every tile edge, and a padded row among them."""
    return (1, g - 1, g, 0, g + 1, 2 * g, 2 * g + 1, 3 * g + 5, 4 * g)


# --- against the oracle


@pytest.mark.parametrize("g", TILE_TOKENS)
@pytest.mark.parametrize("widths", PRESETS)
def test_a_batch_of_unequal_rows_decodes_as_the_oracle_says(widths: str, g: int) -> None:
    case = make_case(make(widths, 64, g), edges(g), 3, hk=1)
    case.check(case.run())


@pytest.mark.parametrize(("d", "g", "widths"), [(128, 64, "k5v6"), (128, 128, "k4v2"), (256, 64, "k3v5")])
def test_wider_heads_decode_as_the_oracle_says(d: int, g: int, widths: str) -> None:
    case = make_case(make(widths, d, g), (1, g + 1, 2 * g + 1, 3 * g + 5), 4)
    case.check(case.run())


@pytest.mark.parametrize("widths", ["k4v4", "k8v8", "k2v2"])
def test_heads_of_512_decode_as_the_oracle_says(widths: str) -> None:
    case = make_case(make(widths, 512, 128), (3 * 128 + 5,), 2, hk=1)
    case.check(case.run())


@pytest.mark.parametrize("ratio", [1, 4, 7, 8, 16])
def test_every_ratio_of_heads_decodes_as_the_oracle_says(ratio: int) -> None:
    case = make_case(make("k4v2", 64, 64), (40, 3 * 64 + 5), ratio)
    case.check(case.run())


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8, 20])
def test_splits_meet_without_a_seam(splits: int) -> None:
    """Seven sealed tiles in fewer splits, in as many and in more; a row of one, and one of none."""
    case = make_case(make("k4v4", 64, 64), (9 * 64 - 3, 2 * 64 + 1, 70), 2, hk=1, splits=splits)
    case.check(case.run())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_lose_nothing_more(dtype: torch.dtype) -> None:
    case = make_case(make("k4v2", 64, 64), (33, 3 * 64 + 5), 4, dtype=dtype)
    case.check(case.run())


# --- what must not matter


def test_a_row_gets_the_same_bits_whatever_stands_beside_it() -> None:
    case = make_case(make("k3v5", 64, 64), (3 * 64 + 5, 1, 5 * 64, 0, 64), 3, splits=2)
    together = case.run()
    for row in (0, 2, 4):
        alone = replace(
            case,
            query=case.query[row : row + 1],
            pages=kernel.Pages(*(x[row : row + 1] for x in (case.pages.sink, case.pages.tail, case.pages.length))),
            blocks=case.blocks[row : row + 1],
        )
        np.testing.assert_array_equal(alone.run()[0], together[row])


def test_unequal_flags_choose_the_basis_of_every_tile() -> None:
    case = make_case(make("k4v2", 64, 64), (6 * 64,), 2, hk=2, seed=3)
    used = case.sealed(0)
    for flags in (0, 1):
        case.flags[used] = flags
        case.check(case.run())
    case.flags[used] = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]], dtype=torch.uint8)
    case.check(case.run())


@pytest.mark.parametrize("factor", [0.0, 2.0**-30, 2.0**10])
def test_queries_of_any_size_take_on_any_scale(factor: float) -> None:
    """Key scales near float16's limit and subnormal ones: the folded query neither overflows nor vanishes."""
    case = make_case(make("k8v8", 64, 64), (4 * 64,), 2, hk=1, seed=5)
    case = replace(case, query=case.query * factor)
    field = case.fmt.fields["k_scale"]
    tiles = case.tiles[:, :, field.offset : field.offset + field.nbytes].view(torch.float16)
    token = case.fmt.fields["k_token"]
    tokens = case.tiles[:, :, token.offset : token.offset + token.nbytes].view(torch.float16)
    first, second = case.sealed(0)[:2]
    zero = case.fmt.fields["k_zero"]
    zeros = case.tiles[:, :, zero.offset : zero.offset + zero.nbytes].view(torch.float16)
    tiles[first], zeros[first], tokens[first] = tiles[first] * 2e6, zeros[first] * 1e4, tokens[first] * 1e-5
    tiles[second, :, ::2] = 2.0**-24
    got = case.run()
    assert np.isfinite(got).all()
    if factor < 2:
        case.check(got)


def test_query_rows_may_lie_apart() -> None:
    case = make_case(make("k4v2", 64, 64), (70, 3 * 64), 2)
    apart = torch.full((2, 3, 4, 64), torch.nan)
    apart[:, 1] = case.query
    np.testing.assert_array_equal(replace(case, query=apart[:, 1]).run(), case.run())


# --- the plan, the plain version, faults


def test_the_plan_depends_on_shapes_alone_and_is_bounded() -> None:
    assert kernel.decode_plan(0, 128, 8).splits == 1
    assert kernel.decode_plan(128, 128, 8).splits == 32
    assert kernel.decode_plan(1024, 128, 8).splits == kernel.decode_plan(100_000, 64, 8).splits == 128
    assert kernel.decode_plan(1024, 128, 10_000).splits == 1
    scratch = kernel.decode_plan(128, 128, 8).scratch(3, 32, 64, "cpu")
    assert [list(x.shape) for x in (scratch.folded, scratch.peaks, scratch.stats, scratch.parts)] == [
        [3, 32, 2, 64],
        [3, 32],
        [3, 32, 34, 2],
        [3, 32, 34, 64],
    ]


def test_what_does_not_fit_together_is_refused() -> None:
    case = make_case(make("k4v2", 64, 64), (70,), 2)
    wrong = {
        "query": case.query[:, :3],
        "pool": case.pool.half(),
        "tiles": case.tiles[..., 1:],
        "flags": case.flags.int(),
        "blocks": case.blocks.long(),
        "fmt": make("k4v4", 64, 64),
    }
    for name, value in wrong.items():
        with pytest.raises(FormatError, match="decode of kvarn_"):
            replace(case, **{name: value}).run()


class Captured(Exception):
    """The layer that was wanted has been reached."""


def demo_layer(demo_dir: Path, wanted: int = 2, length: int = 3 * 128 + 50) -> Attention:
    """What one layer of the demo model hands to attention for the beginning of this file."""
    tokenizer = Tokenizer.from_file(str(demo_dir / "tokenizer.json"))
    tokens = tokenizer.encode(Path(__file__).read_text()).ids[:length]
    model = load_model(demo_dir, LoadOptions(dtype="float32", device="cpu"))
    model.module.set_attn_implementation("kvarn")
    calls: list[Attention] = []

    def hook(call: Attention) -> Tensor:
        calls.append(call)
        if call.layer == wanted:
            raise Captured
        return ops.attend_exact(call.query, call.key, call.value, 0, call.scale)

    with pytest.raises(Captured):
        model.forward(tokens, list(range(length)), [], hook)
    return calls[-1]


def test_a_layer_of_the_demo_model_decodes_as_the_plain_version_does(demo_dir: Path) -> None:
    """Queries, keys and values of real text in one layer, sealed by the plain version."""
    call = demo_layer(demo_dir)
    query, keys, values = call.query, call.key, call.value
    fmt, length = make("k4v2", 64, 128), len(query)
    g, hk = fmt.tile_tokens, keys.shape[1]
    both = torch.stack([keys, values]).transpose(1, 2)  # [2, Hk, T, D]
    whole = both[:, :, : length // g * g].unflatten(2, (-1, g)).transpose(1, 2)  # [2, tiles, Hk, G, D]
    tiles, flags, _ = ops.seal(*whole[:, 1:].contiguous(), fmt)
    pool = torch.full((2, 2, hk, g, 64), torch.nan)
    pool[0] = both[:, :, :g]
    rest = length - length // g * g
    pool[1, :, :, :rest] = both[:, :, length - rest :]
    count = num_sealed(length - 1, g)
    ids = torch.arange(count, dtype=torch.int32)[None]
    pages = kernel.Pages(*(torch.tensor([x], dtype=torch.int32) for x in (0, 1, length)))
    plan = kernel.decode_plan(count, g, hk)
    output = torch.empty(1, *query.shape[1:])
    scratch = plan.scratch(1, query.shape[1], 64, "cpu")
    got = kernel.decode(query[-1:], pool, pages, tiles, flags, ids, 0.125, fmt, plan, scratch, output)
    want = ops.decode(
        query[-1:],
        pool,
        ops.Pages(torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([g, rest])),
        tiles,
        flags,
        ops.Tiles(torch.zeros(count, dtype=torch.int64), torch.arange(count)),
        0.125,
        fmt,
    )
    assert float((got - want).abs().max()) < TOLERANCE * float(want.abs().max())
