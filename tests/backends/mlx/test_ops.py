"""The plain MLX operations: the contract of every backend's operations, and what only MLX must do."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.core import array
from operation_cases import Floats, Sequence, make, normal, sequence
from operation_contract import Arrays, OperationContract

from kvarn.backends.mlx import ops
from kvarn.format import TileFormat
from kvarn.tile import Bytes


class MlxArrays(Arrays):
    """kvarn.backends.mlx.ops over NumPy arrays; the window is a view of a page, as in a step."""

    def pack_codes(self, codes: Bytes, bits: int) -> Bytes:
        return np.array(ops.pack_codes(mx.array(codes), bits))

    def unpack_codes(self, stream: Bytes, bits: int) -> Bytes:
        return np.array(ops.unpack_codes(mx.array(stream), bits))

    def rotate(self, x: Floats) -> Floats:
        return np.array(ops.rotate(mx.array(x)))

    def seal(self, keys: Floats, values: Floats, fmt: TileFormat) -> tuple[Bytes, Bytes, Bytes]:
        tiles, flags, status = ops.seal(mx.array(keys), mx.array(values), fmt)
        return np.array(tiles), np.array(flags), np.array(status)

    def unseal(self, tiles: Bytes, flags: Bytes, fmt: TileFormat) -> tuple[Floats, Floats]:
        keys, values = ops.unseal(mx.array(tiles), mx.array(flags), fmt)
        return np.array(keys), np.array(values)

    def attend(self, query: Floats, seq: Sequence, start: int, scale: float, dtype: str) -> Floats:
        stop = start + len(query)
        q, sink, page = (mx.array(x).astype(getattr(mx, dtype)) for x in (query, *seq.exact_parts(start, stop, 3)))
        pool = (mx.array(x) for x in (seq.pool_tiles, seq.pool_flags, seq.blocks[: seq.reads(stop)]))
        out = ops.attend(q, sink, page[:, :, :-3], *pool, start, scale, seq.fmt)
        assert out.dtype == mx.float32
        return np.array(out)

    def attend_exact(
        self, query: Floats, keys: Floats, values: Floats, start: int, scale: float, window: int | None, dtype: str
    ) -> Floats:
        kind = getattr(mx, dtype)
        q, k, v = (mx.array(x).astype(kind) for x in (query, keys, values))
        out = ops.attend_exact(q, k, v, start, scale, window=window)
        assert out.dtype == kind
        return np.array(out.astype(mx.float32))


class TestMlx(OperationContract):
    arrays = MlxArrays()
    half_tolerance = 0.05  # inputs, scores and output in bfloat16


def test_mlx_rounds_every_single_operation_as_numpy_does() -> None:
    """What byte-equal sealing rests on: square root, division, half-to-even and the casts to float16."""
    a = np.concatenate([np.random.default_rng(0).random(100_000, np.float32), [2**-126, 3e38]]).astype(np.float32)
    b = a[::-1].copy()
    x, y = mx.array(a), mx.array(b)
    halves = np.arange(-300, 300, dtype=np.float32) / 2
    with np.errstate(over="ignore"):
        pairs: list[tuple[array, Any]] = [
            (mx.sqrt(x), np.sqrt(a)),
            (x / y, a / b),
            (x * y + x, a * b + a),
            (mx.round(mx.array(halves)), np.rint(halves)),
            ((x * 1e-4).astype(mx.float16), (a * np.float32(1e-4)).astype(np.float16)),
            ((x * 1e5).astype(mx.float16), (a * np.float32(1e5)).astype(np.float16)),
        ]
    for i, (got, want) in enumerate(pairs):
        np.testing.assert_array_equal(np.array(got), want, err_msg=str(i))


def test_leading_axes_and_strides_do_not_change_bytes() -> None:
    fmt = make(64, 64)
    keys, values = (mx.array(x) for x in normal(5, 2, 6, 64, 64))
    want = ops.seal(keys, values, fmt)
    shaped = ops.seal(keys.reshape(2, 3, 64, 64), values.reshape(2, 3, 64, 64), fmt)
    strided = ops.seal(mx.contiguous(keys.swapaxes(1, 2)).swapaxes(1, 2), values[::-1][::-1], fmt)
    for x, y, z in zip(want, shaped, strided, strict=True):
        np.testing.assert_array_equal(np.array(x), np.array(y.flatten(0, 1)))
        np.testing.assert_array_equal(np.array(x), np.array(z))
    for x, y in zip(ops.unseal(*want[:2], fmt), ops.unseal(*shaped[:2], fmt), strict=True):
        np.testing.assert_array_equal(np.array(x), np.array(y.flatten(0, 1)))


@pytest.mark.parametrize("sealed", [15, 16, 17, 33])
def test_groups_of_sealed_tiles_meet_without_a_seam(sealed: int) -> None:
    assert ops.TILES_PER_GROUP == 16
    length = (sealed + 1) * 64 + 3
    seq = sequence(length, make(64, 64), 1, seed=sealed)
    query = normal(sealed, length, 2, 64)
    for start in (length - 1, length - 100, 64 * 3 + 1):
        TestMlx().assert_attends(query[start : start + 100], seq, start)
