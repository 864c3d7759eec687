"""The sources as MLX would compile them: constants of the format, address spaces, and that they are installed."""

import tomllib
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from cases import attend, make, sequence
from metal_host import address_spaces
from operation_cases import normal

from kvarn.backends.mlx.kernels import kernels, source
from kvarn.format import HEAD_DIMS

ROOT = Path(__file__).resolve().parents[4]
KERNELS = ("rotate", "seal", "attend", "combine", "prefill")


def test_constants_are_the_formats() -> None:
    fmt = make(128, 128, (3, 5))
    values = source.constants(fmt)
    assert {values[name.upper()] for name in fmt.fields} == {str(field.offset) for field in fmt.fields.values()}
    assert values["TILE_NBYTES"] == str(fmt.tile_nbytes)
    for d in HEAD_DIMS:
        scale = source.head_dim_constants(d)["ROTATE_SCALE"]
        assert np.float32(scale.removesuffix("f")) == np.float32(1 / np.sqrt(d))


@pytest.mark.parametrize("name", KERNELS)
def test_a_pragma_stands_above_everything_that_it_must_cover(name: str) -> None:
    header, body = source.compose(name, source.constants(make(64)))
    assert "#include" not in header
    assert header.startswith(source.NO_CONTRACTION) == (name in ("rotate", "seal"))
    assert body.strip()


@pytest.mark.skipif(address_spaces.clang() is None, reason="no clang on this machine; install clang")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_clang_accepts_every_address_space(dtype: str, launches: list[str]) -> None:
    launches.clear()
    kernels.seal(*(mx.array(x) for x in normal(1, 2, 1, 64, 64)), make(64))
    seq = sequence(3 * 64 + 9, make(64), 2, seed=7, dtype=dtype)
    for count in (1, 9):
        attend(normal(8, count, 6, 64), seq, len(seq.keys) - count, 0.125, dtype)
    assert {name for name in KERNELS for text in launches if f"custom_kernel_kvarn_{name}_" in text} == set(KERNELS)
    for text in launches:
        address_spaces.check(text)


def test_every_metal_source_is_installed() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = data["kvarn.backends.mlx.kernels"]
    installed = {file.name for pattern in patterns for file in source.FOLDER.glob(pattern)}
    assert installed == {f"{name}.metal" for name in (*KERNELS, "tile")}
