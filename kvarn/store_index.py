"""The index of the disk store: which blocks and other files there are, how large, and when used. SQLite in WAL mode.

It can be made anew from the files, so nothing here is synced.
"""

import os
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvarn.record import BlockMeta

MARKER = "KVARN_CACHE"
FILES = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm")

VERSION = 1
BUSY_SECONDS = 5.0
_T = TypeVar("_T")
_APPLICATION = 0x4B56726E  # "KVrn"
LOG_BYTES = 128 << 10  # the log is cut when it is longer; the budget always counts as much
# `children` and `totals` are kept by triggers, so that the next block to evict and the bytes held are one lookup each.
_SCHEMA = f"""
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {VERSION};
CREATE TABLE blocks (
    key BLOB PRIMARY KEY CHECK (length(key) = 32), parent BLOB NOT NULL CHECK (length(parent) = 32),
    fingerprint BLOB NOT NULL CHECK (length(fingerprint) = 32), format TEXT NOT NULL, size INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL, children INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE INDEX blocks_parent ON blocks (parent);
CREATE INDEX blocks_leaves ON blocks (fingerprint, used) WHERE children = 0;
CREATE TABLE totals (
    fingerprint BLOB PRIMARY KEY, blocks INTEGER NOT NULL, bytes INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE others (
    name TEXT PRIMARY KEY, kind TEXT NOT NULL, size INTEGER NOT NULL, created REAL NOT NULL, reason TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TRIGGER block_in AFTER INSERT ON blocks BEGIN
    UPDATE blocks SET children = (SELECT count(*) FROM blocks WHERE parent = NEW.key) WHERE key = NEW.key;
    UPDATE blocks SET children = children + 1 WHERE key = NEW.parent;
    INSERT INTO totals VALUES (NEW.fingerprint, 1, NEW.size)
        ON CONFLICT (fingerprint) DO UPDATE SET blocks = blocks + 1, bytes = bytes + NEW.size;
END;
CREATE TRIGGER block_out AFTER DELETE ON blocks BEGIN
    UPDATE blocks SET children = children - 1 WHERE key = OLD.parent;
    UPDATE totals SET blocks = blocks - 1, bytes = bytes - OLD.size WHERE fingerprint = OLD.fingerprint;
    DELETE FROM totals WHERE fingerprint = OLD.fingerprint AND blocks = 0;
END;
"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One block in store; times in seconds since 1970."""

    key: bytes
    parent: bytes
    fingerprint: bytes
    format: str
    num_tokens: int
    size: int
    created: float
    used: float


@dataclass(frozen=True, kw_only=True)
class FingerprintStats:
    """The blocks of one fingerprint."""

    blocks: int
    bytes: int
    used: float


@dataclass(frozen=True, kw_only=True)
class Victim:
    """What eviction deletes next: a block, or else another file by its name."""

    key: bytes | None
    name: str
    size: int


