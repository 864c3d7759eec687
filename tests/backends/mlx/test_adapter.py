"""LoRA adapters on MLX: the logits of weights that were changed by hand, the same as on torch, or a refusal by name."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from lora_folders import SCALE, Matrices, matrices, write_mlx_lm, write_peft
from mlx_lm.utils import load_model as mlx_lm_load_model
from mlx_lm.utils import quantize_model, save_model
from safetensors.numpy import load_file, save_file
from small_models import THETA, build, distance, feed, prompt

from kvarn.backend import LoadOptions
from kvarn.backends.mlx import backend as mlx_backend
from kvarn.backends.mlx.adapter import LoraQuantizedLinear
from kvarn.backends.mlx.backend import MlxBackend
from kvarn.backends.triton import backend as torch_backend
from kvarn.errors import KvarnError, ModelError, UnsupportedModelError
from kvarn.format import Preset

# [outputs, inputs] in the llama of conftest.py
SHAPES = {
    f"model.layers.{layer}.{name}": shape
    for layer in (0, 1)
    for name, shape in {
        "self_attn.q_proj": (384, 192),
        "self_attn.v_proj": (128, 192),
        "mlp.down_proj": (192, 128),
    }.items()
}
TOKENS = prompt(150)


def options(adapter: Path | None, dtype: str = "float32") -> LoadOptions:
    return LoadOptions(dtype=dtype, device="cpu", adapter=adapter)


def load(folder: Path, adapter: Path | None = None, preset: Preset | None = None, dtype: str = "float32") -> MlxBackend:
    return mlx_backend.load(folder, preset, options(adapter, dtype))


def changed_by_hand(source: Path, target: Path, given: Matrices) -> Path:
    """A copy of a checkpoint with W + SCALE * B @ A, in NumPy."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    weights = load_file(source / "model.safetensors")
    for name, (a, b) in given.items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + SCALE * (b @ a)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("kind", ["peft", "mlx-lm"])
def test_the_logits_are_those_of_weights_changed_by_hand_and_those_of_torch(
    llama_dir: Path, tmp_path: Path, kind: str
) -> None:
    given = matrices(SHAPES)
    folder = tmp_path / "adapter"
    adapter = write_peft(folder, given) if kind == "peft" else write_mlx_lm(folder, given, 2)
    want = feed(load(changed_by_hand(llama_dir, tmp_path / "by_hand", given)), TOKENS, 90)
    backend = load(llama_dir, adapter)
    got = feed(backend, TOKENS, 90)
    assert distance(got, want) < 1e-5
    assert distance(feed(load(llama_dir), TOKENS, 90), want) > 0.1
    assert backend.info.weight_bytes == load(llama_dir).info.weight_bytes
    assert distance(feed(torch_backend.load(llama_dir, None, options(adapter)), TOKENS, 90), got) < 1e-5


def test_another_preset_over_the_same_weights_keeps_the_adapter(llama_dir: Path, tmp_path: Path) -> None:
    adapter = write_mlx_lm(tmp_path / "adapter", matrices(SHAPES), 2)
    exact = load(llama_dir, adapter)
    want = feed(exact, TOKENS, 90)
    wide = exact.share(Preset(key_bits=8, value_bits=8, tile_tokens=64))
    assert 1e-5 < distance(feed(wide, TOKENS, 90), want) < 0.02
    np.testing.assert_array_equal(feed(wide.share(None), TOKENS, 90), want)
    assert distance(feed(load(llama_dir, adapter, dtype="bfloat16"), TOKENS, 90), want) < 0.1


def test_bfloat16_tensors_are_read_as_they_are(llama_dir: Path, tmp_path: Path) -> None:
    adapter = write_mlx_lm(tmp_path / "adapter", matrices(SHAPES), 2)
    file = str(adapter / "adapters.safetensors")
    tensors = mx.load(file)
    assert isinstance(tensors, dict)
    mx.save_safetensors(file, {name: x.astype(mx.bfloat16) for name, x in tensors.items()})
    other = torch_backend.load(llama_dir, None, options(adapter))
    assert distance(feed(load(llama_dir, adapter), TOKENS, 90), feed(other, TOKENS, 90)) < 1e-5


