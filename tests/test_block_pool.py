"""Ids are handed out once, counted, and come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarn.block_pool import BlockPool
from kvarn.errors import CapacityError


def test_the_lowest_free_id_comes_first() -> None:
    pool = BlockPool(4)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]
    pool.release(2)
    pool.release(0)
    assert [pool.allocate(), pool.allocate()] == [0, 2]


def test_an_empty_pool_says_how_large_it_is() -> None:
    pool = BlockPool(2, "slot")
    pool.allocate()
    pool.allocate()
    with pytest.raises(CapacityError, match="all 2 slots are in use"):
        pool.allocate()


def test_a_shared_id_is_freed_by_its_last_owner_only() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert pool.num_free == 0
    pool.release(block)
    assert pool.num_free == 1


def test_releasing_or_sharing_a_free_id_is_a_fault_of_ours() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(0)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(0)


@given(st.lists(st.sampled_from(["allocate", "share", "release"]), max_size=200), st.integers(0, 8))
def test_free_and_used_ids_always_add_up(calls: list[str], size: int) -> None:
    pool = BlockPool(size)
    owners: list[int] = []  # one entry per owner
    for i, call in enumerate(calls):
        if call == "allocate" and pool.num_free:
            index = pool.allocate()
            assert index not in owners
            owners.append(index)
        elif call == "share" and owners:
            pool.share(owners[i % len(owners)])
            owners.append(owners[i % len(owners)])
        elif call == "release" and owners:
            pool.release(owners.pop(i % len(owners)))
        assert pool.num_used == len(set(owners))
        assert pool.num_free == size - len(set(owners))
        assert all(pool.references(index) == owners.count(index) for index in range(size))
