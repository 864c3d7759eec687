"""RoPE overrides on MLX: what an edited config.json gives, the same as on torch, or refused by name."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import THETA, build, distance, edit, feed, prompt

from kvarn.backend import LoadOptions
from kvarn.backends.mlx import backend as mlx_backend
from kvarn.backends.mlx.backend import MlxBackend
from kvarn.backends.triton import backend as torch_backend
from kvarn.errors import KvarnError, ModelError, UnsupportedModelError
from kvarn.format import Preset
from kvarn.rope_scaling import describe, parse

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
BY_HAND: dict[str, tuple[dict[str, Any], int]] = {
    "linear:4": ({"rope_type": "linear", "factor": 4.0}, 4096),
    "yarn:4": (YARN, 4096),
    "yarn:4:512": (YARN | {"original_max_position_embeddings": 512}, 2048),
    "llama3:8": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 1024},
        8192,
    ),
    '{"rope_type": "yarn", "factor": 2.0, "beta_fast": 8}': (YARN | {"factor": 2.0, "beta_fast": 8}, 2048),
}


def options(text: str | None) -> LoadOptions:
    return LoadOptions(dtype="float32", device="cpu", rope_scaling=None if text is None else parse(text))


def load(folder: Path, text: str | None = None, preset: Preset | None = None) -> MlxBackend:
    return mlx_backend.load(folder, preset, options(text))


def edited(source: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(source, target, dirs_exist_ok=True)
    return edit(target, **changes)


@pytest.mark.parametrize("text", BY_HAND)
def test_an_override_gives_what_an_edited_config_gives_and_what_torch_gives(
    llama_dir: Path, tmp_path: Path, text: str
) -> None:
    scaling, context = BY_HAND[text]
    theta = THETA["rope_theta"]
    folder = edited(llama_dir, tmp_path, rope_scaling=scaling, rope_theta=theta, max_position_embeddings=context)
    got, by_hand, tokens = load(llama_dir, text), load(folder), prompt(200)
    assert got.info.plan.max_context == by_hand.info.plan.max_context == context
    mine = feed(got, tokens, 120)
    np.testing.assert_array_equal(mine, feed(by_hand, tokens, 120))
    assert distance(mine, feed(load(llama_dir), tokens, 120)) > 1e-3
    other = torch_backend.load(llama_dir, None, options(text))
    assert distance(mine, feed(other, tokens, 120)) < 1e-5
    assert describe(got.model.config) == describe(by_hand.model.config) == describe(other.model.config)
    assert got.model.config == load(llama_dir, text).model.config  # no trace of how it was made
    assert got.share(Preset(tile_tokens=64)).info.plan.max_context == context


def test_none_takes_a_scaling_away(llama_dir: Path, tmp_path: Path) -> None:
    folder = edited(
        llama_dir, tmp_path, rope_scaling=YARN, rope_theta=THETA["rope_theta"], max_position_embeddings=4096
    )
    none, plain = load(folder, "none"), load(llama_dir)
    assert none.info.plan.max_context == plain.info.plan.max_context == 1024
    np.testing.assert_array_equal(feed(none, prompt(50), 50), feed(plain, prompt(50), 50))


def test_a_family_that_prefers_the_new_fields_takes_it_too(tmp_path: Path) -> None:
    """mlx-lm's qwen3 reads rope_parameters by itself."""
    build(tmp_path, "qwen3")
    mine, tokens = load(tmp_path, "yarn:4"), prompt(200)
    assert distance(feed(mine, tokens, 120), feed(load(tmp_path), tokens, 120)) > 1e-3
    other = torch_backend.load(tmp_path, None, options("yarn:4"))
    assert distance(feed(mine, tokens, 120), feed(other, tokens, 120)) < 1e-5


def refused(folder: Path, text: str | None, kind: type[KvarnError], part: str) -> None:
    with pytest.raises(kind) as caught:
        load(folder, text)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "text", "kind", "part"),
    [
        ("gpt2", "linear:2", UnsupportedModelError, "gpt2 has no RoPE"),
        ("gemma3_text", "linear:2", UnsupportedModelError, "a RoPE for each type of layer"),
        ("phi3", "yarn:2", ModelError, "phi3 does not take this --rope-scaling"),
        ("starcoder2", "linear:2", UnsupportedModelError, "starcoder2 does not take the rope type 'linear'"),
        ("mixtral", "linear:2", UnsupportedModelError, "mixtral does not rotate by the linear scaling"),
    ],
)
def test_a_model_that_cannot_take_it_is_refused_by_name(
    tmp_path: Path, model_type: str, text: str, kind: type[KvarnError], part: str
) -> None:
    build(tmp_path, model_type)
    refused(tmp_path, text, kind, part)


def test_a_scaling_that_a_family_of_mlx_lm_reads_and_ignores_is_refused_without_an_override_too(tmp_path: Path) -> None:
    build(tmp_path, "mixtral", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6})
    refused(tmp_path, None, UnsupportedModelError, "use --backend triton")


@pytest.mark.parametrize("more", ['"attention_factor": 1.0', '"truncate": false'])
def test_what_mlx_lm_leaves_out_of_yarn_is_refused(llama_dir: Path, more: str) -> None:
    text = f'{{"rope_type": "yarn", "factor": 4.0, {more}}}'
    refused(llama_dir, text, UnsupportedModelError, "llama does not rotate by the yarn scaling")