@pytest.mark.parametrize("kind", ["peft", "mlx-lm"])
def test_quantized_weights_keep_the_adapter_beside_them(tmp_path: Path, kind: str) -> None:
    """Merged, most of a small change would be rounded away. The output matrix is quantized too, and narrowed."""
    build(tmp_path / "plain", "llama", hidden_size=128, tie_word_embeddings=False)
    module, config = mlx_lm_load_model(tmp_path / "plain", model_config={"rope_theta": THETA["rope_theta"]})
    module, config = quantize_model(module, config, 64, 4)
    folder = tmp_path / "quantized"
    save_model(folder, module)
    (folder / "config.json").write_text(json.dumps(config))
    q = {f"model.layers.{layer}.self_attn.q_proj": (128, 128) for layer in (0, 1)}
    given = matrices({**q, "lm_head": (256, 128)})
    path = tmp_path / "adapter"
    adapter = write_peft(path, given) if kind == "peft" else write_mlx_lm(path, given, 2)
    backend = load(folder, adapter)
    assert isinstance(backend.model.module.lm_head, LoraQuantizedLinear)
    added = 4 * sum(a.size + b.size for a, b in given.values())
    assert backend.info.weight_bytes == load(folder).info.weight_bytes + added
    got = feed(backend, TOKENS, 90)

    # by hand: the weights that the quantized ones stand for, changed in NumPy
    plain = load(folder)
    weights = dict(load_file(tmp_path / "plain" / "model.safetensors"))
    modules = dict(plain.model.module.named_modules())
    for name, x in modules.items():
        if "scales" in x:
            w = mx.dequantize(x.weight, x.scales, x.biases, x.group_size, x.bits).astype(mx.float32)
            weights[f"{name}.weight"] = np.array(w)
    by_hand = tmp_path / "dequantized"
    by_hand.mkdir()
    (by_hand / "config.json").write_bytes((tmp_path / "plain" / "config.json").read_bytes())
    save_file(weights, by_hand / "model.safetensors", metadata={"format": "pt"})
    assert distance(feed(load(by_hand), TOKENS, 90), feed(plain, TOKENS, 90)) < 1e-4
    want = feed(load(changed_by_hand(by_hand, tmp_path / "by_hand", given)), TOKENS, 90)
    assert distance(got, want) < 1e-4
    assert distance(feed(plain, TOKENS, 90), want) > 0.1


def test_a_module_that_mlx_lm_names_otherwise_is_found(tmp_path: Path) -> None:
    """gpt_neox: `gpt_neox.layers.1` in transformers, `model.h.1` in mlx-lm."""
    build(tmp_path / "neox", "gpt_neox", intermediate_size=512)
    given = matrices({f"gpt_neox.layers.{layer}.attention.query_key_value": (384, 128) for layer in (0, 1)})
    adapter = write_peft(tmp_path / "adapter", given)
    got, want = load(tmp_path / "neox", adapter), torch_backend.load(tmp_path / "neox", None, options(adapter))
    assert "model.h.1.attention.query_key_value" in dict(got.model.module.named_modules())
    # mlx-lm approximates gelu in this family, so the two are further apart than rounding, with and without an adapter
    assert distance(feed(got, TOKENS, 90), feed(want, TOKENS, 90)) < 1e-3
    assert distance(feed(got, TOKENS, 90), feed(load(tmp_path / "neox"), TOKENS, 90)) > 0.05


def refused(folder: Path, adapter: Path, kind: type[KvarnError], *parts: str) -> None:
    with pytest.raises(kind) as caught:
        load(folder, adapter)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_this_model_is_refused_by_name(llama_dir: Path, tmp_path: Path) -> None:
    q = "model.layers.0.self_attn.q_proj"
    for number, (shapes, kind, parts) in enumerate(
        [
            ({q: (384, 64)}, ModelError, [q, "[384, 64]", "[384, 192]"]),
            ({"model.layers.0.self_attn.qkv_proj": (384, 192)}, ModelError, ["qkv_proj", "does not have"]),
            ({q: (384, 192)}, ModelError, ["no tensors for layer 1"]),
            ({"model.embed_tokens": (256, 192)}, UnsupportedModelError, ["embed_tokens", "no plain linear layer"]),
        ]
    ):
        refused(llama_dir, write_mlx_lm(tmp_path / str(number), matrices(shapes), 2), kind, *parts)


def test_a_model_with_tied_embeddings_has_no_output_matrix_to_change(tmp_path: Path) -> None:
    build(tmp_path / "tied", "llama", tie_word_embeddings=True)
    adapter = write_peft(tmp_path / "adapter", matrices({"lm_head": (256, 128)}))
    refused(tmp_path / "tied", adapter, ModelError, "lm_head", "does not have")
