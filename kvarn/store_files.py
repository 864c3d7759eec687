"""Files of the disk store: plain ones of our own, written whole or not at all, for us alone."""

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path


def is_folder(path: Path) -> bool:
    """Whether a path is a folder itself, not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def is_plain(path: Path) -> bool:
    """Whether a path is a plain file in a plain folder; anything else is not ours."""
    try:
        return stat.S_ISREG(path.lstat().st_mode) and is_folder(path.parent)
    except OSError:
        return False


def private_folder(path: Path) -> bool:
    """Make a folder for us alone; False when something else has its name."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        sync_folder(path.parent)
    return is_folder(path)


def is_dead(pid: int) -> bool:
    """Whether no process has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False


def read_file(path: Path) -> bytes:
    """A file's bytes; OSError for a link."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe of that name must not block us
    try:
        parts = []
        while part := os.read(file, 1 << 24):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(file)


def write_file(path: Path, data: bytes) -> None:
    """Write a file so that it has its name only when it is whole and on disk. Nothing is left after an OSError."""
    private_folder(path.parent)
    temp = path.with_name(f"{path.name[:64]}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
    made = temp
    file = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
            os.fsync(file)
        finally:
            os.close(file)
        temp.rename(path)
        made = path
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            made.unlink()
        raise


def sync_folder(path: Path) -> None:
    """Bring a folder's names to the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
