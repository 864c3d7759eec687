"""The MLX operations over NumPy arrays, for kvarn.selfcheck, and what `kvarn doctor` says of this backend.

On Metal every operation that has a kernel runs twice, plain and by the kernel, and both must be right.
"""

import platform
from typing import Any

import mlx.core as mx
import numpy as np

from kvarn.backends.mlx import ops
from kvarn.backends.mlx.choose import VARIABLE, OverNumpy
from kvarn.backends.mlx.kernels import kernels, probe
from kvarn.format import TileFormat
from kvarn.selfcheck import TOLERANCE, Floats
from kvarn.tile import Bytes


def describe() -> str:
    """The device, and which route runs there and why."""
    if not kernels.available():
        return (
            "cpu (no Metal on this machine: slow, for testing); plain MLX operations; skipped: the Metal kernels "
            "rotate, seal, attend and prefill, and the probe of contraction"
        )
    name = f"{mx.device_info().get('device_name', 'Metal')}, macOS {platform.mac_ver()[0]}"
    return (
        f"{name}; plain MLX operations and Metal kernels, both checked; steps run the kernels unless {VARIABLE}=off; "
        f"{probe.contraction()}"
    )


class Operations:
    """See kvarn.selfcheck.Operations."""

    def seal(self, keys: Floats, values: Floats, fmt: TileFormat) -> tuple[Bytes, Bytes, Bytes]:
        tiles, flags, status = OverNumpy(ops.seal, ops.attend).seal(keys, values, fmt)
        if kernels.available():
            plain = (tiles, flags, status)
            tiles, flags, status = OverNumpy(kernels.seal, kernels.attend).seal(keys, values, fmt)
            sealed = status == 0  # the bytes of a refused tile mean nothing
            for what, x, y in zip(("bytes", "flags", "status words"), (tiles, flags, status), plain, strict=True):
                same = np.array_equal(x, y) if what == "status words" else np.array_equal(x[sealed], y[sealed])
                assert same, f"{what} of the Metal kernel and of plain MLX differ"
        return tiles, flags, status

    def unseal(self, tiles: Bytes, flags: Bytes, fmt: TileFormat) -> tuple[Floats, Floats]:
        keys, values = ops.unseal(mx.array(tiles), mx.array(flags), fmt)
        return np.array(keys), np.array(values)

    def attend(
        self, query: Floats, keys: Floats, values: Floats, tiles: Bytes, flags: Bytes, start: int, fmt: TileFormat
    ) -> Any:
        args = (query, keys, values, tiles, flags, start, fmt)
        out = OverNumpy(ops.seal, ops.attend).attend(*args)
        if kernels.available():
            plain, out = out, OverNumpy(kernels.seal, kernels.attend).attend(*args)
            error = float(np.abs(out - plain).max() / np.abs(plain).max())
            assert error < TOLERANCE, f"the Metal kernel and plain MLX differ by {error:.1e}, at most {TOLERANCE:.0e}"
        return out
