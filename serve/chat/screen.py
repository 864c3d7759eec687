"""Where a chat writes: answers as plain text or as rendered markdown, and everything else beside them."""

import time
from collections.abc import Callable, Iterable
from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text

from kvarn.serve.chat.markdown import last_block, lines_of
from kvarn.serve.literal import literal, one_line

_PAUSE = 0.05  # seconds between two paintings of a block that grows


class Screen(Protocol):
    """What a chat writes to. An answer is `text` until `end`; `reading` comes before it."""

    def reading(self, done: int, total: int) -> None:
        """So many tokens of the prompt are computed."""

    def thought(self, piece: str) -> None:
        """The next piece of a thought, which is no part of the answer."""

    def text(self, piece: str) -> None:
        """The next piece of an answer."""

    def end(self) -> None:
        """The answer has ended."""

    def quote(self, text: str) -> None:
        """What the user said earlier."""

    def note(self, line: str) -> None:
        """A line that is no answer."""

    def error(self, line: str) -> None:
        """A line about what went wrong."""


class PlainScreen:
    """Answers on one stream, everything else on another, without an escape code. See Screen."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._filter: Callable[[str], str] = literal if out.isatty() else str
        self._open = False

    def reading(self, done: int, total: int) -> None:
        return

    def thought(self, piece: str) -> None:
        return

    def text(self, piece: str) -> None:
        self._open = not piece.endswith("\n")
        self._out.write(self._filter(piece))
        self._out.flush()

    def end(self) -> None:
        if self._open:
            self._out.write("\n")
        self._open = False
        self._out.flush()

    def quote(self, text: str) -> None:
        for line in literal(text).split("\n"):
            self._say(f"> {line}")

    def note(self, line: str) -> None:
        self._say(one_line(line))

    def error(self, line: str) -> None:
        self._say(f"error: {one_line(line)}")

    def _say(self, line: str) -> None:
        self._err.write(line + "\n")
        self._err.flush()


class RichScreen:
    """Rendered markdown on a terminal that can move its cursor. See Screen.

    A finished block is never touched again; of the block that grows, only the lines that changed are written again.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._console = console
        self._clock = clock
        self._painter = Painter(console)
        self._pending = ""  # from the beginning of the block that grows
        self._painted = 0.0
        self._first = True
        self._thought = 0  # characters

    def reading(self, done: int, total: int) -> None:
        if done < total:
            self._painter.paint([self._styled(f"reading {done} of {total} tokens")])

    def thought(self, piece: str) -> None:
        begins = not self._thought
        self._thought += len(piece)
        if self._first and (begins or self._clock() - self._painted >= _PAUSE):
            self._painter.paint([self._styled(f"thinking, {self._thought} characters so far")])
            self._painted = self._clock()

    def text(self, piece: str) -> None:
        if self._first:
            self._painter.paint([])
            self._pending = self._pending.lstrip("\n")
        self._pending += literal(piece)  # line by line it is parsed and counted, so first of all
        self._first = False
        if self._clock() - self._painted >= _PAUSE:
            self._paint()

    def end(self) -> None:
        if self._first:
            self._painter.paint([])
        self._paint()
        self._painter.freeze()
        self._pending, self._first, self._thought = "", True, 0

    def quote(self, text: str) -> None:
        for line in literal(text).split("\n"):
            self._console.print(Text(f"> {line}", style="dim"))

    def note(self, line: str) -> None:
        self._console.print(Text(one_line(line), style="dim"))

    def error(self, line: str) -> None:
        self._console.print(Text(f"error: {one_line(line)}", style="red"))

    def _styled(self, line: str) -> str:
        with self._console.capture() as capture:
            self._console.print(Text(line, style="dim"), end="", overflow="crop", no_wrap=True)
        return capture.get()

    def _paint(self) -> None:
        begin = last_block(self._pending)
        if begin:
            finished = lines_of(self._console, self._pending[:begin])
            self._painter.paint([*finished, ""] if finished else [])
            self._painter.freeze()
            self._pending = self._pending[begin:]
        self._painter.paint(lines_of(self._console, self._pending))
        self._painted = self._clock()


class Painter:
    """Rewrites the lines at the end of a terminal, from the first one that changed on."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: list[str] = []
        self._width = console.width

    def paint(self, lines: Iterable[str]) -> None:
        """Show these lines instead of those of the last call. What has left the screen at its top stays as it is."""
        if self._console.width != self._width:  # the terminal wrapped the old lines anew, nobody knows where
            self.freeze()
        self._width = self._console.width
        new, old = list(lines), self._shown
        same = next((i for i, (a, b) in enumerate(zip(new, old, strict=False)) if a != b), min(len(new), len(old)))
        first = max(same, len(old) - (self._console.height - 1))
        if first == len(old) == len(new):
            return
        up = len(old) - first
        written = (f"\x1b[{up}A" if up else "") + "\r\x1b[J" + "".join(line + "\n" for line in new[first:])
        self._console.file.write(written)
        self._console.file.flush()
        self._shown = new if len(new) >= first else old[:first]

    def freeze(self) -> None:
        """The lines that are shown stay for good."""
        self._shown = []
