"""The pools: sizes are the formula's, writes land where they should, and what does not fit is said."""

import mlx.core as mx
import numpy as np
import pytest

from kvarn.backends.mlx.pool import Pool
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


def make(plan: ModelPlan, blocks: int, slots: int, dtype: mx.Dtype = mx.float32) -> Pool:
    return Pool(plan, blocks, slots, dtype, "cpu", available=2**34)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.name if p else "exact")
@pytest.mark.parametrize("config", [CONFIG, MIXED], ids=["sealed", "mixed"])
@pytest.mark.parametrize(("blocks", "slots"), [(0, 1), (5, 3)])
def test_what_is_taken_is_what_was_predicted(
    config: dict[str, object], preset: Preset | None, dtype: mx.Dtype, blocks: int, slots: int
) -> None:
    plan = plan_model(config, preset)
    size = pool_size(plan, dtype.size)
    report = make(plan, blocks, slots, dtype).report()
    assert report.blocks == blocks * size.block_bytes
    assert report.slots == slots * size.slot_bytes == slots * 4 * 2 * 2 * plan.tile_tokens * 64 * dtype.size


def test_mlx_itself_counts_what_is_reported() -> None:
    """Nothing but the rounding of every array to whole pages of memory is added."""
    plan = plan_model(CONFIG, Preset())
    before = mx.get_active_memory()
    pool = make(plan, 200, 10)
    taken, report = mx.get_active_memory() - before, pool.report()
    assert 1 <= taken / (report.blocks + report.slots) < 1.05


@pytest.mark.parametrize("config", [CONFIG, MIXED], ids=["sealed", "mixed"])
@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.name if p else "exact")
def test_every_layer_has_its_own_page_in_every_slot_and_block(config: dict[str, object], preset: Preset | None) -> None:
    plan = plan_model(config, preset)
    pool = make(plan, 3, 3)
    pages = [(layer, slot) for layer in range(4) for slot in range(3)]
    shape = (2, 2, plan.tile_tokens, 64)
    for value, (layer, slot) in enumerate(pages):
        pool.write_slot(layer, slot, 0, mx.full(shape, value))
    kept = [(layer.index, block) for layer in plan.exact if preset for block in range(3)]
    for value, (layer, block) in enumerate(kept):
        pool.write_block(layer, block, mx.full(shape, 100 + value))
    pool.flush()
    for value, (layer, slot) in enumerate(pages):
        assert pool.slot(layer, slot).shape == shape
        assert (np.array(pool.slot(layer, slot)) == value).all(), f"layer {layer}, slot {slot}"
    for value, (layer, block) in enumerate(kept):
        assert (np.array(pool.exact_blocks[layer][block]) == 100 + value).all(), f"layer {layer}, block {block}"


def test_a_write_touches_its_own_tokens_and_blocks_only() -> None:
    plan = plan_model(CONFIG, Preset(tile_tokens=64))
    pool = make(plan, 5, 2)
    pool.write_slot(1, 1, 10, mx.ones((2, 2, 3, 64)))
    fmt = plan.tile_format
    assert fmt is not None
    pool.write_tiles(2, mx.array([4, 1]), mx.full((2, 2, fmt.tile_nbytes), 7, mx.uint8), mx.ones((2, 2), mx.uint8))
    pool.flush()
    page = np.array(pool.slot(1, 1))
    assert (page[:, :, 10:13] == 1).all()
    assert page.sum() == 2 * 2 * 3 * 64
    for row, (tiles, flags) in enumerate(zip(pool.tiles, pool.flags, strict=True)):
        written = {block for block in range(5) if np.array(tiles[block]).any() or np.array(flags[block]).any()}
        assert written == ({1, 4} if row == 2 else set())


def test_writing_again_and_again_takes_no_more_memory() -> None:
    plan = plan_model(CONFIG, Preset(tile_tokens=64))
    pool = make(plan, 4, 40)
    fmt = plan.tile_format
    assert fmt is not None

    def write() -> None:
        for layer in range(4):
            for slot in range(40):
                pool.write_slot(layer, slot, 5, mx.ones((2, 2, 1, 64)))
            pool.write_tiles(
                layer, mx.array([2]), mx.ones((1, 2, fmt.tile_nbytes), mx.uint8), mx.ones((1, 2), mx.uint8)
            )
        pool.flush()

    write()
    before = mx.get_active_memory()
    for _ in range(3):
        write()
    assert mx.get_active_memory() <= before


def test_a_pool_beyond_memory_is_a_capacity_error_with_both_numbers() -> None:
    for preset, blocks, slots in ((Preset(), 10**12, 1), (None, 0, 10**12)):
        with pytest.raises(
            CapacityError, match=r"of \d+ MiB does not fit the 64 MiB that are free on cpu; lower --ctx"
        ):
            Pool(plan_model(CONFIG, preset), blocks, slots, mx.float32, "cpu", available=2**26)
