"""The doctor's checks pass for the oracle and fail for everything that is not it."""

import numpy as np
import pytest

from kvarn import reference
from kvarn.errors import SealError
from kvarn.format import SealStatus, TileFormat
from kvarn.selfcheck import FORMATS, Floats, quick_check, run_checks
from kvarn.tile import Bytes


class Oracle:
    """The oracle itself as a backend's operations."""

    def seal(self, keys: Floats, values: Floats, fmt: TileFormat) -> tuple[Bytes, Bytes, Bytes]:
        tiles = np.zeros((len(keys), fmt.tile_nbytes), np.uint8)
        flags, status = np.zeros((2, len(keys)), np.uint8)
        for i in range(len(keys)):
            try:
                tiles[i], flags[i] = reference.seal(keys[i], values[i], fmt)
            except SealError as error:
                status[i] = next(s for s in SealStatus if s.reason == error.reason)
        return tiles, flags, status

    def unseal(self, tiles: Bytes, flags: Bytes, fmt: TileFormat) -> tuple[Floats, Floats]:
        both = [reference.unseal(tile, int(flag), fmt) for tile, flag in zip(tiles, flags, strict=True)]
        return np.stack([k for k, _ in both]), np.stack([v for _, v in both])

    def attend(
        self, query: Floats, keys: Floats, values: Floats, tiles: Bytes, flags: Bytes, start: int, fmt: TileFormat
    ) -> Floats:
        out = reference.attend(query, keys, values, tiles, flags, start, fmt.head_dim**-0.5, fmt)
        return out.astype(np.float32)


def test_the_oracle_passes_every_check() -> None:
    checks = list(run_checks(Oracle()))
    assert len(checks) == 3 * len(FORMATS)
    assert all(check.passed for check in checks), [check for check in checks if not check.passed]


def broken(which: str) -> Oracle:
    oracle = Oracle()

    def seal(keys: Floats, values: Floats, fmt: TileFormat) -> tuple[Bytes, Bytes, Bytes]:
        tiles, flags, status = Oracle.seal(oracle, keys, values, fmt)
        if which == "a byte":
            tiles[5, -1] ^= 1
        if which == "a flag":
            flags[1] ^= 1
        if which == "a status word":
            status[6] = 0
        return tiles, flags, status

    def unseal(tiles: Bytes, flags: Bytes, fmt: TileFormat) -> tuple[Floats, Floats]:
        keys, values = Oracle.unseal(oracle, tiles, flags, fmt)
        if which == "a value":
            values[0, 0, 0] = np.nextafter(values[0, 0, 0], np.float32(9))
        return keys, values

    def attend(query: Floats, keys: Floats, values: Floats, *rest: object) -> Floats:
        if which == "a key too many":
            keys = keys.copy()
            keys[-1] += 1
        if which == "an exception":
            raise RuntimeError("no such kernel")
        return Oracle.attend(oracle, query, keys, values, *rest)  # type: ignore[arg-type]

    oracle.seal, oracle.unseal, oracle.attend = seal, unseal, attend  # type: ignore[method-assign,assignment]
    return oracle


@pytest.mark.parametrize("which", ["a byte", "a flag", "a status word", "a value", "a key too many", "an exception"])
def test_whatever_is_wrong_fails_and_says_where(which: str) -> None:
    failed = [check for check in run_checks(broken(which)) if not check.passed]
    assert len(failed) >= len(FORMATS) - (which == "a flag")
    assert all(check.detail for check in failed)
    if which == "an exception":
        assert "RuntimeError: no such kernel" in failed[0].detail


class Watched(Oracle):
    """The oracle, which notes what it was asked for; wrong where `wrong` says so."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.spans: set[tuple[int, int]] = set()
        self.flags: set[int] = set()
        self.inputs: list[Floats] = []

    def seal(self, keys: Floats, values: Floats, fmt: TileFormat) -> tuple[Bytes, Bytes, Bytes]:
        tiles, flags, status = super().seal(keys, values, fmt)
        tiles[1, -1] ^= self.wrong == "seal"
        return tiles, flags, status

    def attend(
        self, query: Floats, keys: Floats, values: Floats, tiles: Bytes, flags: Bytes, start: int, fmt: TileFormat
    ) -> Floats:
        self.spans.add((start, len(keys)))
        self.flags |= set(flags[:, 0].tolist())
        self.inputs += [query, keys, values]
        kind = "decode" if len(query) == 1 else "prefill" if len(query) > 8 else "verify"
        return super().attend(query, keys, values, tiles, flags, start, fmt) * (1 + 1e-3 * (kind == self.wrong))


def test_every_format_sees_one_query_a_few_and_many() -> None:
    oracle = Watched()
    assert all(check.passed for check in run_checks(oracle))
    for g in {fmt.tile_tokens for fmt in FORMATS}:
        length = 4 * g + 5
        assert {(length - 1, length), (length - 4, length), (4 * g - 2, 4 * g + 2), (2 * g, length)} <= oracle.spans


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 2), (14, 2)])
def test_the_quick_check_passes_the_oracle_and_reads_both_bases(heads: int, kv_heads: int) -> None:
    for fmt in FORMATS[1], FORMATS[2]:
        oracle = Watched()
        quick_check(oracle, fmt, heads=heads, kv_heads=kv_heads)
        assert oracle.flags == {0, 1}
        assert {stop - start for start, stop in oracle.spans} == {1, 4, 12}
        for x in oracle.inputs:  # 8 bits of mantissa and no small numbers: bfloat16 and float16 hold them
            np.testing.assert_array_equal(x.view(np.uint32) & 0xFFFF, 0)
            np.testing.assert_array_equal(x.astype(np.float16), x)


@pytest.mark.parametrize("wrong", ["seal", "decode", "verify", "prefill"])
def test_the_quick_check_fails_for_whatever_is_wrong(wrong: str) -> None:
    with pytest.raises(AssertionError, match="differ from the oracle's" if wrong == "seal" else "relative error"):
        quick_check(Watched(wrong), FORMATS[2], heads=3, kv_heads=1)
