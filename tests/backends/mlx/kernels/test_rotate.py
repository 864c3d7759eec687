"""rotate.metal against the oracle, by the bit."""

import mlx.core as mx
import numpy as np
import pytest
from operation_cases import normal, rounded

from kvarn import reference
from kvarn.backends.mlx.kernels import kernels
from kvarn.format import HEAD_DIMS


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_is_the_oracles_by_the_bit(d: int, dtype: str) -> None:
    x = normal(d, 3, 3, d) * np.float32(10.0) ** np.arange(-1, 2, dtype=np.float32)[:, None]
    x = rounded(x, dtype)
    for rows in (x, x[0, :1], x[:2].reshape(1, 6, d)):
        got = kernels.rotate(mx.array(rows).astype(getattr(mx, dtype)))
        assert got.dtype == mx.float32
        np.testing.assert_array_equal(np.array(got), reference.rotate(rows))
