"""What the kernel tests share: the kernels over NumPy arrays, on the cases of tests/support/operation_cases.py."""

import mlx.core as mx
import numpy as np
import operation_cases
from operation_cases import Floats, Sequence, assert_oracles_tiles, normal, rounded, seal_sequence

from kvarn.backends.mlx.kernels import kernels
from kvarn.format import TileFormat

PRESETS = ((4, 2), (4, 4), (3, 5), (8, 8))
TOLERANCE = 2e-5  # of the largest output at head_dim 128: sums in float32, in an order of its own


def make(d: int, g: int = 64, bits: tuple[int, int] = (4, 2)) -> TileFormat:
    return operation_cases.make(d, g, *bits)


def assert_sealed_alike(keys: Floats, values: Floats, fmt: TileFormat) -> list[tuple[int, int]]:
    """Tiles `[T, G, D]` have the oracle's bytes, flags and status words; returns (flags, status) of each."""
    tiles, flags, status = (np.array(x) for x in kernels.seal(mx.array(keys), mx.array(values), fmt))
    return assert_oracles_tiles(tiles, flags, status, keys, values, fmt)


def sequence(length: int, fmt: TileFormat, hk: int, seed: int, dtype: str = "float32") -> Sequence:
    """A sequence of a dtype; the first kv head has large key biases, so that it keeps its keys unrotated."""
    both = normal(seed, 2, length, hk, fmt.head_dim)
    both[0, :, 0] += 30 * normal(seed, fmt.head_dim)
    keys, values = rounded(both, dtype)
    return seal_sequence(keys, values, fmt, seed)


def attend(query: Floats, seq: Sequence, start: int, scale: float, dtype: str = "float32") -> Floats:
    """kernels.attend with a NaN wherever the queries must not look; the window is a view of a page, as in a step."""
    stop, g = start + len(query), seq.fmt.tile_tokens
    tokens = stop - start // g * g
    sink, page = seq.exact_parts(start, stop, -tokens % g + 3)
    q, s, window = (mx.array(x).astype(getattr(mx, dtype)) for x in (query, sink, page))
    mx.eval(window)
    pool = (mx.array(x) for x in (seq.pool_tiles, seq.pool_flags, seq.blocks[: seq.reads(stop)]))
    out = kernels.attend(q, s, window[:, :, :tokens], *pool, start, scale, seq.fmt)
    assert out.dtype == mx.float32
    return np.array(out)


def assert_attends(query: Floats, seq: Sequence, start: int, dtype: str = "float32") -> None:
    """The outputs of queries `[N, H, D]` are the oracle's."""
    scale = seq.fmt.head_dim**-0.5
    want = seq.want(query, start, scale)
    got = attend(query, seq, start, scale, dtype)
    assert np.isfinite(got).all(), "garbage was read"
    error = np.abs(got - want).max() / np.abs(want).max()
    # The large biases make scores that grow with the root of head_dim, and so does what float32 loses of them.
    assert error < TOLERANCE * max(seq.fmt.head_dim / 128, 1) ** 0.5, (
        f"start {start}, {len(query)} queries: {error:.2g}"
    )
