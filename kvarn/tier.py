"""What the scheduler asks of a tier below the memory: fetch tiles of a chain, adopt one, take note of computed ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvarn.backend import Record
from kvarn.keys import Key, process_root


@dataclass(frozen=True, kw_only=True)
class Computed:
    """A tile that was computed and published: its key, and the id of the slot (`sink`) or block that holds it."""

    key: Key
    parent: Key
    root: Key
    tokens: tuple[int, ...]
    index: int
    sink: bool


class Fetch(Protocol):
    """Tiles of one request on their way, in order, from tile `first` on; the first one that is missing ends it."""

    first: int

    @property
    def done(self) -> bool:
        """Whether nothing more will arrive."""

    def take(self) -> list[tuple[int, Record]]:
        """What has arrived since the last call, by tile: whole, verified, and of this model's shape."""

    def cancel(self) -> None:
        """Nobody will take the rest."""


class Tier(Protocol):
    """Where tiles outlive the memory."""

    def root(self, tenant: str) -> Key:
        """The root of a tenant's chains."""

    def fetch(self, root: Key, keys: Sequence[Key], first: int) -> Fetch | None:
        """Start to fetch the tiles `first`, ... of a chain; None when there are none, or it does not pay."""

    def adopt(self, record: Record, index: int, *, sink: bool) -> bool:
        """Write a fetched tile into a slot (`sink`) or block of the device; whether that worked."""

    def computed(self, tile: Computed) -> None:
        """A tile was computed; it stands where `tile` says until the next step."""

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Prompts were computed at this speed: what a fetch has to beat."""

    def wait(self, seconds: float) -> None:
        """Sleep until a fetch has something new, for `seconds` at most."""

    def report(self) -> dict[str, Any]:
        """What is stored, hits, misses and their reasons."""

    def close(self) -> None:
        """Finish what is being written, and stop."""


class NoTier:
    """No tier: nothing is fetched, nothing is kept, and chains never leave their process."""

    def root(self, tenant: str) -> Key:
        return process_root(tenant)

    def fetch(self, root: Key, keys: Sequence[Key], first: int) -> Fetch | None:
        return None

    def adopt(self, record: Record, index: int, *, sink: bool) -> bool:
        return False

    def computed(self, tile: Computed) -> None: ...

    def prefilled(self, tokens: int, seconds: float) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


NO_TIER: Tier = NoTier()
