"""A tier that is a dict and delivers at a set pace, so that runs can be repeated."""

from collections.abc import Sequence
from typing import Any

from fake_backend import FakeBackend

from kvarn.backend import Record
from kvarn.keys import Key, process_root
from kvarn.tier import Computed


class FakeFetch:
    """Delivers `pace` tiles a call; 0: nothing at every other call, then one."""

    def __init__(self, tiles: list[tuple[int, Record]], first: int, pace: int) -> None:
        self.first = first
        self.cancelled = False
        self._tiles = tiles
        self._pace = pace
        self._calls = 0

    @property
    def done(self) -> bool:
        return not self._tiles

    def take(self) -> list[tuple[int, Record]]:
        self._calls += 1
        count = self._pace or (self._calls + 1) % 2
        taken, self._tiles = self._tiles[:count], self._tiles[count:]
        return taken

    def cancel(self) -> None:
        self.cancelled = True


class FakeTier:
    """See kvarn.tier.Tier. `broken` makes every adoption fail."""

    def __init__(self, pace: int = 1) -> None:
        self.records: dict[Key, Record] = {}
        self.computed_keys: list[Key] = []
        self.fetches: list[FakeFetch] = []
        self.backend: FakeBackend
        self.pace = pace
        self.broken = False
        self.waits = 0

    def root(self, tenant: str) -> Key:
        return process_root(tenant)

    def fetch(self, root: Key, keys: Sequence[Key], first: int) -> FakeFetch | None:
        tiles = []
        for tile in range(first, len(keys)):
            if keys[tile] not in self.records:
                break
            tiles.append((tile, self.records[keys[tile]]))
        if not tiles:
            return None
        self.fetches.append(FakeFetch(tiles, first, self.pace))
        return self.fetches[-1]

    def adopt(self, record: Record, index: int, *, sink: bool) -> bool:
        if self.broken:
            return False
        (self.backend.adopt_sink if sink else self.backend.adopt_block)(record, index)
        return True

    def computed(self, tile: Computed) -> None:
        export = self.backend.export_sink if tile.sink else self.backend.export_block
        self.computed_keys.append(tile.key)
        self.records[tile.key] = export(tile.index)

    def prefilled(self, tokens: int, seconds: float) -> None: ...

    def wait(self, seconds: float) -> None:
        self.waits += 1

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...
