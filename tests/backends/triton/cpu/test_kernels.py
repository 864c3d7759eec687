"""The C++ kernels against the oracle: attention within TOLERANCE, sealing by the byte, in each instruction set."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvarn import reference
from kvarn.backends.triton import ops
from kvarn.backends.triton.cpu import build, kernels
from kvarn.errors import BackendError, SealError
from kvarn.format import SealStatus, TileFormat
from kvarn.visibility import num_sealed

TOLERANCE = 3e-6  # of the largest output, float32 sums against the oracle's float64
HERE = build.instruction_set(build.processor_flags())


def make(key_bits: int, value_bits: int, g: int, d: int) -> TileFormat:
    return TileFormat(key_bits=key_bits, value_bits=value_bits, tile_tokens=g, head_dim=d)


# Every width for keys and for values, every head_dim, both tile lengths, every ratio of query to kv heads.
CASES = [
    (make(4, 2, 128, 64), 3, HERE),
    (make(2, 4, 64, 64), 1, HERE),
    (make(3, 5, 64, 128), 4, HERE),
    (make(5, 3, 128, 256), 7, HERE),
    (make(6, 8, 64, 512), 2, HERE),
    (make(8, 6, 128, 128), 8, HERE),
    (make(4, 2, 128, 64), 9, HERE),
    (make(4, 2, 128, 64), 3, "portable"),
    (make(6, 8, 64, 512), 5, "portable"),
]
if HERE == "avx512":
    CASES += [(make(4, 2, 128, 64), 4, "avx2"), (make(5, 3, 128, 256), 3, "avx2"), (make(8, 6, 128, 128), 7, "avx2")]
NAMES = [f"{fmt.name}-d{fmt.head_dim}-x{per}-{instructions}" for fmt, per, instructions in CASES]
every_case = pytest.mark.parametrize(("fmt", "per", "instructions"), CASES, ids=NAMES)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels whose scratch memory begins as NaN, for the instruction set of the case."""
    case = getattr(request.node, "callspec", None)
    instructions = HERE if case is None else case.params.get("instructions", HERE)
    monkeypatch.setattr(kernels, "library", functools.partial(build.library, instructions=instructions, poison=True))
    kernels.load.cache_clear()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    kernels.load.cache_clear()


