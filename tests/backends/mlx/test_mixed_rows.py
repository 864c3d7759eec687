"""Sixteen different requests in one batch on MLX, see mixed_rows."""

from pathlib import Path

import pytest
from mixed_rows import assert_mixed_rows_get_what_they_get_alone, build_model

from kvarn.backend import LoadOptions
from kvarn.backends.mlx.backend import load
from kvarn.format import Preset
from kvarn.serve.tokenizer import Tokenizer


@pytest.mark.parametrize("preset", [None, Preset(tile_tokens=64)], ids=["exact", "sealed"])
def test_sixteen_mixed_rows_get_what_they_get_alone(preset: Preset | None, demo_dir: Path, tmp_path: Path) -> None:
    backend = load(build_model(tmp_path), preset, LoadOptions(dtype="float32", device="cpu"))
    assert_mixed_rows_get_what_they_get_alone(backend, Tokenizer(demo_dir))
