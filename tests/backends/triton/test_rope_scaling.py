"""RoPE overrides on torch: what an edited config.json gives, in use in every table, or refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from kvarn.backend import LoadOptions
from kvarn.backends.triton import backend as torch_backend
from kvarn.backends.triton import model as torch_model
from kvarn.backends.triton.backend import TorchBackend
from kvarn.backends.triton.model import read_config
from kvarn.errors import KvarnError, ModelError, UnsupportedModelError
from kvarn.format import Preset
from kvarn.rope_scaling import describe, frequencies, parse
from kvarn.step import Span, StepPlan

TINY = {
    **{"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "intermediate_size": 128, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
# short form -> the same by hand, as config.json of transformers 4 says it
BY_HAND: dict[str, tuple[dict[str, Any], int]] = {
    "linear:4": ({"type": "linear", "factor": 4.0}, 1024),
    "yarn:4": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
    "yarn:4:128": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    "llama3:8": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 256},
        2048,
    ),
    '{"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.0, "beta_fast": 8, "truncate": false}': (
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.0, "beta_fast": 8, "truncate": False}
        | {"original_max_position_embeddings": 256},
        512,
    ),
}


def build(folder: Path, model_type: str = "llama", **config: Any) -> Path:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    torch.manual_seed(0)
    made = AutoConfig.for_model(model_type, **TINY | config)
    AutoModelForCausalLM.from_config(made, attn_implementation="eager").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("llama"), rope_parameters={"rope_type": "default", "rope_theta": 50_000.0})


def edited(source: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(source, target, dirs_exist_ok=True)
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


def load(folder: Path, text: str | None = None, preset: Preset | None = None) -> TorchBackend:
    override = None if text is None else parse(text)
    return torch_backend.load(folder, preset, LoadOptions(dtype="float32", device="cpu", rope_scaling=override))


def logits(backend: TorchBackend) -> np.ndarray[Any, Any]:
    tokens = tuple(np.random.default_rng(0).integers(3, 250, 100).tolist())
    backend.allocate(2, 2)
    result = backend.run(StepPlan(spans=(Span(tokens=tokens, start=0, slots=(0,), want="all"),)))
    assert result.outputs[0].logits is not None
    return result.outputs[0].logits


@pytest.mark.parametrize("text", BY_HAND)
def test_an_override_gives_what_an_edited_config_gives_to_the_bit(llama: Path, tmp_path: Path, text: str) -> None:
    scaling, context = BY_HAND[text]
    by_hand = load(edited(llama, tmp_path, rope_scaling=scaling, rope_theta=50_000.0, max_position_embeddings=context))
    got = load(llama, text)
    assert got.info.plan.max_context == by_hand.info.plan.max_context == context
    np.testing.assert_array_equal(logits(got), logits(by_hand))
    assert describe(got.model.config) == describe(by_hand.model.config)
    assert got.model.config == load(llama, text).model.config  # no trace of how it was made
    assert np.abs(logits(got) - logits(load(llama))).max() > 1e-4
    assert got.share(Preset(tile_tokens=64)).info.plan.max_context == context


@pytest.mark.parametrize("text", BY_HAND)
def test_the_core_knows_the_tables_that_transformers_computes(llama: Path, text: str) -> None:
    config = read_config(llama, parse(text))
    table, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, "cpu")
    want, want_factor = frequencies(describe(config.to_dict()), 64)
    np.testing.assert_allclose(table.numpy(), want, rtol=1e-5)
    assert factor == want_factor


def test_none_takes_a_scaling_away(llama: Path, tmp_path: Path) -> None:
    scaled = edited(llama, tmp_path, rope_scaling=BY_HAND["yarn:4"][0], rope_theta=5e4, max_position_embeddings=1024)
    plain, none = load(llama), load(scaled, "none")
    assert none.info.plan.max_context == plain.info.plan.max_context == 256
    np.testing.assert_array_equal(logits(none), logits(plain))


def test_a_fixed_type_in_place_of_a_dynamic_one_makes_the_model_usable(llama: Path, tmp_path: Path) -> None:
    folder = edited(llama, tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0}, rope_theta=5e4)
    with pytest.raises(UnsupportedModelError, match="'dynamic' depends on the length"):
        load(folder)
    np.testing.assert_array_equal(logits(load(folder, "yarn:4")), logits(load(llama, "yarn:4")))


def test_a_config_that_leaves_theta_to_the_family_keeps_the_familys(llama: Path, tmp_path: Path) -> None:
    bare = edited(llama, tmp_path)
    config = json.loads((bare / "config.json").read_text())
    for name in ("rope_parameters", "max_position_embeddings"):
        del config[name]
    (bare / "config.json").write_text(json.dumps(config))
    backend = load(bare, "linear:2")
    assert describe(backend.model.config)["rope_theta"] == 10_000.0
    assert backend.info.plan.max_context == 4096  # twice llama's own 2048


def test_partly_rotated_heads_are_scaled_too(tmp_path: Path) -> None:
    folder = build(tmp_path, "gpt_neox", num_key_value_heads=2)
    backend = load(folder, "linear:4")
    assert describe(backend.model.config)["partial_rotary_factor"] == 0.25
    assert np.abs(logits(backend) - logits(load(folder))).max() > 1e-5


def refused(folder: Path, text: str, kind: type[KvarnError], part: str) -> None:
    with pytest.raises(kind) as caught:
        load(folder, text)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "kind", "part"),
    [
        ("gpt2", UnsupportedModelError, "gpt2 has no RoPE"),
        ("opt", UnsupportedModelError, "opt has no RoPE"),
        ("gptj", UnsupportedModelError, "gptj has no RoPE"),
        ("gemma3_text", UnsupportedModelError, "gemma3_text has a RoPE for each type of layer"),
        ("phi3", ModelError, "phi3 does not take this --rope-scaling"),
    ],
)
def test_a_model_that_cannot_take_it_is_refused_by_name(
    tmp_path: Path, model_type: str, kind: type[KvarnError], part: str
) -> None:
    config = AutoConfig.for_model(model_type, **{"rotary_dim": 16} if model_type == "gptj" else {})
    config.save_pretrained(tmp_path)  # refused before any weight is looked for
    refused(tmp_path, "yarn:4", kind, part)


def test_a_table_that_is_not_the_one_asked_for_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = ROPE_INIT_FUNCTIONS["linear"]
    off = lambda *a, **k: (linear(*a, **k)[0] * 1.001, 1.0)  # noqa: E731
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "linear", off)
    refused(llama, "linear:4", UnsupportedModelError, "llama does not rotate by this --rope-scaling")


def test_a_configuration_that_loses_the_override_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = read_config(llama)
    monkeypatch.setattr(torch_model, "_auto_config", lambda *_: plain)
    refused(llama, "linear:4", UnsupportedModelError, "does not take this --rope-scaling")