@dataclass(frozen=True)
class Sequence:
    """A random sequence with its sealed tiles, exact keys and values `[2, Hk, T, D]`, and a query per token."""

    fmt: TileFormat
    exact: Tensor
    query: Tensor  # [T, H, D]
    tiles: Tensor  # [B, Hk, nbytes]
    flags: Tensor

    @classmethod
    def random(cls, fmt: TileFormat, per: int, length: int, dtype: torch.dtype = torch.float32) -> "Sequence":
        g, d, hk = fmt.tile_tokens, fmt.head_dim, 2
        generator = torch.Generator().manual_seed(length)
        exact = torch.randn(2, hk, length, d, generator=generator)
        exact[0, 0, :, 1] += 9  # where the plain keys are the better candidate
        exact = exact.to(dtype)
        query = torch.randn(length, hk * per, d, generator=generator)
        count = num_sealed(length - 1, g)
        parts = exact[:, :, g : (count + 1) * g].float().reshape(2, hk, count, g, d).transpose(1, 2)
        tiles, flags, _ = ops.seal(parts[0], parts[1], fmt)
        return cls(fmt, exact, query, tiles, flags)

    def reference(self, start: int, stop: int) -> Tensor:
        keys, values = self.exact[:, :, :stop].float().transpose(1, 2).numpy()
        reads = num_sealed(stop - 1, self.fmt.tile_tokens)
        tiles, flags = self.tiles[:reads].numpy(), self.flags[:reads].numpy()
        query = self.query[start:stop].numpy()
        return torch.from_numpy(
            reference.attend(query, keys, values, tiles, flags, start, self.fmt.head_dim**-0.5, self.fmt)
        )

    def scattered(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tiles in a pool with unused blocks of NaN between them, and where they stand."""
        count = len(self.tiles)
        where = torch.randperm(count + 3, generator=torch.Generator().manual_seed(3))[:count]
        pool = torch.full((count + 3, *self.tiles.shape[1:]), 255, dtype=torch.uint8)
        flags = torch.full((count + 3, self.tiles.shape[1]), 1, dtype=torch.uint8)
        pool[where], flags[where] = self.tiles, self.flags
        return pool, flags, where

    def attend(self, start: int, stop: int) -> Tensor:
        g = self.fmt.tile_tokens
        tiles, flags, where = self.scattered()
        reads = num_sealed(stop - 1, g)
        sink, window = self.exact[:, :, :g], self.exact[:, :, start // g * g : stop]
        scale = self.fmt.head_dim**-0.5
        args = (self.query[start:stop], sink, window, tiles, flags, where[:reads], start)
        return kernels.attend(*args, scale, self.fmt)


def decode(sequence: Sequence, positions: list[int]) -> Tensor:
    """The queries of several positions of one sequence as the rows of one decode step."""
    fmt, g = sequence.fmt, sequence.fmt.tile_tokens
    tiles, flags, where = sequence.scattered()
    slots = torch.full((2 * len(positions) + 1, 3, *sequence.exact.shape[:2], g, fmt.head_dim), torch.nan)
    slots = slots.to(sequence.exact.dtype)
    pool = slots[:, 1]  # a layer of several: pages are not side by side
    pages, blocks = [], []
    for row, position in enumerate(positions):
        first = position // g * g
        own = sequence.exact[:, :, first : position + 1]
        pool[2 * row + 1, :, :, : own.shape[2]] = own
        pages.append((row, 2 * row + 1, own.shape[2]))
        if first > 0:
            pool[2 * row] = sequence.exact[:, :, :g]
            pages.append((row, 2 * row, g))
        blocks += [(row, int(where[i])) for i in range(num_sealed(position, g))]

    def columns(rows: list[tuple[int, ...]], count: int) -> list[Tensor]:
        return [torch.tensor([row[k] for row in rows], dtype=torch.int64) for k in range(count)]

    return kernels.decode(
        sequence.query[positions],
        pool,
        ops.Pages(*columns(pages, 3)),
        tiles,
        flags,
        ops.Tiles(*columns(blocks, 2)),
        fmt.head_dim**-0.5,
        fmt,
    )


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.float32
    error = float((got.double() - want).abs().max() / want.abs().max())
    assert error < TOLERANCE, f"relative error {error:.1e}"  # a NaN fails, too


@every_case
def test_prefill_is_the_references(fmt: TileFormat, per: int, instructions: str) -> None:
    """Queries of several tiles, a whole tile among them; the oracle is slow and gets the ends of the longest run."""
    g = fmt.tile_tokens
    sequence = Sequence.random(fmt, per, 4 * g + 5)
    for start, stop in ((0, 1), (g - 2, g + 3), (2 * g - 1, 2 * g + 1), (3 * g, 3 * g + 7), (4 * g - 9, 4 * g + 5)):
        assert_close(sequence.attend(start, stop), sequence.reference(start, stop))
    got = sequence.attend(g - 3, 4 * g + 5)
    for start, stop in ((g - 3, g + 2), (2 * g + 31, 2 * g + 34), (4 * g - 2, 4 * g + 5)):
        assert_close(got[start - g + 3 : stop - g + 3], sequence.reference(start, stop))


@every_case
def test_decode_is_the_references(fmt: TileFormat, per: int, instructions: str) -> None:
    g = fmt.tile_tokens
    sequence = Sequence.random(fmt, per, 10 * g + 2)
    positions = [0, g - 1, g, 2 * g - 1, 2 * g, 3 * g + 1, 10 * g + 1]  # of 9 sealed tiles 8 make a piece
    got = decode(sequence, positions)
    for row, position in enumerate(positions):
        assert_close(got[row : row + 1], sequence.reference(position, position + 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pools_in_half_precision(dtype: torch.dtype) -> None:
    fmt = make(4, 2, 128, 64)
    sequence = Sequence.random(fmt, 3, 3 * 128 + 9, dtype)
    assert_close(sequence.attend(380, 393), sequence.reference(380, 393))
    assert_close(decode(sequence, [391]), sequence.reference(391, 392))


def test_any_number_of_threads_gives_the_same_bits() -> None:
    sequence = Sequence.random(make(4, 2, 128, 64), 3, 20 * 128 + 9)
    runs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        runs.append((sequence.attend(2300, 2569), decode(sequence, [0, 200, 1500, 2500])))
    for prefill, rows in runs[1:]:
        assert torch.equal(prefill, runs[0][0])
        assert torch.equal(rows, runs[0][1])


def test_a_row_does_not_depend_on_its_batch() -> None:
    sequence = Sequence.random(make(4, 2, 128, 64), 3, 6 * 128)
    together = decode(sequence, [5, 700, 300])
    for row, position in enumerate([5, 700, 300]):
        assert torch.equal(decode(sequence, [position])[0], together[row])


def test_rows_in_any_order_in_the_lists() -> None:
    fmt = make(4, 2, 128, 64)
    pool = torch.randn(4, 2, 1, 128, 64)
    query = torch.randn(2, 3, 64)
    none = ops.Tiles(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    pages = ops.Pages(torch.tensor([1, 0, 1, 0]), torch.tensor([3, 0, 1, 2]), torch.tensor([7, 128, 128, 1]))
    got = kernels.decode(query, pool, pages, None, None, none, 0.125, None)
    want = ops.decode(query, pool, pages, None, None, none, 0.125, None)
    assert_close(got, want.double())
    assert kernels.decode(query, pool, pages, None, None, none, 0.125, fmt).equal(got)


def test_a_page_that_no_kernel_reads_goes_to_the_plain_version() -> None:
    pool, query = torch.randn(2, 2, 1, 32, 24), torch.randn(1, 3, 24)
    none = ops.Tiles(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    pages = ops.Pages(torch.zeros(2, dtype=torch.int64), torch.arange(2), torch.tensor([32, 5]))
    args = (query, pool, pages, None, None, none, 0.2, None)
    assert kernels.decode(*args).equal(ops.decode(*args))


def test_what_comes_later_moves_nothing_before() -> None:
    sequence = Sequence.random(make(4, 2, 128, 64), 3, 3 * 128 + 40)
    before = sequence.attend(390, 424)
    sequence.exact[:, :, 410] += 3
    after = sequence.attend(390, 424)
    assert torch.equal(before[:20], after[:20])
    assert not torch.equal(before[20:], after[20:])


def test_the_exponential_is_precise_to_the_last_digits() -> None:
    """One page whose values are the unit matrix shows the weights of the softmax themselves."""
    score = -1.3 * torch.arange(64, dtype=torch.float32)
    pool = torch.zeros(1, 2, 1, 64, 64)
    pool[0, 0, 0, :, 0], pool[0, 1, 0] = score, torch.eye(64)
    query = torch.zeros(1, 1, 64)
    query[0, 0, 0] = 1
    none = ops.Tiles(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    pages = ops.Pages(*(torch.tensor([x]) for x in (0, 0, 64)))
    got = kernels.decode(query, pool, pages, None, None, none, 1.0, make(2, 4, 64, 64))[0, 0].double()
    want = score.double().softmax(-1)
    assert float((got / want - 1).abs().max()) < 1e-6


def test_an_index_outside_the_pools_is_an_error() -> None:
    sequence = Sequence.random(make(4, 2, 128, 64), 1, 3 * 128)
    tiles, flags, _ = sequence.scattered()
    far = torch.tensor([len(tiles)])
    sink, window = sequence.exact[:, :, :128], sequence.exact[:, :, 256:]
    with pytest.raises(BackendError, match=f"outside the pool of {len(tiles)} blocks"):
        kernels.attend(sequence.query[256:], sink, window, tiles, flags, far, 256, 0.125, sequence.fmt)
    pages = ops.Pages(*(torch.tensor([x]) for x in (0, 1, 5)))
    none = ops.Tiles(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    with pytest.raises(BackendError, match="outside the pools of 1 slots"):
        kernels.decode(sequence.query[:1], torch.zeros(1, 2, 2, 128, 64), pages, None, None, none, 1.0, sequence.fmt)


# --- sealing


def awkward(fmt: TileFormat) -> tuple[Tensor, Tensor]:
    """Random tiles beside dead, biased, tiny, huge, tied and refused ones, `[T, G, D]`."""
    keys, values = torch.randn(2, 15, fmt.tile_tokens, fmt.head_dim, generator=torch.Generator().manual_seed(5))
    keys[1], values[1] = 0, 0
    keys[2], values[2] = 3.25, -0.7
    keys[3, :, 5], values[3, 7], keys[3, 9], values[3, :, 11] = 0, 0, 0, 0
    keys[4, :, 3] += 3000
    values[4, :, 3] += 3000
    keys[5] *= 40
    keys[6], values[6] = keys[6] * 2.0**-60, values[6] * 2.0**-60
    keys[7] *= 1e6
    values[8] *= 1e6
    keys[9, 1, 2] = torch.nan
    values[10, 3, 4] = torch.inf
    keys[11, ::2], values[11, ::3] = -0.0, -0.0
    keys[12, 17], values[12, :, 17] = keys[12, 17] * 1000, values[12, :, 17] * 1000
    keys[13], values[13] = keys[13] * 2.0**-140, values[13] * 2.0**-140
    keys[14] *= 1e37
    return keys, values


@every_case
def test_sealed_bytes_are_the_oracles(fmt: TileFormat, per: int, instructions: str) -> None:
    keys, values = awkward(fmt)
    tiles, flags, status = kernels.seal(keys, values, fmt)
    for i in range(len(keys)):
        word = SealStatus(int(status[i]))
        if word != SealStatus.OK:
            with pytest.raises(SealError) as refused:
                reference.seal(keys[i].numpy(), values[i].numpy(), fmt)
            assert word.reason == refused.value.reason, f"tile {i}"
            continue
        want, flag = reference.seal(keys[i].numpy(), values[i].numpy(), fmt)
        np.testing.assert_array_equal(tiles[i].numpy(), want, err_msg=f"tile {i}")
        assert flags[i] == flag


def test_tiles_are_sealed_each_by_itself_on_any_threads() -> None:
    fmt = make(4, 2, 128, 64)
    keys, values = torch.randn(2, 3, 5, 128, 64)
    keys[1] *= 40
    torch.set_num_threads(2)
    tiles, flags, status = kernels.seal(keys, values, fmt)
    assert tiles.shape == (3, 5, fmt.tile_nbytes)
    assert flags.shape == status.shape == (3, 5)
    torch.set_num_threads(1)
    for i in range(3):
        assert torch.equal(kernels.seal(keys[i], values[i], fmt)[0], tiles[i])


def test_on_the_demo_model_every_operation_gives_what_the_plain_one_gives(
    demo_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvarn.backend import LoadOptions
    from kvarn.backends.triton import backend as backend_module
    from kvarn.backends.triton.backend import load
    from kvarn.backends.triton.dispatch import Operations
    from kvarn.engine import Engine, EngineConfig
    from kvarn.format import Preset
    from kvarn.request import RequestParams

    ran = {"seal": 0, "decode": 0, "attend": 0}

    def both(name: str) -> "functools.partial[object]":
        def run(*args: object) -> object:
            ran[name] += 1
            mine, plain = getattr(kernels, name)(*args), getattr(ops, name)(*args)
            if name == "seal":
                assert all(map(torch.equal, mine, plain))
            else:
                assert_close(mine, plain.double())
            return mine

        return functools.partial(run)

    checked = Operations(seal=both("seal"), decode=both("decode"), attend=both("attend"), why="")
    monkeypatch.setattr(backend_module, "choose", lambda *args, **kwargs: checked)
    backend = load(demo_dir, Preset(), LoadOptions(dtype="float32", device="cpu"))
    engine = Engine(backend, EngineConfig(context=400, max_sequences=1, blocks=4, slots=4, prefill_chunk=256))
    prompt = tuple(torch.randint(10, 40000, (382,), generator=torch.Generator().manual_seed(0)).tolist())
    engine.add(RequestParams(prompt=prompt, max_tokens=4))
    while engine.scheduler.has_work:
        engine.step()
    layers = len(backend.info.plan.sealed)
    assert ran == {"seal": layers + 1, "decode": 3 * layers, "attend": 2 * layers}
