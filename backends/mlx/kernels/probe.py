"""Asks the device whether it fuses products and sums, with and without the pragma that sealing relies on."""

from typing import Any

import mlx.core as mx
import numpy as np

from kvarn.backends.mlx.kernels import kernels
from kvarn.backends.mlx.kernels.source import NO_CONTRACTION

_BODY = """const uint i = thread_position_in_grid.x;
const float a = x[3 * i], b = x[3 * i + 1], c = x[3 * i + 2];
y[i] = a * b + c;"""
THREADS = 32


def fuses(header: str) -> bool:
    """Whether a product and a sum become one operation under this header."""
    # (1 + 2^-12)^2 - 1 has a bit that the rounded product has lost.
    x = np.tile(np.array([1 + 2.0**-12, 1 + 2.0**-12, -1], np.float32), THREADS)
    name = "kvarn_probe_pragma" if header else "kvarn_probe"
    kernel: Any = kernels.metal_kernel(name, ["x"], ["y"], _BODY, header)
    (y,) = kernel(
        inputs=[mx.array(x)],
        grid=(THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(THREADS,)],
        output_dtypes=[mx.float32],
    )
    return bool(np.array(y)[0] != np.float32(2.0**-11))


def contraction() -> str:
    """One clause for `kvarn doctor`."""
    without, with_pragma = fuses(""), fuses(f"{NO_CONTRACTION}\n")
    held = "the pragma does NOT forbid it: sealed bytes cannot be trusted" if with_pragma else "the pragma forbids it"
    return f"contraction: products {'are' if without else 'are not'} fused without the pragma, {held}"
