"""The disk store: blocks as files in a folder of our own, within a budget, shared by several processes.

Below `folder / "kvarn-cache-v1"` lie the marker, the index (`kvarn.store_shared`), `<2 hex>/<64 hex>.safetensors` for
blocks, `quarantine/` for bad ones, and `fingerprints/` for what fingerprints mean. Other names, and whatever is not a
plain file, are never touched. The files are the truth: a block is whole once its file has its name.
"""

import errno
import os
import re
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvarn.errors import KvarnError, RecordError, UsageError
from kvarn.record import BlockMeta, parse, peek
from kvarn.store_files import is_dead, is_folder, is_plain, private_folder, read_file, write_file
from kvarn.store_index import FILES, LOG_BYTES, MARKER, Entry, FingerprintStats, Index, is_full, own_bytes
from kvarn.store_shared import BusyError, SharedIndex

NAME = "kvarn-cache-v1"
PAUSE_SECONDS = 30.0
_LOCK_SECONDS = 10.0  # a put waits as long for another process, then its block is not kept
_OPEN_SECONDS = 60.0  # another process may be making the index anew
_TOUCH_SECONDS = 5.0  # uses are written together, so that a hit seldom waits for the index
_TEMP_SECONDS = 3600.0
_SHARD = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"([0-9a-f]{64})\.safetensors")
_QUARANTINED = re.compile(r"([0-9a-f]{64})\.[0-9a-f]{16}\.bad")
_DESCRIPTION = re.compile(r"([0-9a-f]{64})\.json")
_TEMP = re.compile(r"[0-9a-f]{64}\.([0-9]{1,10})-[0-9a-f]{16}\.tmp")
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # at the start these pause; others are the folder's own fault
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """What the store holds, in bytes and files; `total_bytes` is all that counts to the budget."""

    blocks: int
    block_bytes: int
    total_bytes: int
    quarantined: int
    budget_bytes: int
    fingerprints: dict[bytes, FingerprintStats]


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What `verify` found: `bad` blocks are damaged, `unreadable` ones could not be read, each with its reason."""

    good: int
    bad: dict[bytes, str]
    unreadable: dict[bytes, str]


def default_budget(folder: Path) -> tuple[int, str]:
    """The budget in bytes for a store in a folder that need not exist yet, and a few words on why it is that."""
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        return 0, f"off: the free space of {there} cannot be read ({error.strerror})"
    text = f"{free / (1 << 30):.1f} GiB free on the file system of {folder}"
    if free < 5 << 30:
        return 0, f"off: less than 5 GiB, {text}"
    if free // 10 >= 20 << 30:
        return 20 << 30, f"20 GiB of the {text}"
    return free // 10, f"10 % of the {text}"


class DiskStore:
    """A byte store on disk. Safe to use from any thread; several processes may share the folder.

    `fingerprint` is the one that this process uses, beside those that it describes: the blocks of others are evicted
    first. UsageError when the folder cannot be made or written, or is another's. After that nothing raises: `paused`
    says why nothing is written.
    """

    def __init__(
        self, folder: Path, budget_bytes: int, *, fingerprint: bytes, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder = folder / NAME
        self.budget_bytes = budget_bytes
        self._own = {fingerprint}
        self._clock = clock
        self._pause: tuple[float, str] | None = None
        self._closed = False
        self._shared = SharedIndex(self.folder, self._scan)
        self._touching = threading.Lock()
        self._touches: dict[bytes, float] = {}
        self._touched = clock()
        try:
            self._shared.change(lambda index: self._make_room(index, 0), timeout=_OPEN_SECONDS)
        except BusyError:
            self._pause_for("another process holds the folder")
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            passing = is_full(error) if isinstance(error, sqlite3.Error) else error.errno in _PASSING
            if not passing:
                self._shared.drop()
                raise UsageError(
                    f"the cache folder {self.folder} cannot be used: {reason}; "
                    "name another with --cache-dir, or use --no-cache"
                ) from error
            self._pause_for(reason)

    @property
    def paused(self) -> str | None:
        """Why nothing is written at the moment, or None."""
        if self._pause is not None and self._clock() >= self._pause[0]:
            self._pause = None
        return None if self._pause is None else self._pause[1]

    # Blocks.

    def contains(self, key: bytes) -> bool:
        """Whether the index lists the block; where there is no index, whether its file is there."""
        if self._closed:
            return False
        return self._shared.read(lambda index: index.contains(key), lambda: is_plain(self._block(key)))

    def put(self, meta: BlockMeta, data: bytes) -> bool:
        """Put a block if it is absent, evicting others for it. True when it is there afterwards; raises no OSError."""
        if self.contains(meta.key) and is_plain(self._block(meta.key)):
            self._touch(meta.key)
            return True
        if self._closed or self.paused or len(data) > self.budget_bytes:
            return False
        return self._try(lambda index: self._put(index, meta, data), False)

    def get(self, key: bytes) -> bytes | None:
        """A block's bytes, unchecked, or None for a miss. A block whose file is gone is forgotten."""
        if not self.contains(key):
            return None
        try:
            data = read_file(self._block(key))
        except FileNotFoundError:
            self._try(lambda index: self._forget(index, key), None, timeout=0.2)
            return None
        except OSError:
            return None
        self._touch(key)
        return data

    def quarantine(self, key: bytes, reason: str) -> None:
        """Move a bad block's file away. It counts to the budget and is the first to be evicted."""
        self._try(lambda index: self._set_aside(index, key, reason), None)

    def children(self, parent: bytes) -> list[BlockMeta]:
        """The blocks that follow a key or a root; one whose file cannot be read is left out."""
        found = []
        for key in self._shared.read(lambda index: index.children(parent), lambda: []):
            with suppress(OSError, RecordError):
                found.append(peek(self._block(key)))
        return found

    def close(self) -> None:
        """Write the times of use and close the index. Every later call is a miss."""
        if not self._closed:
            self._flush()
            self._closed = True
            self._shared.drop()

    # What fingerprints mean.

    def describe(self, fingerprint: bytes, text: str) -> None:
        """Keep the JSON text of a fingerprint's parts, if there is none yet; the fingerprint is ours from now on."""
        self._own.add(fingerprint)
        data = text.encode()
        path = self.folder / "fingerprints" / f"{fingerprint.hex()}.json"

        def work(index: Index) -> None:
            if not os.path.lexists(path) and self._make_room(index, len(data)):
                write_file(path, data)
                self._list(index, path, "description")

        if not self.paused:
            self._try(work, None)

    def descriptions(self) -> dict[bytes, str]:
        """The text of every fingerprint that was described."""
        found = {}
        for path, match in self._named("fingerprints", _DESCRIPTION):
            with suppress(OSError, UnicodeDecodeError):
                found[bytes.fromhex(match[1])] = read_file(path).decode()
        return found

    # For the command line.

    def stats(self) -> StoreStats:
        """What the store holds."""
        self._flush()
        parts = self._shared.read(lambda index: index.fingerprints(), lambda: {})
        others = self._shared.read(lambda index: index.others(), lambda: [])
        block_bytes = sum(part.bytes for part in parts.values())
        return StoreStats(
            blocks=sum(part.blocks for part in parts.values()),
            block_bytes=block_bytes,
            total_bytes=block_bytes + sum(size for _, _, size, _ in others) + own_bytes(self.folder),
            quarantined=sum(kind == "quarantine" for _, kind, _, _ in others),
            budget_bytes=self.budget_bytes,
            fingerprints=parts,
        )

    def entries(self) -> list[Entry]:
        """Every block, the least recently used first."""
        self._flush()
        return self._shared.read(lambda index: index.entries(), lambda: [])

    def quarantined(self) -> list[tuple[bytes, str]]:
        """The key and the reason of every file in quarantine."""
        others = self._shared.read(lambda index: index.others(), lambda: [])
        return [(bytes.fromhex(Path(name).name[:64]), why) for name, kind, _, why in others if kind == "quarantine"]

    def verify(self, delete: bool = False) -> VerifyReport:
        """Read and check every block. Bad ones go to quarantine, which `delete` empties."""
        good, bad, unreadable = 0, {}, {}
        for entry in self.entries():
            try:
                meta, _ = parse(read_file(self._block(entry.key)))
                if meta.key != entry.key:
                    raise RecordError("the record is another block's")
                good += 1
            except RecordError as error:
                bad[entry.key] = str(error)
                self.quarantine(entry.key, str(error))
            except OSError as error:
                unreadable[entry.key] = error.strerror or str(error)
                if isinstance(error, FileNotFoundError):
                    self._try(partial(self._forget, key=entry.key), None)
        if delete:
            self._try(self._empty_quarantine, None)
        return VerifyReport(good=good, bad=bad, unreadable=unreadable)

    def prune(self, target_bytes: int) -> int:
        """Evict until everything takes `target_bytes`, or as near as it can be; how many bytes that freed."""
        before = self.stats().total_bytes
        with suppress(BusyError, OSError, KvarnError):
            self._shared.trim(timeout=_LOCK_SECONDS)  # what is asked for is what is there now, not what the log may be
            self._try(lambda index: self._make_room(index, 0, limit=target_bytes + LOG_BYTES), False)
            self._shared.trim(timeout=_LOCK_SECONDS)
        return before - self.stats().total_bytes

    def clear(self) -> int:
        """Remove all that is ours, and only that; how many bytes that freed. The store can be used on."""
        try:
            with self._shared.alone(_LOCK_SECONDS):
                self._shared.drop()
                return self._remove_all()
        except (BusyError, OSError, KvarnError):
            return 0

    # Working alone; each of these gets the index inside a transaction.

    def _try(self, work: Callable[[Index], _T], otherwise: _T, *, timeout: float = _LOCK_SECONDS) -> _T:
        """Run `work` alone; `otherwise` when that could not be, and a pause where the disk is the reason."""

        def flush_and_work(index: Index) -> _T:
            with self._touching:
                touches, self._touches = self._touches, {}
            index.touch(touches)
            return work(index)

        if self._closed:
            return otherwise
        try:
            return self._shared.change(flush_and_work, timeout=timeout)
        except BusyError:
            return otherwise
        except (OSError, sqlite3.Error, KvarnError) as error:
            self._pause_for(getattr(error, "strerror", None) or str(error))
            return otherwise

    def _put(self, index: Index, meta: BlockMeta, data: bytes) -> bool:
        path = self._block(meta.key)
        if os.path.lexists(path):
            if not is_plain(path):
                return False
            if self._adopt(index, path, meta.key):
                return True
        index.delete(meta.key)  # its file is gone
        # A block whose parent is not in store cannot be reached: it may take what is free, but nothing goes for it.
        reachable = meta.parent == meta.fingerprint or index.has(meta.parent)
        if not reachable and index.held_bytes() + len(data) > self.budget_bytes:
            return False
        if not private_folder(path.parent) or not self._make_room(index, len(data), protect=meta.parent):
            return False
        write_file(path, data)
        index.insert(meta, size=len(data), created=self._clock())
        self._make_room(index, 0, protect=meta.key)  # the index may have grown
        return True

    def _adopt(self, index: Index, path: Path, key: bytes) -> bool:
        """List a block's file that is there; set it aside when it is bad."""
        try:
            meta = peek(path)
            if meta.key != key:
                raise RecordError("the record is another block's")
        except FileNotFoundError:
            return False
        except (RecordError, OSError) as error:
            self._set_aside(index, key, str(error))
            return False
        now = path.lstat()
        index.insert(meta, size=now.st_size, created=now.st_mtime)
        return True

    def _set_aside(self, index: Index, key: bytes, reason: str) -> None:
        index.delete(key)
        path = self._block(key)
        target = self.folder / "quarantine" / f"{key.hex()}.{secrets.token_hex(8)}.bad"
        if is_plain(path) and private_folder(target.parent):
            path.rename(target)
            self._list(index, target, "quarantine", reason)

    def _forget(self, index: Index, key: bytes) -> None:
        if not os.path.lexists(self._block(key)):  # another process may have put it again
            index.delete(key)

    def _make_room(self, index: Index, need: int, *, protect: bytes = b"", limit: int | None = None) -> bool:
        """Evict until `need` more bytes fit; the block `protect` stays. False when they do not fit even then."""
        limit = self.budget_bytes if limit is None else limit
        if need and need + index.own_bytes() > limit:
            return False
        held = index.held_bytes()
        while held + need > limit:
            victim = index.victim(self._own, protect)
            if victim is None:
                return False
            path = self.folder / victim.name if victim.key is None else self._block(victim.key)
            if is_plain(path):
                path.unlink(missing_ok=True)
            if victim.key is None:
                index.delete_other(victim.name)
            else:
                index.delete(victim.key)
            held -= victim.size
        return True

    def _scan(self, index: Index) -> None:
        """Mend the index from the files: it is asked at the start, and when the index was made anew."""
        sizes, reasons = index.sizes(), index.reasons()
        index.recount()
        for shard in self._shards():
            for path, match in self._named(shard, _BLOCK):
                key = bytes.fromhex(match[1])
                if not match[1].startswith(shard):
                    continue
                known, size = sizes.pop(key, None), path.lstat().st_size
                if known is None:
                    self._adopt(index, path, key)
                elif known != size:
                    self._set_aside(index, key, f"the file has {size} bytes, the index says {known}")
        for key in sizes:
            index.delete(key)
        for folder in (*self._shards(), "fingerprints"):
            for path, match in self._named(folder, _TEMP):
                if is_dead(int(match[1])) or time.time() - path.lstat().st_mtime > _TEMP_SECONDS:
                    path.unlink(missing_ok=True)
                else:
                    self._list(index, path, "temp")
        for path, _ in self._named("fingerprints", _DESCRIPTION):
            self._list(index, path, "description")
        reasons |= index.reasons()
        for path, _ in self._named("quarantine", _QUARANTINED):
            self._list(index, path, "quarantine", reasons.get(f"quarantine/{path.name}", "found in quarantine"))

    def _list(self, index: Index, path: Path, kind: str, reason: str = "") -> None:
        """List a file that is no block."""
        now, name = path.lstat(), f"{path.parent.name}/{path.name}"
        index.add_other(name, kind, size=now.st_size, created=now.st_mtime, reason=reason)

    def _empty_quarantine(self, index: Index) -> None:
        for path, _ in self._named("quarantine", _QUARANTINED):
            path.unlink(missing_ok=True)
            index.delete_other(f"quarantine/{path.name}")

    def _remove_all(self) -> int:
        """Remove every file that we name so, then every folder that is empty; the bytes that went."""
        ours = [path for shard in self._shards() for path, match in self._named(shard, _BLOCK) if match[1][:2] == shard]
        ours += [path for folder in (*self._shards(), "fingerprints") for path, _ in self._named(folder, _TEMP)]
        ours += [path for path, _ in self._named("quarantine", _QUARANTINED)]
        ours += [path for path, _ in self._named("fingerprints", _DESCRIPTION)]
        # The marker goes last: a folder without it that holds something is not ours.
        ours += [self.folder / name for name in (*reversed(FILES), MARKER)]
        freed = 0
        for path in ours:
            with suppress(OSError):
                size = path.lstat().st_size
                path.unlink()
                freed += size
        for folder in (*(self.folder / name for name in (*self._shards(), "quarantine", "fingerprints")), self.folder):
            with suppress(OSError):  # not empty: something foreign is in it
                folder.rmdir()
        return freed

    # Small things.

    def _block(self, key: bytes) -> Path:
        return self.folder / key.hex()[:2] / f"{key.hex()}.safetensors"

    def _pause_for(self, reason: str) -> None:
        self._pause = (self._clock() + PAUSE_SECONDS, reason)

    def _touch(self, key: bytes) -> None:
        now = self._clock()
        with self._touching:
            self._touches[key] = now
            due = now - self._touched >= _TOUCH_SECONDS
            if due:
                self._touched = now
        if due:
            self._flush(timeout=0.0)

    def _flush(self, *, timeout: float = _LOCK_SECONDS) -> None:
        """Write the times of use."""
        self._try(lambda index: self._make_room(index, 0), False, timeout=timeout)

    def _shards(self) -> list[str]:
        """The names of the folders that blocks lie in."""
        with os.scandir(self.folder) as entries:
            return sorted(e.name for e in entries if _SHARD.fullmatch(e.name) and e.is_dir(follow_symlinks=False))

    def _named(self, folder: str, pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
        """The plain files of a folder of ours whose names match."""
        if not is_folder(self.folder / folder):
            return
        with os.scandir(self.folder / folder) as entries:
            for entry in list(entries):
                match = pattern.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    yield Path(entry.path), match
