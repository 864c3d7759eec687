"""What a model's chat template can do with tools and thoughts, learned by rendering samples with it."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvarn.errors import UsageError
from kvarn.serve.toolcalls import harmony
from kvarn.serve.toolcalls.shapes import CHUNK, IDS, KEYS, NAMES, VALUES, shape
from kvarn.serve.toolcalls.syntax import CallSyntax, JsonCalls, PythonCalls, ThoughtMarks

FALLBACK = JsonCalls(begin="<tool_call>\n", end="\n</tool_call>", lead="\n")
"""How a model is asked to write calls whose template knows no tools."""

_THOUGHTS = (
    ThoughtMarks(open="<think>", close="</think>"),
    ThoughtMarks(open="[THINK]", close="[/THINK]"),
    ThoughtMarks(open="<seed:think>", close="</seed:think>"),
    ThoughtMarks(open="<|START_THINKING|>", close="<|END_THINKING|>"),
    ThoughtMarks(open="◁think▷", close="◁/think▷"),
    ThoughtMarks(open="<thinking>", close="</thinking>"),
    ThoughtMarks(open="<longcat_think>", close="</longcat_think>"),
    ThoughtMarks(open="<|start_think|>", close="<|end_think|>"),
    ThoughtMarks(open="<|channel>thought", close="<channel|>"),
)
_LISTED: dict[str, JsonCalls | PythonCalls] = {
    "<|tool_list_start|>": PythonCalls(begin="<|tool_call_start|>", end="<|tool_call_end|>"),
    "<|tool_call|>": JsonCalls(begin="<|tool_call|>", listed=True),
}
"""How models write calls whose templates list tools but write no calls, by a mark of the template: LFM2, Granite 3."""

_USER, _SAY, _RESULT = "kvarnuser", "kvarnsay", "kvarnresult"


class Template(Protocol):
    """What is asked of a tokenizer; see kvarn.serve.tokenizer."""

    @property
    def template(self) -> str:
        """The template's text."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        prompt: bool = True,
    ) -> str:
        """The rendered conversation; UsageError."""


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """native: the template writes tools itself; else they are described in a system message, unless `no_tools` says why
    that is not possible either. syntax: how calls are written. writes_calls: a native template does so; else they are
    put into a message's text. harmony: in the format of gpt-oss, instead.

    As the template wants them: arguments_as_text, empty: the content of a message that has but calls, calls_alone: it
    drops the calls of a message that has content too, short_ids: ids of nine letters and digits, thought_field: where a
    message's thoughts are, later_system: system messages may come after others.
    """

    native: bool = False
    no_tools: str = ""
    syntax: CallSyntax = FALLBACK
    writes_calls: bool = True
    harmony: bool = False
    arguments_as_text: bool = False
    empty: str | None = ""
    calls_alone: bool = False
    short_ids: bool = False
    thoughts: ThoughtMarks | None = None
    thought_field: str = "reasoning_content"
    later_system: bool = True

    @property
    def thinks(self) -> bool:
        """Whether the model may think before it answers."""
        return self.harmony or self.thoughts is not None

    @property
    def call_marks(self) -> tuple[str, ...]:
        """The texts between which calls stand."""
        return tuple(str(value) for value in vars(self.syntax).values() if isinstance(value, str))

    @property
    def thought_marks(self) -> tuple[str, ...]:
        """The texts between which thoughts stand; in harmony those of everything."""
        if self.harmony:
            return harmony.MARKS
        return (self.thoughts.open, self.thoughts.close) if self.thoughts is not None else ()


@dataclass(frozen=True, kw_only=True)
class _Way:
    """How the sample call is given to the template."""

    as_text: bool
    empty: str | None


_WAYS = tuple(_Way(as_text=as_text, empty=empty) for as_text in (False, True) for empty in (None, ""))


def learn(template: Template) -> ChatFormat:
    """The format of a model. Renders some twenty short samples."""
    return dataclasses.replace(_learn(template), later_system=_takes_later_system(template))


def _learn(template: Template) -> ChatFormat:
    source = template.template
    thoughts = next((marks for marks in _THOUGHTS if marks.open in source or marks.close in source), None)
    fields = ("reasoning_content", "thinking", "reasoning")
    thought_field = next((name for name in fields if re.search(rf"[.'\"]{name}\b", source)), fields[0])
    if "<|channel|>" in source and "<|message|>" in source:
        return ChatFormat(native=True, harmony=True, empty="", thought_field=thought_field)
    if NAMES[0] in (_render(template, _user(), tools=[sample_tool(NAMES[0])]) or ""):
        for way in _WAYS:
            syntax = _syntax(template, way)
            if syntax is not None:
                return ChatFormat(
                    native=True,
                    syntax=syntax,
                    arguments_as_text=way.as_text,
                    empty=way.empty,
                    calls_alone=NAMES[0] not in (_turn(template, way, 1, _SAY) or ""),
                    short_ids=not _takes_long_ids(template, way),
                    thoughts=thoughts,
                    thought_field=thought_field,
                )
        known = next((syntax for mark, syntax in _LISTED.items() if mark in source), None)
        if known is not None and _takes_results(template):
            return ChatFormat(
                native=True, writes_calls=False, syntax=known, thoughts=thoughts, thought_field=thought_field
            )
    return ChatFormat(no_tools=_no_fallback(template), thoughts=thoughts, thought_field=thought_field)