class Index:
    """An open index. `Index(path)` makes one where there is none; sqlite3.Error for a damaged or foreign one.

    Two connections: one writes, inside `transaction`, and one reads beside it; one thread at a time uses each.
    """

    def __init__(self, path: Path) -> None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))  # SQLite would not make it private
        self._path = path
        self._stat = path.stat()
        self._connections: list[sqlite3.Connection] = []
        try:
            self._writer = self._connect()
            self._prepare()
            self._reader = self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        self._connections.append(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    def _prepare(self) -> None:
        self._writer.execute("PRAGMA auto_vacuum = FULL")  # its size counts to the budget
        self._writer.execute("PRAGMA journal_mode = WAL")
        self._writer.execute("PRAGMA wal_autocheckpoint = 0")  # `trim` does that
        (tables,) = self._writer.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        self.is_new = not tables
        if self.is_new:
            self._writer.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")
        mine = tuple(
            self._writer.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        if mine != (_APPLICATION, VERSION):
            raise sqlite3.DatabaseError(f"the index has version {mine[1]}, this KVarN has {VERSION}")
        for (fault,) in self._writer.execute("PRAGMA integrity_check(1)"):
            if fault != "ok":
                raise sqlite3.DatabaseError(f"the index is damaged: {fault}")

    def close(self) -> None:
        """Close both connections."""
        for connection in self._connections:
            connection.close()

    def is_current(self) -> bool:
        """Whether the file at its path is still this one: another process, or the user, may have deleted it."""
        try:
            now = self._path.stat()
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == (self._stat.st_dev, self._stat.st_ino)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing of what is written inside; no other process writes meanwhile."""
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise

    def trim(self, most: int = LOG_BYTES) -> None:
        """Bring a log of more than `most` bytes into the file and cut it to nothing, unless another process reads."""
        if _size(self._path.with_name(FILES[1])) > most:
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    # What is written, and what is read inside a transaction.

    def insert(self, meta: BlockMeta, *, size: int, created: float) -> None:
        """Add a block, used when it was created; one that is there stays."""
        self._writer.execute(
            "INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0) ON CONFLICT DO NOTHING",
            (meta.key, meta.parent, meta.fingerprint, meta.format, size, len(meta.tokens), created, created),
        )

    def has(self, key: bytes) -> bool:
        """Whether a block is listed, as this transaction sees it."""
        return self._writer.execute("SELECT 1 FROM blocks WHERE key = ?", (key,)).fetchone() is not None

    def delete(self, key: bytes) -> None:
        """Drop a block."""
        self._writer.execute("DELETE FROM blocks WHERE key = ?", (key,))

    def touch(self, used: Mapping[bytes, float]) -> None:
        """Set when blocks were used, never back."""
        self._writer.executemany(
            "UPDATE blocks SET used = max(used, ?) WHERE key = ?", [(when, key) for key, when in used.items()]
        )

    def add_other(self, name: str, kind: str, *, size: int, created: float, reason: str = "") -> None:
        """Add a file that is no block: `name` is its path below the folder, `kind` quarantine, description or temp."""
        self._writer.execute(
            "INSERT OR REPLACE INTO others VALUES (?, ?, ?, ?, ?)", (name, kind, size, created, reason)
        )

    def delete_other(self, name: str) -> None:
        """Drop a file that is no block."""
        self._writer.execute("DELETE FROM others WHERE name = ?", (name,))

    def sizes(self) -> dict[bytes, int]:
        """Every block's key and size."""
        return dict(self._writer.execute("SELECT key, size FROM blocks"))

    def reasons(self) -> dict[str, str]:
        """Every quarantined file's name and reason."""
        return dict(self._writer.execute("SELECT name, reason FROM others WHERE kind = 'quarantine'"))

    def recount(self) -> None:
        """Set what the triggers keep from the rows, and forget every other file."""
        self._writer.execute("DELETE FROM others")
        self._writer.execute("DELETE FROM totals")
        self._writer.execute(
            "INSERT INTO totals SELECT fingerprint, count(*), sum(size) FROM blocks GROUP BY fingerprint"
        )
        self._writer.execute(
            "WITH counted AS (SELECT key, (SELECT count(*) FROM blocks WHERE parent = b.key) AS n FROM blocks b) "
            "UPDATE blocks SET children = n FROM counted WHERE counted.key = blocks.key AND children <> n"
        )

    def own_bytes(self) -> int:
        """The most that the index and the marker take until something is added: the log can grow by itself."""
        pages, page = (self._writer.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        marker, file, log, shared = (_size(self._path.with_name(name)) for name in (MARKER, *FILES))
        return int(marker + max(file, pages * page) + max(log, LOG_BYTES) + shared)

    def held_bytes(self) -> int:
        """Bytes of every file that is listed, and `own_bytes`."""
        (held,) = self._writer.execute(
            "SELECT (SELECT ifnull(sum(bytes), 0) FROM totals) + (SELECT ifnull(sum(size), 0) FROM others)"
        ).fetchone()
        return int(held) + self.own_bytes()

    def victim(self, ours: Collection[bytes], protect: bytes) -> Victim | None:
        """What goes next: quarantine, leaves of foreign fingerprints, leaves of ours, descriptions of what is gone.

        A leaf is a block without a child in store; the least recently used goes first. `protect` stays.
        """
        found = self._writer.execute(
            "SELECT name, size FROM others WHERE kind = 'quarantine' ORDER BY created LIMIT 1"
        ).fetchone()
        if found is not None:
            return Victim(key=None, name=found[0], size=found[1])
        held = [fingerprint for (fingerprint,) in self._writer.execute("SELECT fingerprint FROM totals")]
        foreign, own = [x for x in held if x not in ours], [x for x in held if x in ours]
        for fingerprints in (foreign, own):
            leaves = [leaf for fingerprint in fingerprints if (leaf := self._leaf(fingerprint, protect))]
            if leaves:
                _, key, size = min(leaves)
                return Victim(key=key, name="", size=size)
        unused = self._writer.execute(
            "SELECT name, size FROM others WHERE kind = 'description' AND NOT EXISTS "
            "(SELECT 1 FROM totals WHERE instr(name, lower(hex(fingerprint)))) ORDER BY created"
        )
        kept = tuple(f"/{fingerprint.hex()}.json" for fingerprint in ours)
        found = next((row for row in unused if not row[0].endswith(kept)), None)
        return None if found is None else Victim(key=None, name=found[0], size=found[1])

    def _leaf(self, fingerprint: bytes, protect: bytes) -> tuple[float, bytes, int] | None:
        found: tuple[float, bytes, int] | None = self._writer.execute(
            "SELECT used, key, size FROM blocks WHERE fingerprint = ? AND children = 0 AND key <> ? "
            "ORDER BY used LIMIT 1",
            (fingerprint, protect),
        ).fetchone()
        return found

    # What is read beside a transaction.

    def contains(self, key: bytes) -> bool:
        """Whether a block is listed."""
        return self._reader.execute("SELECT 1 FROM blocks WHERE key = ?", (key,)).fetchone() is not None

    def children(self, parent: bytes) -> list[bytes]:
        """The keys of the blocks that follow a key, the first made first."""
        rows = self._reader.execute("SELECT key FROM blocks WHERE parent = ? ORDER BY created, key", (parent,))
        return [key for (key,) in rows]

    def entries(self) -> list[Entry]:
        """Every block, the least recently used first."""
        rows = self._reader.execute(
            "SELECT key, parent, fingerprint, format, num_tokens, size, created, used FROM blocks ORDER BY used, key"
        )
        names = ("key", "parent", "fingerprint", "format", "num_tokens", "size", "created", "used")
        return [Entry(**dict(zip(names, row, strict=True))) for row in rows]

    def fingerprints(self) -> dict[bytes, FingerprintStats]:
        """Blocks, bytes and last use by fingerprint."""
        rows = self._reader.execute(
            "SELECT fingerprint, count(*), sum(size), max(used) FROM blocks GROUP BY fingerprint ORDER BY fingerprint"
        )
        return {row[0]: FingerprintStats(blocks=row[1], bytes=row[2], used=row[3]) for row in rows}

    def others(self) -> list[tuple[str, str, int, str]]:
        """Name, kind, bytes and reason of every file that is no block."""
        return self._reader.execute("SELECT name, kind, size, reason FROM others ORDER BY name").fetchall()


def own_bytes(folder: Path) -> int:
    """Bytes of the marker and of the index's own files as they are now."""
    return sum(_size(folder / name) for name in (MARKER, *FILES))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def error_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 where the error is not SQLite's own."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def is_full(error: sqlite3.Error) -> bool:
    """Whether the disk is full: nothing is wrong with the index then."""
    return error_code(error) == sqlite3.SQLITE_FULL
