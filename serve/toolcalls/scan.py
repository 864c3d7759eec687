"""Reading a text that is still coming: a reader is a generator that yields when it needs more of it.

Every decision waits for the text that it depends on, so how the text was cut into pieces cannot change one.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from kvarn.serve.http.parts import Part

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields when more text is needed; returns a T."""

_SPACE = " \t\r\n"


class Mismatch(Exception):
    """The text is not what the reader expects here."""


class Source:
    """The text so far and a place in it. `ended`: no more will come."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    @property
    def rest(self) -> str:
        """What was not read yet, as far as it has come."""
        return self.text[self.at :]

    def need(self, count: int = 1) -> Reading[bool]:
        """Wait for `count` more characters; False if they never come."""
        while len(self.text) - self.at < count:
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """The next character; empty at the end."""
        return self.text[self.at] if (yield from self.need()) else ""

    def skip_space(self) -> Reading[None]:
        """Go past white space."""
        while (yield from self.need()) and self.text[self.at] in _SPACE:
            self.at += 1

    def accept(self, literal: str) -> Reading[bool]:
        """Go past `literal` if it comes next. Where it has white space, the text may have any, or none."""
        start = self.at
        for i, word in enumerate(literal.split()):
            if i or literal[0] in _SPACE:
                yield from self.skip_space()
            for char in word:
                if (yield from self.peek()) != char:
                    self.at = start
                    return False
                self.at += 1
        return True

    def expect(self, literal: str) -> Reading[None]:
        """Go past `literal`; Mismatch if something else comes."""
        if not (yield from self.accept(literal)):
            raise Mismatch

    def string(self) -> Reading[str]:
        """A JSON string as it stands, quotes and escapes included."""
        start = self.at
        yield from self.expect('"')
        while char := (yield from self.peek()):
            self.at += 1
            if char == "\\":
                yield from self.need()
                self.at += 1
            elif char == '"':
                return self.text[start : self.at]
        raise Mismatch

    def skim(self) -> Reading[str]:
        """A whole JSON value of any kind, as it stands; Mismatch if the text ends before it."""
        start, depth = self.at, 0
        while True:
            char = yield from self.peek()
            if char == '"':
                yield from self.string()
            elif not char:
                raise Mismatch
            elif depth == 0 and char in ",]}" + _SPACE:
                return self.text[start : self.at]
            else:
                depth += (char in "{[") - (char in "}]")
                self.at += 1
            if depth == 0 and char in '"]}':
                return self.text[start : self.at]

    def value(self, end: str, emit: Callable[[str], None]) -> Reading[bool]:
        """A JSON object or list, told to `emit` as it comes; True if it was whole. Places before are no longer valid.

        It ends where its brackets close. It also ends before `end` (if there is one) outside of strings: then the
        model has forgotten a bracket, and what it wrote is passed on as it is.
        """
        depth, in_string = 0, False
        while True:
            if self.at == len(self.text):
                self._pass(self.at, emit)
            char = yield from self.peek()
            if not char:
                return False
            if in_string:
                if char == "\\" and not (yield from self.need(2)):
                    self._pass(len(self.text), emit)
                    return False
                self.at += char == "\\"
                in_string = char != '"'
            elif end and char == end[0] and (yield from self._comes(end)):
                self._pass(self.at, emit)
                return False
            else:
                in_string = char == '"'
                depth += (char in "{[") - (char in "}]")
            self.at += 1
            if depth == 0 and not in_string:
                self._pass(self.at, emit)
                return True

    def _pass(self, to: int, emit: Callable[[str], None]) -> None:
        """Tell what comes before `to`, and forget it."""
        if to:
            emit(self.text[:to])
        self.text, self.at = self.text[to:], 0

    def _comes(self, literal: str) -> Reading[bool]:
        start = self.at
        found = yield from self.accept(literal)
        self.at = start
        return found

    def until(self, marks: Sequence[str], emit: Callable[[str], None]) -> Reading[str]:
        """Go past the first of the marks; what comes before is told to `emit` as soon as it is certain. Places before
        are no longer valid.

        Returns the mark (the longest of several at one place), or an empty string when the text ends without one.
        """
        self.forget()
        while True:
            found = [(place, -len(mark), mark) for mark in marks if (place := self.text.find(mark)) >= 0]
            place, _, mark = min(found) if found else (len(self.text), 0, "")
            # A mark that begins before this one, or here and is longer, may still be coming.
            held = 0 if self.ended else max((overlap(self.text, mark) for mark in marks), default=0)
            certain = len(self.text) - held
            if found and place < certain:
                self._pass(place, emit)
                self.at = len(mark)
                self.forget()
                return mark
            self._pass(min(certain, place), emit)
            if self.ended:
                return ""
            yield

    def forget(self) -> None:
        """Drop what was read."""
        self.text, self.at = self.text[self.at :], 0


def after_space(source: Source, literal: str) -> Reading[bool]:
    """Go past white space and `literal`, or nowhere."""
    start = source.at
    yield from source.skip_space()
    if (yield from source.accept(literal)):
        return True
    source.at = start
    return False


def close(source: Source, literal: str) -> Reading[None]:
    """Go past white space and `literal`, or what there is of it where the text ends, or nowhere."""
    if not (yield from after_space(source, literal)):
        drop_half(source, literal)


def drop_half(source: Source, *literals: str) -> bool:
    """Go past the beginning of one of the marks at the end of the whole text; False if there is none."""
    rest = "".join(source.rest.split())
    found = source.ended and any("".join(literal.split()).startswith(rest) for literal in literals)
    if found:
        source.at = len(source.text)
    return found


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` begin `mark`, without being all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def drive(reading: Iterator[None], source: Source, text: str, out: list[Part], *, end: bool = False) -> list[Part]:
    """Give a reader more text, or the end, and take what it has put into `out`."""
    source.text += text
    source.ended = source.ended or end
    next(reading, None)
    parts, out[:] = list(out), []
    return parts
