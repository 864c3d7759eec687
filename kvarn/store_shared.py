"""The index of the disk store as several threads and processes share it: one changes it at a time, and it is made anew
when it is damaged or gone.
"""

import fcntl
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kvarn.errors import UsageError
from kvarn.store_index import BUSY_SECONDS, FILES, MARKER, Index, error_code, is_full

_T = TypeVar("_T")


class BusyError(Exception):
    """Another process holds the folder for too long; nothing is wrong with it."""


class SharedIndex:
    """The index of a folder that is marked as ours; a lock on the marker is held by whoever changes anything.

    `scan` fills the index from the files; it runs at first, and whenever the index was made anew.
    """

    def __init__(self, folder: Path, scan: Callable[[Index], None]) -> None:
        self._folder = folder
        self._scan = scan
        self._index: Index | None = None
        self._scanned = False
        self._doubted = False
        self._mutex = threading.Lock()  # held by the one thread that changes things
        self._reading = threading.Lock()  # over the reading connection; taken after _mutex, never before

    def read(self, work: Callable[[Index], _T], otherwise: Callable[[], _T]) -> _T:
        """Read beside whoever writes. An index that fails is made anew once; `otherwise` answers if that fails too."""
        for _ in range(2):
            with self._reading:
                if self._index is None:
                    return otherwise()
                self._doubted = self._doubted or not self._index.is_current()
                if not self._doubted:
                    try:
                        return work(self._index)
                    except sqlite3.Error:
                        self._doubted = True
            try:
                self.change(lambda index: None, timeout=BUSY_SECONDS)
            except (BusyError, OSError, UsageError, sqlite3.Error):
                break
        return otherwise()

    def change(self, work: Callable[[Index], _T], *, timeout: float) -> _T:
        """Run `work` alone, in one transaction; twice when the index fails the first time and is made anew.

        BusyError after `timeout` seconds of waiting; sqlite3.Error when the new index fails too, or the disk is full.
        """
        with self.alone(timeout):
            for last in (False, True):
                try:
                    index = self._current()
                    with index.transaction():
                        result = work(index)
                    index.trim()
                    return result
                except sqlite3.Error as error:
                    if error_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                        raise BusyError from error
                    if last or is_full(error):
                        raise
                    self._doubted = True
            raise AssertionError("unreachable")

    def trim(self, *, timeout: float) -> None:
        """Cut the index's log to nothing, as far as other processes let it."""
        with self.alone(timeout), suppress(sqlite3.Error):
            self._current().trim(0)

    def close(self) -> None:
        """Close the index when no thread changes it any more."""
        with self._mutex:
            self.drop()

    def drop(self) -> None:
        """Close the index; the next change opens it again. The caller is alone."""
        with self._reading:
            if self._index is not None:
                self._index.close()
            self._index = None

    def _current(self) -> Index:
        """The index as it is on disk: opened again when it was replaced, made anew when it cannot be read."""
        path = self._folder / FILES[0]
        if self._index is not None and self._index.is_current() and not self._doubted:
            return self._index
        damaged = self._doubted and self._index is not None and self._index.is_current()
        self.drop()
        if damaged:
            self._delete()
        try:
            index = self._open(path)
        except sqlite3.Error as error:
            if error_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL):
                raise
            self._delete()
            index = self._open(path)
        self._scanned, self._doubted = True, False
        with self._reading:
            self._index = index
        return index

    def _open(self, path: Path) -> Index:
        index = Index(path)
        try:
            if index.is_new or not self._scanned:
                with index.transaction():
                    self._scan(index)
        except BaseException:
            index.close()
            raise
        return index

    def _delete(self) -> None:
        self._scanned = False
        for name in reversed(FILES):
            (self._folder / name).unlink(missing_ok=True)

    @contextmanager
    def alone(self, timeout: float) -> Iterator[None]:
        """Keep every other thread and process from changing anything. BusyError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        if not self._mutex.acquire(timeout=timeout):
            raise BusyError
        try:
            lock = self._lock(deadline)
            try:
                yield
            finally:
                os.close(lock)
        finally:
            self._mutex.release()

    def _lock(self, deadline: float) -> int:
        """The marker, opened and locked. The system unlocks it when the process ends, however it ends."""
        while True:
            lock = self._open_marker()
            try:
                while True:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        if time.monotonic() >= deadline:
                            raise BusyError from None
                        time.sleep(0.002)
                with suppress(FileNotFoundError):  # another process may have cleared the folder meanwhile
                    if os.path.samestat(os.fstat(lock), (self._folder / MARKER).lstat()):
                        return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def _open_marker(self) -> int:
        """Open the marker; make it, and the folder, where there is none. UsageError when the folder is another's."""
        path = self._folder / MARKER
        self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        if not stat.S_ISDIR(self._folder.lstat().st_mode):
            raise UsageError(f"{self._folder} is not a folder; move it away or name another place with --cache-dir")
        if not os.path.lexists(path) and any(self._folder.iterdir()) and not os.path.lexists(path):
            raise UsageError(
                f"{self._folder} holds files but no {MARKER}, so it is not a cache of KVarN; "
                "move it away or name another place with --cache-dir"
            )
        for name in (MARKER, *FILES):
            with suppress(FileNotFoundError):
                if not stat.S_ISREG((self._folder / name).lstat().st_mode):
                    raise UsageError(f"{self._folder / name} is not a plain file; move it away or use --no-cache")
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if os.fstat(lock).st_size == 0:
            with suppress(OSError):
                os.pwrite(
                    lock, b"A prefix cache of KVarN. `kvarn cache clear` empties it; deleting it is safe too.\n", 0
                )
        return lock
