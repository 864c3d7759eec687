"""Every operation of a backend against the oracle, on this machine: what `kvarn doctor` runs, and a quick part of it.

A backend gives its operations with NumPy arrays in and out (`Operations`); the cases and the verdicts are here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvarn import reference
from kvarn.errors import SealError
from kvarn.format import Preset, SealStatus, TileFormat
from kvarn.tile import Bytes
from kvarn.visibility import num_sealed

Floats = NDArray[np.float32]

FORMATS = [
    Preset().with_head_dim(64),
    Preset().with_head_dim(128),
    Preset(key_bits=2, value_bits=2, tile_tokens=64).with_head_dim(64),
    Preset(key_bits=3, value_bits=5, tile_tokens=64).with_head_dim(128),
    Preset(key_bits=8, value_bits=8).with_head_dim(64),
    Preset(key_bits=4, value_bits=2, tile_tokens=64).with_head_dim(256),
]
TOLERANCE = 1e-4  # of the largest output; attention sums in float32, in an order of its own


class SealAndAttend(Protocol):
    """The two operations of a step over NumPy arrays; shapes as in the backend's own files."""

    def seal(self, keys: Floats, values: Floats, fmt: TileFormat) -> tuple[Bytes, Bytes, Bytes]:
        """keys, values `[T, G, D]` -> tiles `[T, tile_nbytes]`, flags `[T]`, status words `[T]`."""

    def attend(
        self, query: Floats, keys: Floats, values: Floats, tiles: Bytes, flags: Bytes, start: int, fmt: TileFormat
    ) -> Floats:
        """As kvarn.reference.attend, with the scale 1/sqrt(D): `[N, H, D]`."""


class Operations(SealAndAttend, Protocol):
    """A backend's operations over NumPy arrays."""

    def unseal(self, tiles: Bytes, flags: Bytes, fmt: TileFormat) -> tuple[Floats, Floats]:
        """tiles `[T, tile_nbytes]`, flags `[T]` -> keys, values `[T, G, D]`."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One verdict."""

    name: str
    passed: bool
    detail: str


def run_checks(operations: Operations) -> Iterator[Check]:
    """Every operation over every format, one verdict each; an exception is a FAIL with its text."""
    for fmt in FORMATS:
        where = f"{fmt.name}, head_dim {fmt.head_dim}"
        yield _check(f"seal {where}", lambda fmt=fmt: _seal(operations, fmt))  # type: ignore[misc]
        yield _check(f"unseal {where}", lambda fmt=fmt: _unseal(operations, fmt))  # type: ignore[misc]
        yield _check(f"attend {where}", lambda fmt=fmt: _attend(operations, fmt))  # type: ignore[misc]


def _check(name: str, run: Callable[[], str]) -> Check:
    try:
        return Check(name=name, passed=True, detail=run())
    except AssertionError as error:
        return Check(name=name, passed=False, detail=str(error))
    except Exception as error:  # whatever a framework raises on a machine that we have not seen
        return Check(name=name, passed=False, detail=f"{type(error).__name__}: {error}")


def _tiles(fmt: TileFormat) -> tuple[Floats, Floats]:
    """Random tiles beside awkward ones, `[T, G, D]`: biased, dead, tiny, large, overflowing, non-finite."""
    keys, values = np.random.default_rng(7).standard_normal((2, 9, fmt.tile_tokens, fmt.head_dim), np.float32)
    keys[1, :, 3] += 50 * np.cos(np.arange(fmt.tile_tokens, dtype=np.float32))
    keys[2], values[2] = 0, 0
    keys[3], values[3] = keys[3] * np.float32(2**-60), values[3] * np.float32(2**-60)
    keys[4], values[4] = keys[4] * np.float32(2**13), values[4] * np.float32(2**13)
    keys[5, 7], values[5, :, 9] = 0, 0
    keys[6] *= np.float32(1e6)
    values[7] *= np.float32(1e6)
    values[8, 0, 0] = np.nan
    return keys, values


def _oracle(keys: Floats, values: Floats, fmt: TileFormat) -> tuple[Bytes, int, SealStatus]:
    try:
        tile, flags = reference.seal(keys, values, fmt)
    except SealError as error:
        status = next(status for status in SealStatus if status.reason == error.reason)
        return np.zeros(fmt.tile_nbytes, np.uint8), 0, status
    return tile, flags, SealStatus.OK


def _seal(operations: SealAndAttend, fmt: TileFormat) -> str:
    keys, values = _tiles(fmt)
    _assert_seals(operations, keys, values, fmt)
    return f"{len(keys)} tiles, bytes, flags and status words equal"


