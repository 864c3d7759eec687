"""`kvarn chat`: from its options to a conversation."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from kvarn.errors import UsageError
from kvarn.folders import cache_folder
from kvarn.identity import tokenizer_identity
from kvarn.serve.caching import CacheOptions, open_tier
from kvarn.serve.chat.commands import Chat
from kvarn.serve.chat.keyboard import EditingReader, PipeReader, PlainReader, Reader
from kvarn.serve.chat.local import LocalModel, LocalTalk
from kvarn.serve.chat.screen import PlainScreen, RichScreen, Screen
from kvarn.serve.chat.settings import Settings
from kvarn.serve.chat.talk import Talk
from kvarn.serve.loading import ModelOptions, load, progress_bar, say, start_engine
from kvarn.serve.models import resolve
from kvarn.serve.sessions import Session, load_session


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How to talk: the system prompt, the name of the session, and the first settings."""

    settings: Settings
    system: str | None = None
    session: str | None = None


def chat(model: ModelOptions, cache: CacheOptions, options: ChatOptions) -> None:
    """Talk with a model in this process; what is refused is refused before the weights are read."""
    model_dir = resolve(model.model, progress=progress_bar())
    identity = tokenizer_identity(model_dir)
    found = load_session(options.session, identity) if options.session is not None else None
    if found is not None and found.tokens and options.system is not None:
        raise UsageError("--system belongs to the beginning of a session; leave it out, or take another --session name")
    session = found or Session(tokens=(), tokenizer=identity)
    if options.system is not None:
        session = Session(tokens=(), tokenizer=identity, system=options.system)
    loaded = load(model, identify=not cache.no_cache)
    if not loaded.tokenizer.has_chat_template:
        raise UsageError(f"{model.model} has no chat template, so it cannot chat; use kvarn run --raw")
    engine, _ = start_engine(loaded, model, open_tier(loaded, model, cache))
    info = loaded.backend.info
    about = f"{info.device} ({loaded.backend_name}), {info.dtype} weights"
    local = LocalModel(
        name=loaded.model_dir.name, about=about, tokenizer=loaded.tokenizer, engine=engine, identity=identity
    )
    converse(LocalTalk(local, session), options)


def chat_with_server(url: str, api_key: str | None, model: str | None, options: ChatOptions) -> None:
    """Talk with a running server."""
    from kvarn.serve.chat.client import Server, ServerTalk

    if options.session is not None:
        raise UsageError("--session keeps token ids, which only the server has; leave it out with --url")
    converse(ServerTalk(Server(url=url, api_key=api_key), model, options.system), options)


def converse(talk: Talk, options: ChatOptions) -> None:
    """Talk on this process's standard streams until the input ends."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character that the terminal cannot write is no reason to stop
            stream.reconfigure(errors="backslashreplace")
    screen, reader = surroundings(sys.stdin, sys.stdout, sys.stderr, os.environ, cache_folder() / "chat_history")
    talking = Chat(talk, screen, reader, options.settings, session=options.session)
    try:
        if isinstance(reader, PipeReader):
            talking.run_lines()
        else:
            talking.greet()
            talking.run()
    finally:
        talk.close()


def surroundings(
    stdin: TextIO, stdout: TextIO, stderr: TextIO, environment: Mapping[str, str], history: Path
) -> tuple[Screen, Reader]:
    """The screen and the reader that suit these streams: only a terminal on both sides that takes escape codes gets
    markdown and editing.
    """
    plain = PlainScreen(stdout, stderr)
    if not stdin.isatty():
        return plain, PipeReader(stdin)
    dumb = environment.get("TERM", "dumb") in ("dumb", "unknown", "") or environment.get("NO_COLOR")
    if dumb or not stdout.isatty():
        return plain, PlainReader(stdin, stderr)
    from rich.console import Console

    console = Console(file=stdout, force_terminal=True, markup=False, highlight=False, emoji=False)
    return RichScreen(console), EditingReader(history, say)
