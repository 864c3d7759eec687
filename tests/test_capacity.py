"""Bytes, contexts, and the limit that binds."""

import pytest
from fake_backend import FakeBackend
from hypothesis import given
from hypothesis import strategies as st

from kvarn.capacity import MEMORY_FRACTION, holding, longest_context, plan_context
from kvarn.errors import CapacityError, UsageError
from kvarn.format import Preset


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
