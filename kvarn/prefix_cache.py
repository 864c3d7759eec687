"""Key -> block or slot id in memory: match, publish; eviction is the pool's. No tensors.

A tile is published when it is computed, and stays until its pool hands its id out again. What a request matched it
holds, so nothing that runs can be evicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvarn.block_pool import BlockPool
from kvarn.keys import Key


@dataclass(frozen=True)
class Place:
    """Where a tile stands: an id of one of the two pools."""

    pool: BlockPool
    index: int


class PrefixCache:
    """The tiles of finished and running requests, by key."""

    def __init__(self, *pools: BlockPool) -> None:
        self._places: dict[Key, Place] = {}
        self._keys: dict[tuple[int, int], Key] = {}
        for pool in pools:
            pool.on_evict = lambda index, pool=pool: self._forget(pool, index)  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self._places)

    def peek(self, keys: Sequence[Key]) -> list[Place]:
        """The places of the longest run of tiles, from the first; changes nothing."""
        places = []
        for key in keys:
            place = self._places.get(key)
            if place is None:
                break
            places.append(place)
        return places

    def match(self, keys: Sequence[Key]) -> list[int]:
        """The ids of the longest run of tiles, from the first; the caller is one more owner of each."""
        places = self.peek(keys)
        for place in places:
            place.pool.share(place.index)
        return [place.index for place in places]

    def publish(self, key: Key, pool: BlockPool, index: int) -> int:
        """Make a computed tile known. Returns the id to use from now on.

        Where the same tile is known already, that is the known one: the caller owns it now and no longer owns `index`.
        """
        known = self._places.get(key)
        if known is None:
            self._places[key] = Place(pool, index)
            self._keys[id(pool), index] = key
            pool.publish(index)
            return index
        if known.index != index:
            known.pool.share(known.index)
            pool.release(index)
        return known.index

    def _forget(self, pool: BlockPool, index: int) -> None:
        del self._places[self._keys.pop((id(pool), index))]
