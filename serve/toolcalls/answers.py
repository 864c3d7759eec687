"""An answer's text -> its parts: a thought at its beginning, then text and calls."""

from collections.abc import Callable, Mapping
from typing import Any

from kvarn.serve.http.parts import Part, Text, Thought
from kvarn.serve.toolcalls.calls import Calls
from kvarn.serve.toolcalls.readers import read_calls
from kvarn.serve.toolcalls.scan import Mismatch, Reading, Source, drive
from kvarn.serve.toolcalls.syntax import CallSyntax, JsonCalls, PythonCalls, ThoughtMarks, triggers


class AnswerReader:
    """See kvarn.serve.http.parts.AnswerParser.

    thoughts: how the model writes thoughts, if it does. opened: the prompt ends within a thought. syntax: how it writes
    calls; None leaves them text. functions: name -> the schema of its parameters. parallel: whether there may be
    several calls.
    """

    def __init__(
        self,
        *,
        thoughts: ThoughtMarks | None = None,
        opened: bool = False,
        syntax: CallSyntax | None = None,
        functions: Mapping[str, Mapping[str, Any]] | None = None,
        parallel: bool = True,
        new_id: Callable[[], str],
    ) -> None:
        self.in_thought = opened
        self._thoughts = thoughts
        self._syntax = syntax
        self._source = Source()
        self._out: list[Part] = []
        self._calls = Calls(self._out, functions or {}, parallel, new_id)
        self._reading = self._read()

    def add(self, text: str) -> list[Part]:
        """See kvarn.serve.http.parts.AnswerParser."""
        return drive(self._reading, self._source, text, self._out)

    def finish(self) -> list[Part]:
        """See kvarn.serve.http.parts.AnswerParser."""
        return drive(self._reading, self._source, "", self._out, end=True)

    def _text(self, text: str) -> None:
        if text and not self._calls.closed:
            self._out.append(Text(text))

    def _read(self) -> Reading[None]:
        if self._thoughts is not None:
            yield from self._read_thought(self._thoughts)
        if self._syntax is not None:
            yield from self._read_answer(self._syntax)
        else:
            yield from self._source.until((), self._text)

    def _read_thought(self, marks: ThoughtMarks) -> Reading[None]:
        source, opened = self._source, self.in_thought
        yield from source.skip_space()
        if not (yield from source.accept(marks.open)) and not opened:
            source.at = 0
            return
        self.in_thought = True
        while (yield from source.peek()) == "\n":
            source.at += 1
        ends = [lead + marks.close for lead in ("", "\n", "\n\n")]
        yield from source.until(ends, lambda text: self._out.append(Thought(text)))
        self.in_thought = False
        yield from source.skip_space()
        source.forget()

    def _read_answer(self, syntax: CallSyntax) -> Reading[None]:
        source, words = self._source, triggers(syntax)
        fresh = True  # at the beginning, or right after a call; white space there is the format's if a call follows
        while True:
            blank = ""
            if fresh:
                yield from source.skip_space()
                blank, source.at = source.text[: source.at], 0
                if (yield from self._read_bare(syntax, len(blank))):
                    continue
            before, word = yield from self._find(words, syntax.lead, blank)
            if not word:
                return
            fresh = yield from self._read_marked(syntax, before, word)

    def _read_bare(self, syntax: CallSyntax, start: int) -> Reading[bool]:
        """Calls without a first mark; False if there are none here."""
        source, count = self._source, self._calls.count
        if not isinstance(syntax, JsonCalls | PythonCalls) or not syntax.bare:
            return False
        source.at = start
        try:
            if (yield from source.peek()) in ("{", "["):
                yield from read_calls(source, self._calls, syntax, bare=True)
        except Mismatch:
            source.at = 0
        source.at = 0
        return self._calls.count > count

    def _find(self, words: tuple[str, ...], lead: str, blank: str) -> Reading[tuple[str, str]]:
        """Text up to the mark of a call, which stays unread: (space before it that is not text, the mark)."""
        source = self._source
        source.at = len(blank)
        for word in words:
            if (yield from source.accept(word)):
                source.text, source.at = source.text[len(blank) :], 0
                return blank, word
        if not (yield from source.need()) and self._calls.count:
            return "", ""
        source.at = 0
        found = yield from source.until([space + word for word in words for space in {lead, ""}], self._text)
        word = found.lstrip()
        source.text = word + source.text
        return found[: len(found) - len(word)], word

    def _read_marked(self, syntax: CallSyntax, before: str, word: str) -> Reading[bool]:
        """Calls at a mark; False if it begins none, and is text."""
        source, count = self._source, self._calls.count
        try:
            yield from read_calls(source, self._calls, syntax)
        except Mismatch:
            source.at = 0
            if self._calls.count == count:
                self._text(before + word)
                source.text = source.text[len(word) :]
                return False
        return True
