"""Who a checkpoint is: a content hash of its weights, remembered, and of its tokenizer.

A hash is remembered by (device, inode, size, mtime_ns, ctime_ns). Names, sizes and dates alone would not do: copies and
fine-tunes keep them. The change time cannot be set by a program, so a file that was written to is read again.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"),
    *("added_tokens.json", "special_tokens_map.json"),
)


def weights_identity(shards: Sequence[Path], memo: Path) -> str:
    """sha256 over the contents of every shard, whatever the files are called; `memo` is a file of remembered hashes.

    A memo that is missing, damaged or cannot be written costs time and nothing else. Raises OSError when a shard
    cannot be read.
    """
    known = _read_memo(memo)
    fresh: dict[str, str] = {}
    digests = []
    for shard in shards:
        name = _stat_name(shard)
        digest = known.get(name)
        if digest is None:
            digest = _file_digest(shard)
            if _stat_name(shard) == name:  # not written to meanwhile
                fresh[name] = digest
        digests.append(digest)
    if fresh:
        _write_memo(memo, {**_read_memo(memo), **fresh})
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


def tokenizer_identity(model_dir: Path) -> str:
    """sha256 over the files that decide which text is which token ids; a chat template is not among them."""
    found = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        path = model_dir / name
        if path.is_file():
            found.update(f"{name}:{_file_digest(path)}\n".encode())
    return found.hexdigest()


def _stat_name(path: Path) -> str:
    s = path.stat()
    return f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}"


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_memo(memo: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(memo.read_text())
        if isinstance(content, dict):
            return {str(k): v for k, v in content.items() if isinstance(v, str) and len(v) == 64}
    return {}


def _write_memo(memo: Path, content: dict[str, str]) -> None:
    """Replace the memo in one go; two processes at once lose at most a hash."""
    with contextlib.suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        temporary = memo.with_name(f"{memo.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content))
        temporary.replace(memo)
