"""The plain torch operations: the contract of every backend's operations, and what only torch does."""

import numpy as np
import pytest
import torch
from operation_cases import Floats, Sequence, brute_force, make, normal, sequence
from operation_contract import LENGTHS, TOLERANCE, Arrays, OperationContract

from kvarn.backends.triton import ops
from kvarn.format import TileFormat
from kvarn.tile import Bytes


class TorchArrays(Arrays):
    """kvarn.backends.triton.ops over NumPy arrays; the window may hold more than the queries reach."""

    def pack_codes(self, codes: Bytes, bits: int) -> Bytes:
        packed: Bytes = ops.pack_codes(torch.from_numpy(codes), bits).numpy()
        return packed

    def unpack_codes(self, stream: Bytes, bits: int) -> Bytes:
        codes: Bytes = ops.unpack_codes(torch.from_numpy(stream), bits).numpy()
        return codes

    def rotate(self, x: Floats) -> Floats:
        rotated: Floats = ops.rotate(torch.from_numpy(x)).numpy()
        return rotated

    def seal(self, keys: Floats, values: Floats, fmt: TileFormat) -> tuple[Bytes, Bytes, Bytes]:
        tiles, flags, status = ops.seal(torch.from_numpy(keys), torch.from_numpy(values), fmt)
        return tiles.numpy(), flags.numpy(), status.numpy()

    def unseal(self, tiles: Bytes, flags: Bytes, fmt: TileFormat) -> tuple[Floats, Floats]:
        keys, values = ops.unseal(torch.from_numpy(tiles), torch.from_numpy(flags), fmt)
        return keys.numpy(), values.numpy()

    def attend(self, query: Floats, seq: Sequence, start: int, scale: float, dtype: str) -> Floats:
        stop, kind = start + len(query), getattr(torch, dtype)
        q, sink, window = (torch.from_numpy(x).to(kind) for x in (query, *seq.exact_parts(start, stop, 3)))
        pool = (torch.from_numpy(x) for x in (seq.pool_tiles, seq.pool_flags))
        blocks = torch.from_numpy(seq.blocks[: seq.reads(stop)].astype(np.int64))
        out = ops.attend(q, sink, window, *pool, blocks, start, scale, seq.fmt)
        assert out.dtype == torch.float32
        got: Floats = out.numpy()
        return got

    def attend_exact(
        self, query: Floats, keys: Floats, values: Floats, start: int, scale: float, window: int | None, dtype: str
    ) -> Floats:
        kind = getattr(torch, dtype)
        q, k, v = (torch.from_numpy(x).to(kind) for x in (query, keys, values))
        out = ops.attend_exact(q, k, v, start, scale, window=window)
        assert out.dtype == kind
        got: Floats = out.float().numpy()
        return got


class TestTorch(OperationContract):
    arrays = TorchArrays()
    half_tolerance = 0.03  # inputs and output in bfloat16


def test_square_root_is_correctly_rounded() -> None:
    x = np.concatenate([np.random.default_rng(0).random(100_000, np.float32), [0, 2**-149, 2**-126, 3e38]])
    x = x.astype(np.float32)
    np.testing.assert_array_equal(ops.sqrt(torch.from_numpy(x)).numpy(), np.sqrt(x))


def test_leading_axes_and_strides_do_not_change_bytes() -> None:
    fmt = make(64, 64)
    keys, values = (torch.from_numpy(x) for x in normal(5, 2, 6, 64, 64))
    want = ops.seal(keys, values, fmt)
    shaped = ops.seal(keys.reshape(2, 3, 64, 64), values.reshape(2, 3, 64, 64), fmt)
    strided = ops.seal(keys.mT.contiguous().mT, values.flip(0).contiguous().flip(0), fmt)
    for x, y, z in zip(want, shaped, strided, strict=True):
        assert torch.equal(x, y.flatten(0, 1))
        assert torch.equal(x, z)
    for x, y in zip(ops.unseal(*want[:2], fmt), ops.unseal(*shaped[:2], fmt), strict=True):
        assert torch.equal(x, y.flatten(0, 1))


