"""Checkpoints that load and those that are refused; RoPE as config.json says; what the self-test finds."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from checkpoint_contract import KVARN, CheckpointContract, copy, save_in_shards
from mlx_lm.models import llama as mlx_lm_llama
from mlx_lm.models.cache import ArraysCache
from mlx_lm.utils import load_model as mlx_lm_load_model
from mlx_lm.utils import quantize_model, save_model
from small_models import THETA, build, distance, edit, feed, prompt
from transformers import AutoModelForCausalLM

from kvarn.backend import LoadOptions
from kvarn.backends.mlx import backend as mlx_backend
from kvarn.backends.mlx.backend import MlxBackend
from kvarn.backends.mlx.model import LoadedModel, load_model, read_config
from kvarn.backends.mlx.self_test import self_test
from kvarn.errors import (
    BackendError,
    CheckpointError,
    UnsupportedModelError,
    UsageError,
)
from kvarn.format import Preset
from kvarn.model_plan import plan_model

OPTIONS = LoadOptions(dtype="float32", device="cpu")


def load(folder: Path, preset: Preset | None = KVARN, dtype: str = "float32") -> MlxBackend:
    return mlx_backend.load(folder, preset, LoadOptions(dtype=dtype, device="cpu"))


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory, llama_dir: Path) -> Path:
    """The small llama in several files with an index."""
    return save_in_shards(llama_dir, tmp_path_factory.mktemp("shards"))


class TestCheckpoints(CheckpointContract):
    renamed = "model.layers.1.attention.k.weight"

    def load(self, folder: Path, preset: Preset | None) -> MlxBackend:
        return load(folder, preset)


assert_not_loaded = TestCheckpoints().assert_not_loaded


def test_a_file_that_the_index_does_not_name_is_refused(shards: Path, tmp_path: Path) -> None:
    """mlx-lm would read it: it takes every file that begins with `model`."""
    copy(shards, tmp_path)
    shutil.copy(sorted(tmp_path.glob("*.safetensors"))[0], tmp_path / "model-old.safetensors")
    assert_not_loaded(tmp_path, CheckpointError, "model-old.safetensors", "which its index does not name")


def test_code_that_a_checkpoint_brings_along_is_never_run(llama_dir: Path, tmp_path: Path) -> None:
    folder = edit(copy(llama_dir, tmp_path), model_file="evil.py", auto_map={"AutoConfig": "evil.Config"})
    (folder / "evil.py").write_text("raise SystemExit('the code of the checkpoint ran')")
    assert_not_loaded(folder, UnsupportedModelError, "evil.py", "never run")


@pytest.mark.parametrize(
    ("dtype", "saved", "want"),
    [
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
        ("auto", "float32", "float32"),
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "float32"),  # emulated on a CPU
    ],
)
def test_the_dtype_is_what_was_asked_for_or_the_checkpoints(
    llama_dir: Path, tmp_path: Path, dtype: str, saved: str, want: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=getattr(torch, saved))
    model.save_pretrained(tmp_path)
    backend = load(tmp_path, KVARN, dtype)
    assert backend.info.dtype == want
    logits = feed(backend, prompt(140), 100)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()


def test_an_unknown_dtype_or_device_is_refused_with_what_there_is(llama_dir: Path) -> None:
    with pytest.raises(UsageError, match="unknown dtype 'int8'; use auto, float32, float16, bfloat16"):
        load(llama_dir, dtype="int8")
    for device in ("cuda", "no-such-device", *([] if mx.is_available(mx.gpu) else ["gpu"])):
        with pytest.raises(BackendError, match=f"device '{device}' cannot be used with MLX here; use --device .*cpu"):
            mlx_backend.load(llama_dir, KVARN, LoadOptions(device=device))


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_mlx_lm_quantized_run_with_sealed_tiles(tmp_path: Path, bits: int) -> None:
    """The logits are those of mlx-lm's own attention over the same quantized weights."""
    build(tmp_path / "plain", "llama", hidden_size=128, tie_word_embeddings=bits == 4)
    module, config = mlx_lm_load_model(tmp_path / "plain", model_config={"rope_theta": THETA["rope_theta"]})
    module, config = quantize_model(module, config, 64, bits)
    folder = tmp_path / "quantized"
    save_model(folder, module)
    (folder / "config.json").write_text(json.dumps(config))
    exact = load(folder, None)
    assert exact.info.weight_bytes < 0.5 * load(tmp_path / "plain", None).info.weight_bytes
    tokens = prompt(200)
    got = feed(exact, tokens, 120)
    assert distance(got, np.array(exact.model.own_logits([*tokens]))) < 1e-5
    wide = exact.share(Preset(key_bits=8, value_bits=8, tile_tokens=64))
    assert 1e-5 < distance(feed(wide, tokens, 120), got) < 0.01


# --- RoPE


