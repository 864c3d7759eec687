"""The pools: sizes are the formula's, slots are views, and what does not fit is said."""

import math

import pytest
import torch

from kvarn.backends.triton.pool import Pool
from kvarn.capacity import pool_size
from kvarn.errors import CapacityError
from kvarn.format import Preset
from kvarn.model_plan import ModelPlan, plan_model

PRESETS = [None, Preset(), Preset(key_bits=8, value_bits=5, tile_tokens=64)]
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_size": 384,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
MIXED = CONFIG | {"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"] * 2}


def slot_bytes(plan: ModelPlan, itemsize: int) -> int:
    return 4 * 2 * 2 * plan.tile_tokens * 64 * itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.name if p else "exact")
@pytest.mark.parametrize("config", [CONFIG, MIXED], ids=["sealed", "mixed"])
@pytest.mark.parametrize(("blocks", "slots"), [(0, 1), (5, 3)])
def test_what_is_taken_is_what_was_predicted(
    config: dict[str, object], preset: Preset | None, dtype: torch.dtype, blocks: int, slots: int
) -> None:
    plan = plan_model(config, preset)
    size = pool_size(plan, dtype.itemsize)
    report = Pool(plan, blocks, slots, dtype, "cpu").report()
    assert report.blocks == blocks * size.block_bytes
    assert report.slots == slots * size.slot_bytes == slots * slot_bytes(plan, dtype.itemsize)


def test_a_block_is_its_tiles_their_flags_and_the_pages_of_exact_layers() -> None:
    plan, mixed = plan_model(CONFIG, Preset()), plan_model(MIXED, Preset())
    tile = 57 * 128  # format.md: D=64, k4v2, G=128
    assert pool_size(plan, 2).block_bytes == 4 * 2 * (tile + 1)
    page = 2 * 2 * 128 * 64 * 2
    assert pool_size(mixed, 2).block_bytes == 2 * 2 * (tile + 1) + 2 * page


def test_exact_takes_no_blocks() -> None:
    plan = plan_model(CONFIG, None)
    assert pool_size(plan, 4).block_bytes == 0
    assert Pool(plan, 7, 2, torch.float32, "cpu").report().blocks == 0


@pytest.mark.parametrize("config", [CONFIG, MIXED], ids=["sealed", "mixed"])
@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.name if p else "exact")
def test_every_layer_has_its_own_page_in_every_slot(config: dict[str, object], preset: Preset | None) -> None:
    plan = plan_model(config, preset)
    pool = Pool(plan, 1, 3, torch.float32, "cpu")
    pages = [(layer, slot) for layer in range(4) for slot in range(3)]
    for value, (layer, slot) in enumerate(pages):
        page = pool.slot(layer, slot)
        assert page.shape == (2, 2, plan.tile_tokens, 64)
        page.fill_(value)
    for value, (layer, slot) in enumerate(pages):
        assert bool((pool.slot(layer, slot) == value).all()), f"layer {layer}, slot {slot} shares memory"


def test_a_pool_beyond_memory_is_a_capacity_error_with_its_size() -> None:
    with pytest.raises(CapacityError, match=r"KV cache of \d+ MiB could not be allocated on cpu; lower --ctx-size"):
        Pool(plan_model(CONFIG, Preset()), 10**12, 1, torch.float32, "cpu")
    with pytest.raises(CapacityError, match="could not be allocated"):
        Pool(plan_model(CONFIG, None), 0, 10**12, torch.float32, "cpu")


def test_bytes_per_token_are_those_of_the_format() -> None:
    plan = plan_model(CONFIG, Preset())
    fmt = plan.tile_format
    assert fmt is not None
    per_token = pool_size(plan, 2).block_bytes / 128 / 4 / 2
    assert math.isclose(per_token, 57 + 1 / 128)  # the flag byte beside each tile
