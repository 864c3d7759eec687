"""Ids are handed out once, counted, kept while they are published, and come back."""

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
    assert pool.num_available == 0
    pool.release(block)
    assert pool.num_available == 1


def test_a_published_id_is_kept_and_can_be_shared_again() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(block)
    pool.release(block)
    assert (pool.num_kept, pool.num_held, pool.num_available) == (1, 0, 2)
    pool.share(block)
    assert (pool.num_kept, pool.num_held, pool.num_available) == (0, 1, 1)


def test_free_ids_go_first_then_the_one_released_longest_ago() -> None:
    pool = BlockPool(3)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    for _ in range(3):
        pool.publish(pool.allocate())
    for block in (2, 0, 1):
        pool.release(block)
    assert [pool.allocate() for _ in range(3)] == [2, 0, 1]
    assert evicted == [2, 0, 1]
    pool.release(0)
    assert pool.allocate() == 0
    assert evicted == [2, 0, 1], "an evicted id is no longer published"


def test_misuse_is_a_fault_of_ours() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(0)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(0)
    with pytest.raises(AssertionError, match="published by nobody"):
        pool.publish(0)


@given(st.lists(st.sampled_from(["allocate", "share", "release", "publish"]), max_size=200), st.integers(0, 8))
def test_held_kept_and_free_ids_always_add_up(calls: list[str], size: int) -> None:
    pool = BlockPool(size)
    owners: list[int] = []  # one entry per owner
    published: set[int] = set()
    pool.on_evict = published.remove
    for i, call in enumerate(calls):
        if call == "allocate" and pool.num_available:
            index = pool.allocate()
            assert index not in owners
            assert index not in published
            owners.append(index)
        elif call == "share" and (known := sorted(set(owners) | published)):
            index = known[i % len(known)]
            pool.share(index)
            owners.append(index)
        elif call == "release" and owners:
            pool.release(owners.pop(i % len(owners)))
        elif call == "publish" and owners:
            pool.publish(owners[i % len(owners)])
            published.add(owners[i % len(owners)])
        assert pool.num_held == len(set(owners))
        assert pool.num_kept == len(published - set(owners))
        assert pool.num_available == size - len(set(owners))
        assert all(pool.references(index) == owners.count(index) for index in range(size))