def decode_all(queries: Floats, seqs: list[Sequence], dtype: torch.dtype = torch.float32) -> Floats:
    """ops.decode for the last position of every sequence at once, with NaN in every page where none must look."""
    fmt, (_, hk, d) = seqs[0].fmt, seqs[0].keys.shape
    g = fmt.tile_tokens
    pool = torch.full((2 * len(seqs) + 3, 2, hk, g, d), torch.nan, dtype=dtype)
    ids = np.random.default_rng(1).permutation(len(pool)).tolist()
    pages, blocks = [], []
    at = 0
    for row, seq in enumerate(seqs):
        both = torch.from_numpy(np.stack([seq.keys, seq.values])).transpose(1, 2).to(dtype)
        length = len(seq.keys)
        for tile_index in sorted({0, (length - 1) // g}):
            part = both[:, :, tile_index * g : (tile_index + 1) * g]
            index = ids.pop()
            pool[index, :, :, : part.shape[2]] = part
            pages.append((row, index, part.shape[2]))
        blocks += [(row, at + int(b)) for b in seq.blocks[: seq.reads(length)]]
        at += len(seq.pool_tiles)
    out = ops.decode(
        torch.from_numpy(queries).to(dtype),
        pool,
        ops.Pages(*(torch.tensor([page[k] for page in pages]) for k in range(3))),
        torch.from_numpy(np.concatenate([seq.pool_tiles for seq in seqs])),
        torch.from_numpy(np.concatenate([seq.pool_flags for seq in seqs])),
        ops.Tiles(*(torch.tensor([block[k] for block in blocks], dtype=torch.int64) for k in range(2))),
        d**-0.5,
        fmt,
    )
    assert out.dtype == torch.float32
    got: Floats = out.numpy()
    return got


@pytest.mark.parametrize(("d", "g"), [(64, 64), (64, 128), (128, 128), (256, 64), (512, 64)])
@pytest.mark.parametrize("ratio", [1, 3, 7, 8])
@pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 2), (2, 2), (3, 5)])
def test_many_sequences_decode_as_the_oracle_says(
    d: int, g: int, ratio: int, key_bits: int, value_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "DECODE_SCRATCH", 3 * 2 * g * d)  # groups of three: several, and a partial one
    fmt, hk = make(d, g, key_bits, value_bits), 2
    lengths = LENGTHS if d == 64 else (1, g, g + 1, 2 * g, 4 * g + 5)
    seqs = [sequence(length, fmt, hk, seed) for seed, length in enumerate(lengths)]
    queries = normal(9, len(seqs), hk * ratio, d)
    got = decode_all(queries, seqs)
    assert np.isfinite(got).all(), "garbage was read"
    for row, seq in enumerate(seqs):
        want = seq.want(queries[row : row + 1], len(seq.keys) - 1, d**-0.5)
        assert np.abs(got[row] - want[0]).max() / np.abs(want).max() < TOLERANCE, f"row {row} of {len(seq.keys)}"


def test_a_row_decodes_the_same_whatever_stands_beside_it() -> None:
    fmt = make(64)
    seqs = [sequence(length, fmt, 2, seed) for seed, length in enumerate((500, 3, 257, 900))]
    queries = normal(9, len(seqs), 6, 64)
    together = decode_all(queries, seqs)
    for row, seq in enumerate(seqs):
        np.testing.assert_allclose(decode_all(queries[row : row + 1], [seq])[0], together[row], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 7, 50, 1000])
@pytest.mark.parametrize(("start", "n"), [(0, 1), (0, 130), (129, 1), (100, 30)])
def test_exact_attention_honours_window_soft_cap_and_sinks(
    start: int, n: int, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    keys, values = normal(start + n, 2, start + n, 2, 64)
    query, sinks = normal(1, n, 6, 64), normal(2, 6) * 2 if with_sinks else None
    want = brute_force(query, keys, values, start, 0.2, window, softcap, sinks)
    q, k, v = (torch.from_numpy(x) for x in (query, keys, values))
    s = None if sinks is None else torch.from_numpy(sinks)
    got = ops.attend_exact(q, k, v, start, 0.2, window=window, softcap=softcap, sinks=s)
    assert got.dtype == torch.float32
    assert np.abs(got.numpy() - want).max() < TOLERANCE * np.abs(want).max()
    q, k, v = (x.bfloat16() for x in (q, k, v))
    half = ops.attend_exact(q, k, v, start, 0.2, window=window, softcap=softcap, sinks=s)
    assert half.dtype == torch.bfloat16
    assert np.abs(half.float().numpy() - want).max() < 0.03 * np.abs(want).max()  # inputs and output in bfloat16
