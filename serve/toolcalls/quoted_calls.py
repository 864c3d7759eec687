"""Calls whose keys are bare and whose strings stand between marks: `call:f{x:1,y:<q>a<q>}`."""

import json
import re

from kvarn.serve.toolcalls.calls import MAX_NAME, Calls
from kvarn.serve.toolcalls.scan import Mismatch, Reading, Source, after_space, close
from kvarn.serve.toolcalls.syntax import QuotedCalls

_BARE = re.compile(r"[^\s,:{}\[\]]+")


def read_quoted(source: Source, calls: Calls, syntax: QuotedCalls) -> Reading[None]:
    """Calls in a row; a call's arguments are known when it is whole."""
    yield from source.expect(syntax.open)
    while True:
        start = source.at
        while (char := (yield from source.peek())) != "{":
            if not char or source.at - start > MAX_NAME or char in "<>}\n":
                raise Mismatch
            source.at += 1
        calls.start(source.text[start : source.at].strip())
        source.forget()
        text = yield from _braced(source, syntax.quote)
        calls.arguments(_as_json(text, syntax.quote))
        source.forget()
        yield from close(source, syntax.close)
        source.forget()
        if not (yield from after_space(source, syntax.open)):
            return


def _braced(source: Source, quote: str) -> Reading[str]:
    """Up to the brace that closes the first one, outside of strings; all there is where the text ends before."""
    start, depth, in_string = source.at, 0, False
    while char := (yield from source.peek()):
        if char == quote[0] and (yield from source.accept(quote)):
            in_string = not in_string
            continue
        source.at += 1
        if not in_string:
            depth += (char in "{[") - (char in "}]")
            if depth == 0:
                break
    return source.text[start : source.at]


def _as_json(text: str, quote: str) -> str:
    """The arguments as JSON; what is none even so stays as it was written."""
    pieces = []
    for i, piece in enumerate(text.split(quote)):
        pieces.append(json.dumps(piece, ensure_ascii=False) if i % 2 else _BARE.sub(_word, piece))
    made = "".join(pieces)
    try:
        return json.dumps(json.loads(made), ensure_ascii=False)
    except ValueError:
        return text


def _word(found: re.Match[str]) -> str:
    """A bare word: a number or a constant, or a key or a string without quotes."""
    word = found[0]
    after = found.string[found.end() :].lstrip()
    if not after.startswith(":"):
        try:
            json.loads(word)
            return word
        except ValueError:
            pass
    return word if word.startswith('"') else json.dumps(word, ensure_ascii=False)
