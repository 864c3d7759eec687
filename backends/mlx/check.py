"""The MLX operations over NumPy arrays, for kvarn.selfcheck, and what `kvarn doctor` says of this backend."""

import platform
from typing import Any

import mlx.core as mx
import numpy as np

from kvarn.backends.mlx import ops
from kvarn.format import TileFormat
from kvarn.selfcheck import Floats
from kvarn.tile import Bytes


def describe() -> str:
    """The device, and which route runs there and why."""
    if mx.metal.is_available():
        name = f"{mx.device_info().get('device_name', 'Metal')}, macOS {platform.mac_ver()[0]}"
    else:
        name = "cpu (no Metal on this machine: slow, for testing)"
    return f"{name}; plain MLX operations: no kernels are built yet"


class Operations:
    """See kvarn.selfcheck.Operations."""

    def seal(self, keys: Floats, values: Floats, fmt: TileFormat) -> tuple[Bytes, Bytes, Bytes]:
        tiles, flags, status = ops.seal(mx.array(keys), mx.array(values), fmt)
        return np.array(tiles), np.array(flags), np.array(status)

    def unseal(self, tiles: Bytes, flags: Bytes, fmt: TileFormat) -> tuple[Floats, Floats]:
        keys, values = ops.unseal(mx.array(tiles), mx.array(flags), fmt)
        return np.array(keys), np.array(values)

    def attend(
        self, query: Floats, keys: Floats, values: Floats, tiles: Bytes, flags: Bytes, start: int, fmt: TileFormat
    ) -> Any:
        g = fmt.tile_tokens
        both = mx.array(np.stack([keys, values])).swapaxes(1, 2)  # [2, Hk, T, D]
        blocks = mx.arange(len(tiles), dtype=mx.int32)
        sink, window = both[:, :, :g], both[:, :, start // g * g :]
        pool = (mx.array(tiles), mx.array(flags), blocks)
        return np.array(ops.attend(mx.array(query), sink, window, *pool, start, fmt.head_dim**-0.5, fmt))