def sample_tool(name: str) -> dict[str, Any]:
    """A tool as templates get it."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "A."}}, "required": ["a"]}
    return {"type": "function", "function": {"name": name, "description": "Does.", "parameters": parameters}}


def _user() -> list[dict[str, Any]]:
    return [{"role": "user", "content": _USER}]


def _render(template: Template, messages: Sequence[Mapping[str, Any]], **options: Any) -> str | None:
    try:
        return template.render(messages, **options)
    except UsageError:
        return None


def _takes_later_system(template: Template) -> bool:
    answer = {"role": "assistant", "content": "kvarnanswer"}
    late = {"role": "system", "content": _SAY}
    return _SAY in (_render(template, [*_user(), answer, *_user(), late]) or "")


def _no_fallback(template: Template) -> str:
    """Why tools cannot be described to this model; empty if they can."""
    system = {"role": "system", "content": _SAY}
    try:
        text = template.render([system, *_user()])
    except UsageError as error:
        return f"its chat template knows no tools and takes no system message that could list them ({error})"
    return "" if _SAY in text else "its chat template knows no tools and drops system messages, which could list them"


def _calls(way: _Way, count: int, ids: Sequence[str] = IDS) -> list[dict[str, Any]]:
    arguments: Any = dict(zip(KEYS, VALUES, strict=True))
    if way.as_text:
        arguments = json.dumps(arguments)
    return [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name in zip(ids[:count], NAMES, strict=False)
    ]


def _turn(template: Template, way: _Way, count: int, content: str | None) -> str | None:
    """A conversation that ends with calls."""
    message = {"role": "assistant", "content": content, "tool_calls": _calls(way, count)}
    return _render(template, [*_user(), message], prompt=False)


def _takes_results(template: Template) -> bool:
    """Whether the template writes results after calls that stand in a message's text."""
    result = {"role": "tool", "content": _RESULT, "tool_call_id": IDS[0], "name": NAMES[0]}
    messages = [*_user(), {"role": "assistant", "content": _SAY}, result]
    text = _render(template, messages, tools=[sample_tool(NAMES[0])]) or ""
    return _SAY in text and _RESULT in text


def _takes_long_ids(template: Template, way: _Way) -> bool:
    ids = [f"call_{'0123456789' * 2}abcd"]
    message = {"role": "assistant", "content": way.empty, "tool_calls": _calls(way, 1, ids)}
    return _render(template, [*_user(), message]) is not None


def _syntax(template: Template, way: _Way) -> CallSyntax | None:
    """How the template writes a call that it is given this way; None if it does not, or not in a known form."""
    plain = _render(template, [*_user(), {"role": "assistant", "content": _SAY}], prompt=False)
    one = _turn(template, way, 1, way.empty)
    if plain is None or one is None or _SAY not in plain:
        return None
    end = plain.rpartition(_SAY)[2]
    region = _without_thought(_region(one, plain, end))
    result = {"role": "tool", "content": _RESULT, "tool_call_id": IDS[0], "name": NAMES[0]}
    message = {"role": "assistant", "content": way.empty, "tool_calls": _calls(way, 1)}
    if not all(word in region for word in (NAMES[0], *KEYS, *VALUES)) or "None" in region:
        return None
    if _RESULT not in (_render(template, [*_user(), message, result]) or ""):
        return None
    said = _turn(template, way, 1, _SAY) or ""
    after = said.rpartition(_SAY)[2] if _SAY in said else ""
    lead = after[: len(after) - len(after.lstrip())]
    two = _turn(template, way, 2, way.empty)
    both = _without_thought(_region(two, plain, end)) if two is not None else region
    if NAMES[1] not in both:
        both = region
    return shape(region, both, lead, python_tag="<|python_tag|>" in template.template)


def _region(rendered: str, plain: str, end: str) -> str:
    """The calls alone: without the text before them, and without the end of the turn."""
    same = next((i for i, (a, b) in enumerate(zip(rendered, plain, strict=False)) if a != b), 0)
    for chunk in CHUNK.finditer(rendered):
        if chunk.start() < same < chunk.end() and chunk[0][0] == "<":
            same = chunk.start()  # another tag that begins alike
    own, tail = CHUNK.findall(rendered[same:]), CHUNK.findall(end)
    left = len(own)
    while tail and left:
        if own[left - 1].isspace():
            left -= 1
        elif tail[-1].isspace():
            tail.pop()
        elif own[left - 1] == tail.pop():
            left -= 1
        else:
            break
    return "".join(own[:left])


def _without_thought(text: str) -> str:
    """A text without the empty thought that stands before its calls."""
    for marks in _THOUGHTS:
        before, opened, after = text.partition(marks.open)
        inner, closed, rest = after.partition(marks.close)
        if opened and closed and not (before + inner).strip():
            return rest.lstrip()
    return text
