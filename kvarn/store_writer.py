"""Writing blocks to a byte store on a thread of its own: the engine offers, and never waits."""

import threading
import time
from collections import deque
from collections.abc import Callable

from kvarn.store import BlockMeta, ByteStore

Bytes = bytes | Callable[[], bytes]  # a callable is called on the thread: building a record hashes it


class Writer:
    """A bounded queue before a store. Safe to use from any thread; it closes itself, but not the store.

    `written` and `bytes_written` count what is in store, `dropped` what was refused by the queue, the store or a close
    that ran out of time, `failed` what ended with an exception; `first_failure` is the text of the first.
    """

    def __init__(self, store: ByteStore, *, capacity: int = 64) -> None:
        self.written = self.bytes_written = self.dropped = self.failed = 0
        self.first_failure: str | None = None
        self._store = store
        self._capacity = capacity
        self._queue: deque[tuple[BlockMeta, Bytes]] = deque()
        self._pending: set[bytes] = set()  # queued, or being written
        self._closed = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="kvarn-store-writer", daemon=True)
        self._thread.start()

    def offer(self, meta: BlockMeta, data: Bytes) -> bool:
        """Queue a block; returns at once. False when it was dropped: the queue is full or closed."""
        with self._wake:
            if meta.key in self._pending:
                return True
            if self._closed or len(self._queue) >= self._capacity:
                self.dropped += 1
                return False
            self._queue.append((meta, data))
            self._pending.add(meta.key)
            self._wake.notify()
            return True

    def pending(self, key: bytes) -> bool:
        """Whether a block was taken and is not in store yet."""
        with self._wake:
            return key in self._pending

    def close(self, timeout: float) -> bool:
        """Take no more, write what is queued, end the thread. False when `timeout` seconds were too few."""
        deadline = time.monotonic() + timeout
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout)
        with self._wake:
            self.dropped += len(self._queue)
            for meta, _ in self._queue:
                self._pending.discard(meta.key)
            self._queue.clear()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                meta, data = self._queue.popleft()
            size, stored, failure = 0, False, None
            try:
                raw = data() if callable(data) else data
                size, stored = len(raw), self._store.put(meta, raw)
            except Exception as error:  # whatever it is, the next block is written
                failure = f"{type(error).__name__}: {error}"
            del data  # a builder may hold a block's arrays
            with self._wake:
                self._pending.discard(meta.key)
                if failure is not None:
                    self.failed += 1
                    self.first_failure = self.first_failure or failure
                elif stored:
                    self.written += 1
                    self.bytes_written += size
                else:
                    self.dropped += 1
