"""The harmony format of gpt-oss: an answer is a row of messages, each with a channel and maybe a recipient."""

import re
from collections.abc import Callable

from kvarn.serve.http.parts import Part, Text, Thought
from kvarn.serve.toolcalls.calls import Calls
from kvarn.serve.toolcalls.scan import Reading, Source, drive

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


class HarmonyReader:
    """See kvarn.serve.http.parts.AnswerParser.

    The channel analysis is thoughts; what is addressed to `functions.NAME` is a call; the rest is text.
    """

    def __init__(self, *, parallel: bool, new_id: Callable[[], str]) -> None:
        self.in_thought = False
        self._source = Source()
        self._out: list[Part] = []
        self._calls = Calls(self._out, {}, parallel, new_id)
        self._reading = self._read()

    def add(self, text: str) -> list[Part]:
        """See kvarn.serve.http.parts.AnswerParser."""
        return drive(self._reading, self._source, text, self._out)

    def finish(self) -> list[Part]:
        """See kvarn.serve.http.parts.AnswerParser."""
        return drive(self._reading, self._source, "", self._out, end=True)

    def _read(self) -> Reading[None]:
        source, said = self._source, False
        while (yield from source.need()):
            headed = False
            for mark in ("<|start|>", "<|channel|>", " to="):
                headed = headed or (yield from source.accept(mark))
            source.at = 0
            header = ""
            if headed:
                pieces: list[str] = []
                mark = yield from source.until(("<|message|>",), pieces.append)
                header = "".join(pieces)
                if not mark:  # cut within a header, which is no text
                    return
            emit = self._receiver(header, said)
            said = said or emit == self._text
            yield from source.until(_ENDS, emit)
            self.in_thought = False

    def _receiver(self, header: str, said: bool) -> Callable[[str], None]:
        """Who gets the body of a message with this header."""
        recipient = re.search(r"to=functions\.([^\s<]+)", header)
        if recipient:
            self._calls.start(recipient[1])
            return self._calls.arguments
        if re.search(r"<\|channel\|>\s*analysis", header):
            self.in_thought = True
            return lambda text: self._out.append(Thought(text))
        if said:
            self._text("\n\n")
        return self._text

    def _text(self, text: str) -> None:
        if not self._calls.closed:
            self._out.append(Text(text))