@pytest.mark.parametrize("theta", [10_000.0, 50_000.0, 1e6])
def test_theta_counts_where_rope_parameters_alone_say_it(tmp_path: Path, theta: float) -> None:
    """transformers 5 writes no rope_theta; mlx-lm would take 10000 and answer plausibly and wrongly."""
    model = build(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": theta})
    config = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in config
    assert config["rope_parameters"]["rope_theta"] == theta
    backend = load(tmp_path, None)
    assert backend.model.module.args.rope_theta == theta
    tokens = prompt(100)
    with torch.inference_mode():
        want = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    assert distance(feed(backend, tokens, 60), want) < 1e-5
    edit(tmp_path, rope_theta=theta, rope_parameters=None)  # as files before transformers 5 say it
    np.testing.assert_array_equal(feed(load(tmp_path, None), tokens, 60), feed(backend, tokens, 60))


def test_a_theta_that_mlx_lm_does_not_take_is_refused(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family that computes with a theta of its own gives another one in its arguments."""
    from_dict = mlx_lm_llama.ModelArgs.from_dict
    monkeypatch.setattr(
        mlx_lm_llama.ModelArgs, "from_dict", lambda params: from_dict({**params, "rope_theta": 10_000.0})
    )
    assert_not_loaded(copy(llama_dir, tmp_path), UnsupportedModelError, "theta of 50000.0", "uses 10000.0")


# --- the self-test, on a llama that is changed after loading


@pytest.fixture
def loaded(llama_dir: Path) -> LoadedModel:
    return load_model(llama_dir, OPTIONS)


def check(model: LoadedModel, llama_dir: Path) -> LoadedModel:
    return self_test(model, plan_model(read_config(llama_dir), KVARN), mlx_backend._attend_own)


def change(model: LoadedModel, call: Callable[..., Any], layer: int = 1) -> None:
    """Replace what one layer's attention does; `call(theirs, x, mask, cache)`."""
    attention = model.module.model.layers[layer].self_attn
    kind = type(attention)

    def changed(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        return call(lambda x, mask, cache: kind.__call__(self, x, mask, cache), x, mask, cache)

    attention.__class__ = type("Changed", (kind,), {"__call__": changed})


def test_a_sound_model_passes_and_takes_rows(loaded: LoadedModel, llama_dir: Path) -> None:
    assert not loaded.batched
    assert check(loaded, llama_dir).batched


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda own, x, mask, cache: x, "layer 1 of llama answers without reaching our attention"),
        (lambda own, x, mask, cache: own(x, mask, cache) + own(x, mask, cache), "runs attention more than once"),
        (lambda own, x, mask, cache: own(x, mx.zeros((8, 8)), cache), "makes an attention mask of its own"),
        (
            lambda own, x, mask, cache: own(x, mask, cache) * (1 if cache is None else 1.1),
            "gives other logits through our attention",
        ),
        (
            lambda own, x, mask, cache: (
                own(x, mask, cache) + x.mean(1, keepdims=True) * (cache is not None) * 1e-9 + x[:, :1]
            ),
            "gives other logits when its tokens come in two pieces",
        ),
        (
            lambda own, x, mask, cache: x if cache is None else x * cache.update_and_fetch(x, x)[0].sum(),
            "layer 1 reads its cache (sum) outside of our attention",
        ),
        (
            lambda own, x, mask, cache: x if cache is None else mx.matmul(x, cache.update_and_fetch(x, x)[0]),
            "it computes attention itself from what its cache gives",
        ),
    ],
)
def test_a_layer_that_does_something_else_is_refused_by_name(
    loaded: LoadedModel, llama_dir: Path, call: Callable[..., Any], why: str
) -> None:
    change(loaded, call)
    with pytest.raises(UnsupportedModelError) as caught:
        check(loaded, llama_dir)
    assert why in str(caught.value), str(caught.value)


def test_a_cache_that_is_more_than_keys_is_refused(loaded: LoadedModel, llama_dir: Path) -> None:
    kind = type(loaded.module)
    loaded.module.__class__ = type("Changed", (kind,), {"make_cache": lambda self: [ArraysCache(2), ArraysCache(2)]})
    with pytest.raises(UnsupportedModelError, match="layer 0 of llama keeps a ArraysCache"):
        check(loaded, llama_dir)


def test_a_plan_of_other_shapes_is_refused(loaded: LoadedModel, llama_dir: Path) -> None:
    config = read_config(llama_dir)
    for changes, why in (
        ({"num_hidden_layers": 3}, "has 2 layers, config.json 3"),
        ({"num_key_value_heads": 1}, r"has keys of \[kv heads, head_dim\] \[2, 64\], config.json says \[1, 64\]"),
    ):
        with pytest.raises(UnsupportedModelError, match=why):
            self_test(loaded, plan_model(config | changes, KVARN), mlx_backend._attend_own)


def test_a_family_whose_positions_are_plain_numbers_runs_one_sequence_after_another(
    loaded: LoadedModel, llama_dir: Path
) -> None:
    def call(own: Callable[..., Any], x: Any, mask: Any, cache: Any) -> Any:
        if cache is not None:
            cache.offset = int(cache.offset)
        return own(x, mask, cache)

    change(loaded, call)
    assert not check(replace(loaded, batched=True), llama_dir).batched


def test_a_family_that_ignores_the_rows_positions_runs_one_sequence_after_another(
    loaded: LoadedModel, llama_dir: Path
) -> None:
    def call(own: Callable[..., Any], x: Any, mask: Any, cache: Any) -> Any:
        if cache is not None and isinstance(cache.offset, mx.array):
            cache.offset = cache.offset[0]
        return own(x, mask, cache)

    change(loaded, call)
    assert not check(loaded, llama_dir).batched
