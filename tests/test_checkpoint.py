"""What a checkpoint's files say of themselves, before a framework reads them."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvarn.checkpoint import check_files, check_memory, eos_token_ids, weight_bytes
from kvarn.errors import CapacityError, CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    half, whole = np.zeros((3, 5), np.float16), np.zeros(7, np.float32)
    save_file({"a": half, "b": whole, "codes": np.zeros(11, np.uint8)}, tmp_path / "model.safetensors")
    return tmp_path


def test_weights_are_counted_in_the_dtype_they_are_held_in(folder: Path) -> None:
    shards = check_files(folder)
    assert weight_bytes(shards, 2) == 15 * 2 + 7 * 2 + 11
    assert weight_bytes(shards, 4) == 15 * 4 + 7 * 4 + 11


def test_weights_that_do_not_fit_are_refused_before_they_are_read(folder: Path) -> None:
    shards = check_files(folder)
    check_memory(shards, 4, 99, "cpu")
    with pytest.raises(CapacityError, match=r"weights take .* GiB and .* GiB are free on cpu; use a smaller model"):
        check_memory(shards, 4, 98, "cpu")


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 20, -1])
def test_a_short_shard_is_refused_by_name(folder: Path, cut: int) -> None:
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        check_files(folder)


def test_a_shard_with_bytes_behind_its_end_is_refused(folder: Path) -> None:
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="its header asks for"):
        check_files(folder)


def test_a_shard_that_the_index_names_must_be_there(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "other.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"lacks other\.safetensors"):
        check_files(folder)


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path, {"eos_token_id": 3}) == (3,)
    assert eos_token_ids(tmp_path, {"text_config": {"eos_token_id": [4, 5]}}) == (4, 5)
    assert eos_token_ids(tmp_path, {}) == ()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert eos_token_ids(tmp_path, {"eos_token_id": 3}) == (1, 2)
