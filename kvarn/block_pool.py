"""Ids of blocks, or of exact slots: allocate, count references, free, keep, evict. No tensors.

An id is held by one or more owners, kept (published under a key and held by nobody: it may be shared again, or
evicted), or free. Free ids are handed out before kept ones, the lowest first; kept ones are evicted in the order in
which their last owner let go of them, so a sequence that releases its last block first loses its last block first.
The same calls give the same ids.
"""

import heapq
from collections.abc import Callable

from kvarn.errors import CapacityError


class BlockPool:
    """`size` ids, 0 ... size-1. `on_evict` is told of each kept id that is about to be handed out again."""

    def __init__(self, size: int, what: str = "block") -> None:
        self.size = size
        self.on_evict: Callable[[int], None] = lambda index: None
        self._what = what
        self._free = list(range(size))
        self._references = [0] * size
        self._published = [False] * size
        self._kept: dict[int, None] = {}  # in order of release

    @property
    def num_available(self) -> int:
        """How many ids can be allocated now, evicting where needed."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """How many ids are kept: published, and held by nobody."""
        return len(self._kept)

    @property
    def num_held(self) -> int:
        """How many ids somebody holds."""
        return self.size - self.num_available

    def references(self, index: int) -> int:
        """How many owners hold an id."""
        return self._references[index]

    def allocate(self) -> int:
        """An id with one owner; CapacityError when every id is held."""
        if self._free:
            index = heapq.heappop(self._free)
        elif self._kept:
            index = next(iter(self._kept))
            del self._kept[index]
            self._published[index] = False
            self.on_evict(index)
        else:
            raise CapacityError(f"all {self.size} {self._what}s are in use")
        self._references[index] = 1
        return index

    def publish(self, index: int) -> None:
        """From now on the id is kept, not freed, when its last owner releases it."""
        assert self._references[index] > 0, f"{self._what} {index} is published by nobody"
        self._published[index] = True

    def share(self, index: int) -> None:
        """One more owner of an id that is held or kept."""
        assert self._references[index] > 0 or index in self._kept, f"{self._what} {index} is free, cannot be shared"
        self._kept.pop(index, None)
        self._references[index] += 1

    def release(self, index: int) -> None:
        """One owner less; the last one frees the id, or leaves it kept where it is published."""
        assert self._references[index] > 0, f"{self._what} {index} is released twice"
        self._references[index] -= 1
        if self._references[index] == 0:
            if self._published[index]:
                self._kept[index] = None
            else:
                heapq.heappush(self._free, index)
