"""The protocol of a byte store, where blocks lie by key, and the one that is a dict, for tests."""

from typing import Protocol

from kvarn.record import BlockMeta

__all__ = ["BlockMeta", "ByteStore", "MemoryStore"]


class ByteStore(Protocol):
    """Blocks as bytes, by key. No method raises for what the store could not do: it is a cache."""

    def contains(self, key: bytes) -> bool:
        """Whether the block is in store, as far as the index knows; cheap, the block itself is not looked at."""

    def put(self, meta: BlockMeta, data: bytes) -> bool:
        """Put a block if it is absent. True when it is there afterwards, False when budget or a pause forbids it."""

    def get(self, key: bytes) -> bytes | None:
        """A block's bytes, unchecked; the block counts as used now. None is a miss."""

    def quarantine(self, key: bytes, reason: str) -> None:
        """Take a bad block away so that it is never read again."""

    def children(self, parent: bytes) -> list[BlockMeta]:
        """The blocks in store that follow a key, or a root."""

    def describe(self, fingerprint: bytes, text: str) -> None:
        """Keep the text of a fingerprint, which is one of this process's own from now on."""

    def close(self) -> None:
        """Write what is still to be written; every later call is a miss."""


class MemoryStore:
    """A byte store that is a dict. `budget_bytes` refuses what does not fit; nothing is evicted."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.blocks: dict[bytes, tuple[BlockMeta, bytes]] = {}
        self.quarantined: dict[bytes, str] = {}
        self.texts: dict[bytes, str] = {}
        self.closed = False
        self._budget = budget_bytes

    def contains(self, key: bytes) -> bool:
        """Whether the block is in store."""
        return key in self.blocks

    def put(self, meta: BlockMeta, data: bytes) -> bool:
        """Put a block if it is absent and fits."""
        if self.closed:
            return False
        held = sum(len(other) for _, other in self.blocks.values())
        if meta.key not in self.blocks:
            if self._budget is not None and held + len(data) > self._budget:
                return False
            self.blocks[meta.key] = (meta, data)
        return True

    def get(self, key: bytes) -> bytes | None:
        """A block's bytes, or None."""
        found = self.blocks.get(key)
        return None if found is None else found[1]

    def quarantine(self, key: bytes, reason: str) -> None:
        """Forget a bad block, and keep the reason in `quarantined`."""
        if self.blocks.pop(key, None) is not None:
            self.quarantined[key] = reason

    def children(self, parent: bytes) -> list[BlockMeta]:
        """The blocks that follow a key, or a root."""
        return [meta for meta, _ in self.blocks.values() if meta.parent == parent]

    def describe(self, fingerprint: bytes, text: str) -> None:
        """Keep the text of a fingerprint in `texts`."""
        self.texts[fingerprint] = text

    def close(self) -> None:
        """Every later call is a miss."""
        self.closed = True
        self.blocks.clear()
