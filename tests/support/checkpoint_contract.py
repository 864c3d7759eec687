"""What every backend owes a user whose checkpoint is whole, damaged, or not meant for it.

A test file makes a class of CheckpointContract with its way to load, and has the fixtures `llama_dir`, a small llama in
one file with an untied head, and `shards`, the same in several files with an index.
"""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from small_models import edit, feed, prompt
from transformers import AutoModelForCausalLM

from kvarn.errors import CheckpointError, KvarnError, ModelError
from kvarn.format import Preset

KVARN = Preset(tile_tokens=64)
TENSOR = "model.layers.1.self_attn.k_proj.weight"
Tensors = dict[str, Any]


def save_in_shards(source: Path, folder: Path) -> Path:
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(folder, max_shard_size="400KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, dirs_exist_ok=True)
    return target


def change_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


def without_a_tensor(tensors: Tensors) -> Tensors:
    return {name: x for name, x in tensors.items() if name != TENSOR}


def with_an_extra_tensor(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.1.self_attn.k_proj.extra": np.zeros(3, np.float32)}


def with_an_extra_layer(tensors: Tensors) -> Tensors:
    return tensors | {TENSOR.replace(".1.", ".9."): tensors[TENSOR].copy()}


def with_another_shape(tensors: Tensors) -> Tensors:
    return tensors | {TENSOR: tensors[TENSOR][:, :64].copy()}


def under_another_name(tensors: Tensors) -> Tensors:
    return without_a_tensor(tensors) | {"model.layers.1.attention.k.weight": tensors[TENSOR].copy()}


def without_the_head(tensors: Tensors) -> Tensors:
    return {name: x for name, x in tensors.items() if name != "lm_head.weight"}


class CheckpointContract(ABC):
    """The tests; `load` says how."""

    renamed = TENSOR  # which of the two names the backend reports where a tensor has another name

    @abstractmethod
    def load(self, folder: Path, preset: Preset | None) -> Any:
        """A backend in float32 on the CPU."""

    def assert_not_loaded(self, folder: Path, kind: type[KvarnError], *parts: str) -> None:
        for preset in (KVARN, None):
            with pytest.raises(kind) as caught:
                self.load(folder, preset)
            text = str(caught.value)
            assert "\n" not in text
            assert len(text.replace(str(folder), "")) < 400
            for part in parts:
                assert part in text, text

    def test_a_whole_checkpoint_loads_from_one_file_and_from_shards(self, llama_dir: Path, shards: Path) -> None:
        one, many = self.load(llama_dir, None), self.load(shards, None)
        np.testing.assert_array_equal(feed(one, prompt(300), 300), feed(many, prompt(300), 300))
        assert one.info.weight_bytes == many.info.weight_bytes
        assert one.info.vocab_size == 256
        assert one.info.eos_token_ids == (2,)

    # --- tensors

    @pytest.mark.parametrize(
        ("change", "part"),
        [
            (without_a_tensor, TENSOR),
            (with_an_extra_tensor, "model.layers.1.self_attn.k_proj.extra"),
            (with_an_extra_layer, "model.layers.9.self_attn.k_proj.weight"),
            (with_another_shape, TENSOR),
            (under_another_name, ""),
            (without_the_head, "lm_head.weight"),
        ],
    )
    def test_a_checkpoint_that_does_not_fit_its_config_is_refused_with_the_tensors_name(
        self, llama_dir: Path, tmp_path: Path, change: Callable[[Tensors], Tensors], part: str
    ) -> None:
        folder = change_tensors(copy(llama_dir, tmp_path), change)
        self.assert_not_loaded(folder, CheckpointError, part or self.renamed)

    def test_a_tied_head_need_not_be_in_the_file_and_its_weights_count_once(
        self, llama_dir: Path, tmp_path: Path
    ) -> None:
        folder = edit(copy(llama_dir, tmp_path), tie_word_embeddings=True)
        tied = self.load(change_tensors(folder, without_the_head), KVARN)
        assert tied.info.vocab_size == 256
        hidden = json.loads((llama_dir / "config.json").read_text())["hidden_size"]
        assert self.load(llama_dir, KVARN).info.weight_bytes - tied.info.weight_bytes == 256 * hidden * 4

    @pytest.mark.parametrize("field", ["num_hidden_layers", "intermediate_size", "vocab_size", "num_key_value_heads"])
    def test_a_config_of_another_size_is_refused(self, llama_dir: Path, tmp_path: Path, field: str) -> None:
        config = json.loads((llama_dir / "config.json").read_text())
        other = config["num_attention_heads"] if field == "num_key_value_heads" else 2 * config[field]
        assert other != config[field]
        self.assert_not_loaded(edit(copy(llama_dir, tmp_path), **{field: other}), CheckpointError, "model.")

    # --- files

    @pytest.mark.parametrize(
        "cut",
        [
            lambda x: x[:-1],
            lambda x: x[: len(x) // 2],
            lambda x: x[:100],
            lambda x: x[:7],
            lambda x: b"",
            lambda x: x + b"0",
        ],
        ids=["one byte short", "half", "in the header", "in the length", "empty", "one byte long"],
    )
    @pytest.mark.parametrize("which", [0, -1])
    def test_a_shard_of_another_length_is_refused_by_name(
        self, shards: Path, tmp_path: Path, which: int, cut: Callable[[bytes], bytes]
    ) -> None:
        shard = sorted(copy(shards, tmp_path).glob("*.safetensors"))[which]
        shard.write_bytes(cut(shard.read_bytes()))
        self.assert_not_loaded(tmp_path, CheckpointError, shard.name, "damaged")

    def test_a_missing_shard_is_refused_by_name(self, shards: Path, tmp_path: Path) -> None:
        shard = sorted(copy(shards, tmp_path).glob("*.safetensors"))[1]
        shard.unlink()
        self.assert_not_loaded(tmp_path, CheckpointError, shard.name, "which its index names")

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "null", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{}", "\x00"]
    )
    def test_a_damaged_index_is_refused_by_name(self, shards: Path, tmp_path: Path, text: str) -> None:
        (copy(shards, tmp_path) / "model.safetensors.index.json").write_text(text)
        self.assert_not_loaded(tmp_path, CheckpointError, "index")

    def test_pickled_weights_are_never_read(self, llama_dir: Path, tmp_path: Path) -> None:
        file = copy(llama_dir, tmp_path) / "model.safetensors"
        tensors = {name: torch.from_numpy(x) for name, x in load_file(file).items()}
        file.unlink()
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        self.assert_not_loaded(tmp_path, CheckpointError, "pickled weights are not loaded")

    # --- config.json and its neighbours

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "{}", '{"model_type": 3}', "\x00\x01"])
    def test_a_config_that_means_nothing_is_a_model_error(self, llama_dir: Path, tmp_path: Path, text: str) -> None:
        (copy(llama_dir, tmp_path) / "config.json").write_text(text)
        self.assert_not_loaded(tmp_path, ModelError, "config.json")

    def test_an_unknown_family_is_a_model_error(self, llama_dir: Path, tmp_path: Path) -> None:
        folder = edit(copy(llama_dir, tmp_path), model_type="no-such-model")
        self.assert_not_loaded(folder, ModelError, "no-such-model")

    def test_a_missing_config_is_a_model_error(self, llama_dir: Path, tmp_path: Path) -> None:
        (copy(llama_dir, tmp_path) / "config.json").unlink()
        self.assert_not_loaded(tmp_path, ModelError, "has no config.json")
        self.assert_not_loaded(tmp_path / "nowhere", ModelError, "has no config.json")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("hidden_size", "large"),
            ("num_attention_heads", 0),
            ("rope_parameters", {"rope_type": "no-such-rope", "rope_theta": 1e4}),
            ("head_dim", 0.5),
        ],
    )
    def test_a_field_that_means_nothing_is_a_model_error(
        self, llama_dir: Path, tmp_path: Path, field: str, value: Any
    ) -> None:
        self.assert_not_loaded(edit(copy(llama_dir, tmp_path), **{field: value}), ModelError)

    def test_a_damaged_generation_config_is_not_needed(self, llama_dir: Path, tmp_path: Path) -> None:
        path = copy(llama_dir, tmp_path) / "generation_config.json"
        path.write_text('{"eos_token_id": [5, 7]}')
        assert self.load(tmp_path, KVARN).info.eos_token_ids == (5, 7)
        path.write_text("{")
        assert self.load(tmp_path, KVARN).info.eos_token_ids == (2,)
