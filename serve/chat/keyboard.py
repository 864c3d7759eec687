"""Where a chat's messages come from: a terminal with editing and history, a plain terminal, or a pipe."""

import contextlib
import os
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from kvarn.errors import UsageError

PROMPT = ">>> "
MORE = "... "


class Reader(Protocol):
    """Gives one message at a time."""

    def read(self) -> str:
        """The next message. EOFError when there is no more, KeyboardInterrupt for Ctrl-C."""

    def silent(self) -> contextlib.AbstractContextManager[None]:
        """While an answer is written: what is typed waits and is not shown."""


class PipeReader:
    """Each line is a message, as it is. See Reader."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def read(self) -> str:
        return _line(self._stream)

    def silent(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class PlainReader:
    """A terminal that is only written to line by line. A backslash at the end of a line goes on. See Reader."""

    def __init__(self, stream: TextIO, out: TextIO) -> None:
        self._stream = stream
        self._out = out

    def read(self) -> str:
        text, prompt = "", PROMPT
        while True:
            self._out.write(prompt)
            self._out.flush()
            text += _line(self._stream)
            if not text.endswith("\\"):
                return text
            text, prompt = text[:-1] + "\n", MORE

    def silent(self) -> contextlib.AbstractContextManager[None]:
        return _silent(self._stream)


class EditingReader:
    """prompt_toolkit: editing, history across runs, several lines, pasting. See Reader.

    Enter sends, unless a backslash stands at the end; Alt-Enter begins a new line.
    """

    def __init__(self, history: Path, say: Callable[[str], None]) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(history, say),
            multiline=True,
            key_bindings=_bindings(),
            prompt_continuation=MORE,
        )

    def read(self) -> str:
        text: str = self._session.prompt(PROMPT)
        return text

    def silent(self) -> contextlib.AbstractContextManager[None]:
        return _silent(sys.stdin)


def _line(stream: TextIO) -> str:
    try:
        line = stream.readline()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 ({error.reason}); convert it first") from error
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


class _PrivateHistory(FileHistory):
    """A history that a full disk does not end."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError, UnicodeEncodeError):
            super().store_string(string)


def _history(path: Path, say: Callable[[str], None]) -> History:
    """The history's file, readable by its owner alone; one in memory where there can be none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
    except OSError as error:
        say(f"the history is not kept: {error}")
        return InMemoryHistory()
    return _PrivateHistory(str(path))


@contextlib.contextmanager
def _silent(stream: TextIO) -> Iterator[None]:
    """Neither echo nor line editing; what is typed stays in the terminal's queue for the next prompt."""
    try:
        before = termios.tcgetattr(stream)
    except (termios.error, OSError, ValueError):
        yield
        return
    changed = [*before]
    changed[3] = before[3] & ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(stream, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(stream, termios.TCSANOW, before)
