"""The byte store behind the prefix cache: fetches tiles on a thread of its own, hands computed ones to the writer.

Fetching pays where reading a tile takes less time than computing it; both are measured as they happen, and where
computing is faster a fetch is skipped, except for a probe now and then.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from kvarn.backend import Backend, Record
from kvarn.errors import KvarnError, RecordError
from kvarn.keys import Fingerprint, Key, format_name
from kvarn.record import build, parse
from kvarn.store import BlockMeta, ByteStore
from kvarn.store_writer import Writer
from kvarn.tier import Computed

READ_AHEAD = 256 << 20  # bytes of fetched records that may wait for the engine
PROBE_EVERY = 16  # of the fetches that would not pay, one is made all the same
DRAIN_SECONDS = 60.0


class DiskFetch:
    """See kvarn.tier.Fetch. The tier's lock guards everything here."""

    def __init__(self, tier: "DiskTier", root: Key, keys: Sequence[Key], first: int) -> None:
        self.first = first
        self.root = root
        self.keys = keys
        self.next = first
        self.arrived: deque[tuple[int, Record]] = deque()
        self.done = False
        self._tier = tier

    def take(self) -> list[tuple[int, Record]]:
        with self._tier.changed:
            taken = list(self.arrived)
            self.arrived.clear()
            self._tier.buffered -= sum(_nbytes(record) for _, record in taken)
            self._tier.changed.notify_all()
        return taken

    def cancel(self) -> None:
        with self._tier.changed:
            self.done = True
        self.take()


class DiskTier:
    """See kvarn.tier.Tier. `root` may be called from any thread, the other methods by the engine's alone."""

    def __init__(
        self,
        store: ByteStore,
        backend: Backend,
        fingerprint: Fingerprint,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.store = store
        self.writer = Writer(store)
        self.fingerprint = fingerprint
        self.changed = threading.Condition()
        self.buffered = 0
        self.counts: Counter[str] = Counter()
        self._backend = backend
        self._format = format_name(backend.info.plan)
        self._clock = clock
        self._read = _Average()
        self._compute = _Average()
        self._unpaid = 0
        self._fetches: list[DiskFetch] = []
        self._closed = False
        self._root = lru_cache(maxsize=1024)(self._new_root)
        self._reader = threading.Thread(target=self._loop, name="kvarn-cache-reader", daemon=True)
        self._reader.start()

    def root(self, tenant: str) -> Key:
        return self._root(tenant)

    def _new_root(self, tenant: str) -> Key:
        root = self.fingerprint.root(tenant)
        self.store.describe(root, self.fingerprint.text(tenant))
        return root

    # Fetching.

    def fetch(self, root: Key, keys: Sequence[Key], first: int) -> DiskFetch | None:
        if first >= len(keys):
            return None
        if not self.store.contains(keys[first]):
            self.counts["not stored"] += 1
            return None
        if not self._pays():
            self.counts["computing is faster"] += 1
            return None
        fetch = DiskFetch(self, root, keys, first)
        with self.changed:
            self._fetches.append(fetch)
            self.changed.notify_all()
        return fetch

    def _pays(self) -> bool:
        read, compute = self._read.value, self._compute.value
        if read is None or compute is None or read < compute:
            return True
        self._unpaid += 1
        return self._unpaid % PROBE_EVERY == 0

    def _loop(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._closed or self._next() is not None)
                if self._closed:
                    return
                fetch = self._next()
                assert fetch is not None
                tile = fetch.next
            start = self._clock()
            record, miss = self._load(fetch, tile)
            with self.changed:
                if record is None:
                    self.counts[miss] += 1
                    fetch.done = True
                elif not fetch.done:
                    self._read.add(self._clock() - start)
                    fetch.arrived.append((tile, record))
                    self.buffered += _nbytes(record)
                    fetch.next += 1
                    fetch.done = fetch.next == len(fetch.keys)
                self._fetches = [x for x in self._fetches if not x.done]
                self.changed.notify_all()

    def _next(self) -> DiskFetch | None:
        """The first fetch that may read on: one whose tiles the engine took may always."""
        self._fetches = [x for x in self._fetches if not x.done]
        return next((x for x in self._fetches if not x.arrived or self.buffered < READ_AHEAD), None)

    def _load(self, fetch: DiskFetch, tile: int) -> tuple[Record | None, str]:
        """One verified record, or why there is none."""
        key = fetch.keys[tile]
        data = self.store.get(key)
        if data is None:
            return None, "not stored"
        info = self._backend.info
        try:
            meta, record = parse(data)
            if (meta.key, meta.fingerprint, meta.format) != (key, fetch.root, self._format):
                raise RecordError("it holds another block than its name says")
            record.check(info=info, sink=tile == 0 or info.plan.preset is None)
        except RecordError as error:
            self.store.quarantine(key, str(error))
            return None, "damaged"
        return record, ""

    def wait(self, seconds: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: any(x.arrived for x in self._fetches) or not self._fetches, seconds)

    def adopt(self, record: Record, index: int, *, sink: bool) -> bool:
        adopt = self._backend.adopt_sink if sink else self._backend.adopt_block
        try:
            adopt(record, index)
        except (KvarnError, RuntimeError, MemoryError, ValueError):  # as of a step: it ends this restore, nothing else
            self.counts["not adopted"] += 1
            return False
        self.counts["restored"] += 1
        return True

    def prefilled(self, tokens: int, seconds: float) -> None:
        self._compute.add(seconds / tokens * self._backend.info.plan.tile_tokens)

    # Keeping.

    def computed(self, tile: Computed) -> None:
        if self.writer.pending(tile.key) or self.store.contains(tile.key):
            return
        export = self._backend.export_sink if tile.sink else self._backend.export_block
        record = export(tile.index)
        meta = BlockMeta(
            key=tile.key, parent=tile.parent, tokens=tile.tokens, fingerprint=tile.root, format=self._format
        )
        self.writer.offer(meta, lambda: build(meta, record))

    def close(self) -> None:
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self._reader.join()
        self.writer.close(DRAIN_SECONDS)
        self.store.close()

    def report(self) -> dict[str, Any]:
        with self.changed:
            counts = dict(self.counts)
        restored = counts.pop("restored", 0)
        return {
            "tiles_restored": restored,
            "misses": counts,
            "tiles_written": self.writer.written,
            "tiles_dropped": self.writer.dropped,
            "tiles_failed": self.writer.failed,
            "seconds_to_read_a_tile": self._read.value,
            "seconds_to_compute_a_tile": self._compute.value,
        }


class _Average:
    """A moving average; None before the first reading."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, reading: float) -> None:
        self.value = reading if self.value is None else 0.8 * self.value + 0.2 * reading


def _nbytes(record: Record) -> int:
    arrays = [x for x in (record.tiles, record.flags) if x is not None]
    return sum(x.nbytes for x in (*arrays, *record.exact.values()))
