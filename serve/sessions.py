"""Named sessions: the token ids that a conversation has fed, so that it goes on after a restart without rereading."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvarn.errors import UsageError
from kvarn.folders import cache_folder

_NAME = re.compile(r"[\w][\w.-]{0,99}")
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Session:
    """A conversation as token ids, and the identity of the tokenizer that made them.

    turns: offsets in `tokens`, two for each turn: where it begins, and where its answer begins. What stands before the
    first one, all of it in files of older versions, cannot be taken apart. system: the system prompt, if it is known.
    """

    tokens: tuple[int, ...]
    tokenizer: str
    turns: tuple[int, ...] = ()
    system: str | None = None


def session_path(name: str) -> Path:
    """The file of a session; UsageError for a name that is no file name."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no session name; use letters, digits, '.', '_' and '-', 100 at most")
    return cache_folder() / "sessions" / f"{name}.json"


def load_session(name: str, tokenizer: str) -> Session | None:
    """A session that is there; UsageError when it is damaged or belongs to another tokenizer."""
    path = session_path(name)
    try:
        content = json.loads(path.read_text())
        tokens = content["tokens"]
        if content["version"] != VERSION or not all(isinstance(t, int) and t >= 0 for t in tokens):
            raise ValueError("it is of another version")
        turns, system = content.get("turns", []), content.get("system")
        if not _ordered([0, *turns, len(tokens)]) or len(turns) % 2 or not isinstance(system, str | None):
            raise ValueError("its turns or its system prompt are damaged")
        session = Session(tokens=tuple(tokens), tokenizer=str(content["tokenizer"]), turns=tuple(turns), system=system)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"session {name} ({path}) cannot be read: {error}; use another name or remove it") from error
    if session.tokenizer != tokenizer:
        raise UsageError(f"session {name} was made with another model's tokenizer; use that model or another name")
    return session


def _ordered(offsets: list[int]) -> bool:
    return all(isinstance(x, int) for x in offsets) and offsets == sorted(offsets)


def save_session(name: str, session: Session) -> None:
    """Replace the session's file in one go; UsageError when it cannot be written."""
    path = session_path(name)
    content = {
        "version": VERSION,
        "tokenizer": session.tokenizer,
        "tokens": session.tokens,
        "turns": session.turns,
        "system": session.system,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"session {name} cannot be saved: {error}; the answer above is not lost") from error