def _assert_seals(operations: SealAndAttend, keys: Floats, values: Floats, fmt: TileFormat) -> None:
    tiles, flags, status = operations.seal(keys, values, fmt)
    for i in range(len(keys)):
        tile, flag, want = _oracle(keys[i], values[i], fmt)
        assert status[i] == want, f"tile {i}: status {status[i]}, the oracle says {int(want)}"
        if want == SealStatus.OK:
            wrong = int((tiles[i] != tile).sum())
            assert not wrong, f"tile {i}: {wrong} of {fmt.tile_nbytes} bytes differ from the oracle's"
            assert flags[i] == flag, f"tile {i}: flags {flags[i]}, the oracle's are {flag}"


def _unseal(operations: Operations, fmt: TileFormat) -> str:
    keys, values = (x[:6] for x in _tiles(fmt))
    sealed = [reference.seal(k, v, fmt) for k, v in zip(keys, values, strict=True)]
    tiles, flags = np.stack([tile for tile, _ in sealed]), np.array([flag for _, flag in sealed], np.uint8)
    got = operations.unseal(tiles, flags, fmt)
    for i, (tile, flag) in enumerate(sealed):
        for what, mine, want in zip(("keys", "values"), got, reference.unseal(tile, flag, fmt), strict=True):
            assert np.array_equal(mine[i], want), f"tile {i}: {what} differ from the oracle's"
    return f"{len(sealed)} tiles, float32 bits equal"


def _attend(operations: SealAndAttend, fmt: TileFormat) -> str:
    g, d = fmt.tile_tokens, fmt.head_dim
    length = 4 * g + 5
    rng = np.random.default_rng(8)
    keys, values = rng.standard_normal((2, length, 2, d), np.float32)
    keys[:, 0, 1] += 9
    query = rng.standard_normal((length, 6, d), np.float32)
    prefill = ((g - 1, 2 * g + 3), (2 * g, length))
    worst = _assert_attends(operations, query, keys, values, (*_decode_and_verify(length, g), *prefill), fmt)
    return f"decode, verify and prefill, relative error {worst:.0e}"


def _decode_and_verify(length: int, g: int) -> tuple[tuple[int, int], ...]:
    """Where queries start and stop: one, and a few that end at the length, within a tile and across an edge."""
    edge = (length - 1) // g * g
    return (length - 1, length), (length - 4, length), (edge - 2, edge + 2)


def _assert_attends(
    operations: SealAndAttend,
    query: Floats,
    keys: Floats,
    values: Floats,
    spans: tuple[tuple[int, int], ...],
    fmt: TileFormat,
) -> float:
    """Attention of one sequence, keys and values `[T, Hk, D]`, for queries of `[T, H, D]`; returns the worst error."""
    g, hk = fmt.tile_tokens, keys.shape[1]
    count = len(keys) // g - 1
    tiles = np.zeros((count, hk, fmt.tile_nbytes), np.uint8)
    flags = np.zeros((count, hk), np.uint8)
    for b, j in np.ndindex(count, hk):
        part = slice((b + 1) * g, (b + 2) * g)
        k, v = (np.ascontiguousarray(x[part, j]) for x in (keys, values))
        tiles[b, j], flags[b, j] = reference.seal(k, v, fmt)
    worst = 0.0
    for start, stop in spans:
        reads = num_sealed(stop - 1, g)
        args = (query[start:stop], keys[:stop], values[:stop], tiles[:reads], flags[:reads], start)
        want = reference.attend(*args, fmt.head_dim**-0.5, fmt)
        error = float(np.abs(operations.attend(*args, fmt) - want).max() / np.abs(want).max())
        assert error < TOLERANCE, f"queries {start} to {stop}: relative error {error:.1e}, at most {TOLERANCE:.0e}"
        worst = max(worst, error)
    return worst


def quick_check(operations: SealAndAttend, fmt: TileFormat, *, heads: int, kv_heads: int) -> None:
    """A few tiles and a short sequence of one format, for a backend that is about to use these operations.

    Two tiles must have the oracle's bytes; decode, verify and prefill over two sealed tiles, one of them rotated, must
    be the oracle's attention. Its keys, values and queries are numbers that every model dtype holds exactly.
    AssertionError says what differs.
    """
    g, d = fmt.tile_tokens, fmt.head_dim
    rng = np.random.default_rng(9)
    keys, values = rng.standard_normal((2, 2, g, d), np.float32)
    keys[1, :, 3] += 50  # a large bias: this one keeps its keys as they are, the other one rotated
    _assert_seals(operations, keys, values, fmt)
    length = 3 * g + 5

    def coarse(*shape: int) -> Floats:
        return np.clip(np.rint(rng.standard_normal(shape) * 16) / 16, -7, 7).astype(np.float32)

    keys, values, query = coarse(length, kv_heads, d), coarse(length, kv_heads, d), coarse(length, heads, d)
    # The oracle keeps the first of these as they are, the second rotated, whatever the format.
    keys[g : 2 * g] = rng.integers(-127, 128, (g, kv_heads, d)) / np.float32(32)
    keys[2 * g : 3 * g][rng.random((g, kv_heads, d)) < 0.01] *= 16
    _assert_attends(operations, query, keys, values, (*_decode_and_verify(length, g), (length - 12, length)), fmt)
