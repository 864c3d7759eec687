"""What a model writes that follows its chat template exactly, and reading it in any pieces."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chat_templates import TemplateText

from kvarn.serve.http.parts import AnswerParser, CallArguments, Collected, Part, Text, Thought
from kvarn.serve.tokenizer import MarkedText, _without_json
from kvarn.serve.toolcalls.answers import AnswerReader
from kvarn.serve.toolcalls.learn import ChatFormat
from kvarn.serve.toolcalls.messages import for_template

USER = {"role": "user", "content": "kvarnuser"}
PLAIN = "kvarnplain"


def call(name: str, arguments: str, call_id: str = "abcdefgh1") -> dict[str, Any]:
    """A call as kvarn.serve.http.conversation has it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(template: TemplateText, form: ChatFormat, content: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """The text of an answer, without the end of the turn."""
    plain = template.render([USER, {"role": "assistant", "content": PLAIN}], prompt=False)
    end = plain.rpartition(PLAIN)[2]
    asked = template.render([USER])
    message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    messages, _ = for_template([USER, message], [], form, parallel=True)
    whole = template.render([_without_marks(m) for m in messages], prompt=False)
    assert whole.startswith(asked)
    text = whole.removeprefix(asked)
    for tail in (end, end.lstrip(), end.strip()):
        if text.endswith(tail):
            return text.removesuffix(tail)
    return text


def _without_marks(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    text = "".join(content.pieces) if isinstance(content, MarkedText) else content
    return {**_without_json(message), "content": text}


def reader(form: ChatFormat, functions: Mapping[str, Any] | None = None, **options: Any) -> AnswerReader:
    """A reader with ids 0, 1, …"""
    count = itertools.count()
    options = {"thoughts": form.thoughts, "syntax": form.syntax} | options
    return AnswerReader(functions=functions, new_id=lambda: str(next(count)), **options)


def read(make: Callable[[], AnswerParser], text: str, cuts: Sequence[int] = ()) -> list[Part]:
    """The parts of a text that comes in pieces cut at these places."""
    own = make()
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [part for a, b in itertools.pairwise(places) for part in own.add(text[a:b])]
    return joined(parts + own.finish())


def collected(parts: Sequence[Part]) -> Collected:
    """The parts put together."""
    whole = Collected()
    for part in parts:
        whole.add(part)
    return whole


def calls_of(parts: Sequence[Part]) -> list[tuple[str, Any]]:
    """Names and arguments as values."""
    return [(one.name, json.loads(one.arguments)) for one in collected(parts).calls]


def joined(parts: list[Part]) -> list[Part]:
    """The same parts with neighbours of one kind made one."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, Text) and isinstance(last, Text):
            whole[-1] = Text(last.text + part.text)
        elif isinstance(part, Thought) and isinstance(last, Thought):
            whole[-1] = Thought(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and last.index == part.index:
            whole[-1] = CallArguments(part.index, last.text + part.text)
        else:
            whole.append(part)
    return whole
