"""Ids of blocks, or of exact slots: allocate, count references, free. No tensors.

An id is free (nobody holds it) or held by one or more owners; `release` by the last owner frees it. The lowest free
id is handed out first, so that the same calls give the same ids.
"""

import heapq

from kvarn.errors import CapacityError


class BlockPool:
    """`size` ids, 0 ... size-1."""

    def __init__(self, size: int, what: str = "block") -> None:
        self.size = size
        self._what = what
        self._free = list(range(size))
        self._references = [0] * size

    @property
    def num_free(self) -> int:
        """How many ids can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """How many ids somebody holds."""
        return self.size - len(self._free)

    def references(self, index: int) -> int:
        """How many owners hold an id."""
        return self._references[index]

    def allocate(self) -> int:
        """An id with one owner; CapacityError when none is free."""
        if not self._free:
            raise CapacityError(f"all {self.size} {self._what}s are in use")
        index = heapq.heappop(self._free)
        self._references[index] = 1
        return index

    def share(self, index: int) -> None:
        """One more owner of an id that is held."""
        assert self._references[index] > 0, f"{self._what} {index} is free and cannot be shared"
        self._references[index] += 1

    def release(self, index: int) -> None:
        """One owner less; the last one frees the id."""
        assert self._references[index] > 0, f"{self._what} {index} is released twice"
        self._references[index] -= 1
        if self._references[index] == 0:
            heapq.heappush(self._free, index)
