"""What is published can be matched until its id is handed out again."""

from kvarn.block_pool import BlockPool
from kvarn.keys import chain, process_root
from kvarn.prefix_cache import PrefixCache

ROOT = process_root("")


def published(count: int, size: int = 8) -> tuple[PrefixCache, BlockPool, list[bytes]]:
    """A cache with one chain of `count` tiles, all of them released from the end."""
    pool = BlockPool(size)
    cache = PrefixCache(pool)
    keys = chain(ROOT, range(count), 1)
    ids = [pool.allocate() for _ in keys]
    for key, index in zip(keys, ids, strict=True):
        assert cache.publish(key, pool, index) == index
    for index in reversed(ids):
        pool.release(index)
    return cache, pool, keys


def test_a_match_is_the_longest_run_from_the_first_tile_and_holds_it() -> None:
    cache, pool, keys = published(4)
    assert cache.match([*keys[:2], b"unknown", keys[3]]) == [0, 1]
    assert pool.num_held == 2
    assert cache.match([b"unknown", *keys]) == []


def test_peeking_changes_nothing() -> None:
    cache, pool, keys = published(4)
    assert [place.index for place in cache.peek(keys)] == [0, 1, 2, 3]
    assert pool.num_held == 0


def test_a_chain_is_evicted_from_its_end() -> None:
    cache, pool, keys = published(4, size=4)
    pool.allocate()
    assert len(cache.peek(keys)) == 3
    pool.allocate()
    assert len(cache.peek(keys)) == 2
    assert len(cache) == 2


def test_what_a_request_holds_is_not_evicted() -> None:
    cache, pool, keys = published(4, size=4)
    held = cache.match(keys[:2])
    assert {pool.allocate(), pool.allocate()} == {2, 3}
    assert pool.num_available == 0
    assert [place.index for place in cache.peek(keys)] == held


def test_publishing_a_tile_twice_gives_the_known_one_and_frees_the_second() -> None:
    cache, pool, keys = published(1)
    again = pool.allocate()
    assert cache.publish(keys[0], pool, again) == 0
    assert pool.references(again) == 0
    assert pool.references(0) == 1
    assert cache.publish(keys[0], pool, 0) == 0
    assert pool.references(0) == 1
