"""LoRA adapters on torch: the logits of weights that were changed by hand, or a refusal by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lora_folders import SCALE, Matrices, matrices, write_mlx_lm, write_peft
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from kvarn.backend import LoadOptions
from kvarn.backends.triton import backend as torch_backend
from kvarn.backends.triton.backend import TorchBackend
from kvarn.errors import KvarnError, ModelError, UnsupportedModelError
from kvarn.format import Preset
from kvarn.step import Span, StepPlan

TINY = {
    **{"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "intermediate_size": 192, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
# [outputs, inputs] of the modules that the adapters here change
SHAPES = {
    f"model.layers.{layer}.{name}": shape
    for layer in (0, 1)
    for name, shape in {
        "self_attn.q_proj": (128, 128),
        "self_attn.v_proj": (64, 128),
        "mlp.down_proj": (128, 192),
    }.items()
}


def build(folder: Path, model_type: str = "llama", **config: Any) -> Any:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    torch.manual_seed(0)
    made = AutoConfig.for_model(model_type, **TINY | config)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(0, p.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    build(folder, tie_word_embeddings=False)
    return folder


def load(
    folder: Path, adapter: Path | None = None, preset: Preset | None = None, dtype: str = "float32"
) -> TorchBackend:
    return torch_backend.load(folder, preset, LoadOptions(dtype=dtype, device="cpu", adapter=adapter))


def logits(backend: TorchBackend) -> np.ndarray[Any, Any]:
    tokens = tuple(np.random.default_rng(0).integers(3, 250, 100).tolist())
    backend.allocate(2, 2)
    result = backend.run(StepPlan(spans=(Span(tokens=tokens, start=0, slots=(0,), want="all"),)))
    assert result.outputs[0].logits is not None
    return result.outputs[0].logits


def changed_by_hand(source: Path, target: Path, given: Matrices, scales: dict[str, float] | None = None) -> Path:
    """A copy of a checkpoint with W + scale * B @ A, in NumPy."""
    target.mkdir(exist_ok=True)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    weights = load_file(source / "model.safetensors")
    for name, (a, b) in given.items():
        delta = (scales or {}).get(name, SCALE) * (b @ a)
        weights[f"{name}.weight"] = torch.from_numpy(weights[f"{name}.weight"].numpy() + delta)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def distance(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("kind", ["peft", "mlx-lm"])
def test_the_logits_are_those_of_weights_changed_by_hand(llama: Path, tmp_path: Path, kind: str) -> None:
    given = matrices(SHAPES)
    folder = tmp_path / "adapter"
    adapter = write_peft(folder, given) if kind == "peft" else write_mlx_lm(folder, given, 2)
    want = logits(load(changed_by_hand(llama, tmp_path / "by_hand", given)))
    backend = load(llama, adapter)
    assert distance(logits(backend), want) < 1e-6
    assert distance(logits(load(llama)), want) > 0.1
    assert backend.info.weight_bytes == load(llama).info.weight_bytes


def test_another_preset_over_the_same_weights_keeps_the_adapter(llama: Path, tmp_path: Path) -> None:
    """And the self-tests at start pass with tiles and in bfloat16."""
    adapter = write_peft(tmp_path / "adapter", matrices(SHAPES))
    exact = load(llama, adapter)
    want = logits(exact)
    wide = load(llama, adapter, Preset(key_bits=8, value_bits=8, tile_tokens=128))
    assert wide.info.plan.sealed
    np.testing.assert_array_equal(logits(wide.share(None)), want)
    np.testing.assert_array_equal(logits(exact.share(None)), want)
    assert distance(logits(load(llama, adapter, dtype="bfloat16")), want) < 0.05


def test_scales_of_rslora_and_of_patterns(llama: Path, tmp_path: Path) -> None:
    given = matrices(SHAPES)
    special = "model.layers.1.mlp.down_proj"
    given |= matrices({special: SHAPES[special]}, rank=9, seed=1)
    adapter = write_peft(
        tmp_path / "adapter", given, lora_alpha=3, use_rslora=True, rank_pattern={"1.mlp.down_proj": 9},
        alpha_pattern={r".*\.v_proj": 5, "q_proj": 7},
    )  # fmt: skip
    scales = dict.fromkeys(given, 3 / 2) | {special: 3 / 3}
    scales |= {name: (5 if "v_proj" in name else 7) / 2 for name in given if "self_attn" in name}
    want = logits(load(changed_by_hand(llama, tmp_path / "by_hand", given, scales)))
    assert distance(logits(load(llama, adapter)), want) < 1e-6


def test_bfloat16_tensors_are_read_as_they_are(llama: Path, tmp_path: Path) -> None:
    given = matrices(SHAPES)
    adapter = write_peft(tmp_path / "adapter", given)
    file = adapter / "adapter_model.safetensors"
    halves = {name: x.bfloat16() for name, x in load_file(file).items()}
    save_file(halves, file)
    rounded = {
        name: (torch.from_numpy(a).bfloat16().float().numpy(), torch.from_numpy(b).bfloat16().float().numpy())
        for name, (a, b) in given.items()
    }
    want = logits(load(changed_by_hand(llama, tmp_path / "by_hand", rounded)))
    assert distance(logits(load(llama, adapter)), want) < 1e-6


def test_an_output_matrix_of_its_own_can_be_changed(llama: Path, tmp_path: Path) -> None:
    given = matrices({"lm_head": (256, 128)})
    want = logits(load(changed_by_hand(llama, tmp_path / "by_hand", given)))
    assert distance(logits(load(llama, write_peft(tmp_path / "adapter", given))), want) < 1e-6


def test_the_transposed_weights_of_gpt2_are_changed_the_right_way_round(tmp_path: Path) -> None:
    model = build(tmp_path / "gpt2", "gpt2", num_key_value_heads=2)
    name = "transformer.h.1.attn.c_attn"
    given = matrices({name: (384, 128)})
    # fan_in_fan_out is peft's word for it
    adapter = write_peft(tmp_path / "adapter", given, fan_in_fan_out=True, layers_to_transform=1)
    got = logits(load(tmp_path / "gpt2", adapter))
    before = logits(load(tmp_path / "gpt2"))
    a, b = given[name]
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight += torch.from_numpy(SCALE * (b @ a).T)
    model.save_pretrained(tmp_path / "by_hand")
    want = logits(load(tmp_path / "by_hand"))
    assert distance(got, want) < 1e-6
    assert distance(before, want) > 0.01


def refused(folder: Path, adapter: Path, kind: type[KvarnError], *parts: str) -> None:
    with pytest.raises(kind) as caught:
        load(folder, adapter)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_this_model_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    q = "model.layers.0.self_attn.q_proj"
    for number, (shapes, kind, parts) in enumerate(
        [
            ({q: (128, 64)}, ModelError, [q, "[128, 64]", "[128, 128]"]),
            ({"model.layers.0.self_attn.qkv_proj": (128, 128)}, ModelError, ["qkv_proj", "does not have"]),
            ({"model.layers.7.self_attn.q_proj": (128, 128)}, ModelError, ["layers.7", "does not have"]),
            ({q: (128, 128)}, ModelError, ["no tensors for model.layers.1.self_attn.q_proj"]),
            ({"model.embed_tokens": (256, 128)}, UnsupportedModelError, ["embed_tokens", "no plain linear layer"]),
            ({"model.layers.0.input_layernorm": (128, 128)}, UnsupportedModelError, ["no plain linear layer"]),
        ]
    ):
        refused(llama, write_peft(tmp_path / str(number), matrices(shapes)), kind, *parts)
    one = matrices({name: shape for name, shape in SHAPES.items() if "layers.1" in name})
    refused(llama, write_mlx_lm(tmp_path / "short", one, 2), ModelError, "no tensors for layer 0")
    assert load(llama, write_mlx_lm(tmp_path / "last", one, 1)).info.weight_bytes > 0  # the last layer is what it says


def test_tied_embeddings_are_not_changed_through_the_output_matrix(tmp_path: Path) -> None:
    build(tmp_path / "tied", tie_word_embeddings=True)
    adapter = write_peft(tmp_path / "adapter", matrices({"lm_head": (256, 128)}))
    refused(tmp_path / "tied", adapter, UnsupportedModelError, "lm_head", "shares with its embeddings")


def test_a_refused_adapter_is_refused_before_the_weights_are_read(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    adapter = write_peft(tmp_path / "adapter", matrices(SHAPES), use_dora=True)
    refused(tmp_path, adapter, UnsupportedModelError, "DoRA")
