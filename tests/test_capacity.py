"""Bytes, contexts, and the limit that binds."""

import pytest
from fake_backend import FakeBackend, fake_config
from hypothesis import given
from hypothesis import strategies as st

from kvarn.capacity import MEMORY_FRACTION, holding, longest_context, plan_context, plan_serving, pool_size
from kvarn.engine import Engine, EngineConfig
from kvarn.errors import CapacityError, UsageError
from kvarn.format import Preset
from kvarn.model_plan import plan_model


@pytest.mark.parametrize(
    ("tokens", "blocks", "slots"),
    [(1, 0, 1), (128, 0, 1), (129, 0, 2), (255, 0, 2), (256, 1, 2), (257, 1, 2), (384, 2, 2), (1024, 7, 2)],
)
def test_a_sequence_holds_its_sealed_blocks_the_sink_and_the_tail(tokens: int, blocks: int, slots: int) -> None:
    held = holding(tokens, FakeBackend(Preset()).info.plan)
    assert (held.blocks, held.slots) == (blocks, slots)


def test_an_exact_sequence_holds_a_slot_per_tile() -> None:
    held = holding(257, FakeBackend(None).info.plan)
    assert (held.blocks, held.slots) == (0, 3)


@given(st.integers(0, 100_000), st.sampled_from([Preset(), Preset(tile_tokens=64), None]))
def test_the_longest_context_fits_and_one_more_does_not(budget: int, preset: Preset | None) -> None:
    backend = FakeBackend(preset, max_context=2000)
    plan, size = backend.info.plan, backend.pool_size
    longest = longest_context(plan, size, budget)
    assert longest == 0 or holding(longest, plan).nbytes(size) <= budget
    assert longest == 2000 or holding(longest + 1, plan).nbytes(size) > budget


def test_the_models_context_is_the_default_and_memory_may_bind_first() -> None:
    backend = FakeBackend(Preset(), max_context=1000)
    plenty = plan_context(backend.info, backend.pool_size, 1 << 30, None)
    assert (plenty.context, plenty.limit) == (1000, "the model's context")
    tight = plan_context(backend.info, backend.pool_size, 1600, None)
    assert tight.limit == "memory"
    assert tight.kv_bytes <= 1600 * MEMORY_FRACTION


def test_what_does_not_fit_is_refused_with_the_numbers_and_a_way_out() -> None:
    backend = FakeBackend(Preset(), max_context=100_000_000)
    with pytest.raises(CapacityError, match=r"99000000 tokens needs .* MiB.*; use --ctx-size \d+ or less"):
        plan_context(backend.info, backend.pool_size, 10_000_000, 99_000_000)
    with pytest.raises(UsageError, match=r"--ctx-size 0 .*100000000"):
        plan_context(backend.info, backend.pool_size, 1 << 40, 0)


@given(
    st.integers(1_000, 3_000_000),
    st.integers(1, 64),
    st.sampled_from([Preset(), Preset(tile_tokens=64), None]),
    st.sampled_from([None, 100, 500]),
)
def test_pools_for_many_sequences_fit_the_memory_and_hold_at_least_one_whole_context(
    available: int, sequences: int, preset: Preset | None, context: int | None
) -> None:
    backend = FakeBackend(preset, max_context=2000)
    info, size = backend.info, backend.pool_size
    try:
        got = plan_serving(info, size, available, context=context, max_sequences=sequences)
    except CapacityError:
        assert holding(context or 1, info.plan).nbytes(size) > available * MEMORY_FRACTION - 1
        return
    assert got.kv_bytes == got.blocks * size.block_bytes + got.slots * size.slot_bytes
    assert got.kv_bytes <= available * MEMORY_FRACTION
    need = holding(got.context, info.plan)
    assert 1 <= got.sequences <= sequences
    assert got.sequences * need.blocks <= got.blocks
    assert got.sequences * need.slots <= got.slots
    # An engine takes these pools as they are.
    Engine(
        backend,
        EngineConfig(context=got.context, max_sequences=sequences, blocks=got.blocks, slots=got.slots),
    )


def test_pool_sizes_are_those_of_the_format() -> None:
    config = fake_config()
    sealed, exact = plan_model(config, Preset()), plan_model(config, None)
    assert pool_size(sealed, 2).block_bytes == 2 * 2 * (57 * 128 + 1)
    assert pool_size(sealed, 2).slot_bytes == 2 * 2 * 2 * 128 * 64 * 2
    assert pool_size(exact, 4).block_bytes == 0
    assert pool_size(exact, 4).slot_bytes == 2 * 2 * 2 * 128 * 64 * 4
