"""What a model's chat template can do with tools and thoughts, learned by rendering samples with it."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvarn.errors import UsageError
from kvarn.serve.toolcalls import harmony
from kvarn.serve.toolcalls.syntax import (
    CallSyntax,
    JsonCalls,
    NamedCalls,
    PythonCalls,
    QuotedCalls,
    TaggedCalls,
    ThoughtMarks,
)

FALLBACK = JsonCalls(begin="<tool_call>\n", end="\n</tool_call>", lead="\n")
"""How a model is asked to write calls whose template knows no tools."""

_THOUGHTS = (
    ThoughtMarks(open="<think>", close="</think>"),
    ThoughtMarks(open="[THINK]", close="[/THINK]"),
    ThoughtMarks(open="<seed:think>", close="</seed:think>"),
    ThoughtMarks(open="<|START_THINKING|>", close="<|END_THINKING|>"),
    ThoughtMarks(open="◁think▷", close="◁/think▷"),
    ThoughtMarks(open="<thinking>", close="</thinking>"),
)
_USER, _SAY, _RESULT = "kvarnuser", "kvarnsay", "kvarnresult"
_NAMES, _KEYS, _VALUES = ("kvarnfa", "kvarnfb"), ("kvarnka", "kvarnkb"), ("kvarnva", "kvarnvb")
_PAIRS = tuple(zip(_KEYS, _VALUES, strict=True))
_IDS = ("kvarnida0", "kvarnidb0")  # nine letters and digits, which every template takes
_CHUNK = re.compile(r"<[^<>]*>?|\[[^\[\]]*\]?|\s+|[^<\[\s]+")


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
    that is not possible either. syntax: how calls are written. harmony: in the format of gpt-oss, instead.

    As the template wants them: arguments_as_text, empty: the content of a message that has but calls, calls_alone: it
    drops the calls of a message that has content too, short_ids: ids of nine letters and digits, thought_field: where a
    message's thoughts are, later_system: system messages may come after others.
    """

    native: bool = False
    no_tools: str = ""
    syntax: CallSyntax = FALLBACK
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
    if _NAMES[0] in (_render(template, _user(), tools=[sample_tool(_NAMES[0])]) or ""):
        for way in _WAYS:
            syntax = _syntax(template, way)
            if syntax is not None:
                return ChatFormat(
                    native=True,
                    syntax=syntax,
                    arguments_as_text=way.as_text,
                    empty=way.empty,
                    calls_alone=_NAMES[0] not in (_turn(template, way, 1, _SAY) or ""),
                    short_ids=not _takes_long_ids(template, way),
                    thoughts=thoughts,
                    thought_field=thought_field,
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


def _calls(way: _Way, count: int, ids: Sequence[str] = _IDS) -> list[dict[str, Any]]:
    arguments: Any = dict(zip(_KEYS, _VALUES, strict=True))
    if way.as_text:
        arguments = json.dumps(arguments)
    return [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name in zip(ids[:count], _NAMES, strict=False)
    ]


def _turn(template: Template, way: _Way, count: int, content: str | None) -> str | None:
    """A conversation that ends with calls."""
    message = {"role": "assistant", "content": content, "tool_calls": _calls(way, count)}
    return _render(template, [*_user(), message], prompt=False)


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
    region = _region(one, plain, end)
    result = {"role": "tool", "content": _RESULT, "tool_call_id": _IDS[0], "name": _NAMES[0]}
    message = {"role": "assistant", "content": way.empty, "tool_calls": _calls(way, 1)}
    if not all(word in region for word in (_NAMES[0], *_KEYS, *_VALUES)) or "None" in region:
        return None
    if _RESULT not in (_render(template, [*_user(), message, result]) or ""):
        return None
    said = _turn(template, way, 1, _SAY) or ""
    after = said.rpartition(_SAY)[2] if _SAY in said else ""
    lead = after[: len(after) - len(after.lstrip())]
    two = _turn(template, way, 2, way.empty)
    both = _region(two, plain, end) if two is not None else region
    if _NAMES[1] not in both:
        both = region
    return (
        _json(region, lead, template.template)
        or _quoted(region, lead)
        or _python(region, lead)
        or _named(both, lead)
        or _tagged(both, lead)
    )


def _region(rendered: str, plain: str, end: str) -> str:
    """The calls alone: without the text before them, and without the end of the turn."""
    same = next((i for i, (a, b) in enumerate(zip(rendered, plain, strict=False)) if a != b), 0)
    for chunk in _CHUNK.finditer(rendered):
        if chunk.start() < same < chunk.end() and chunk[0][0] == "<":
            same = chunk.start()  # another tag that begins alike
    own, tail = _CHUNK.findall(rendered[same:]), _CHUNK.findall(end)
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


def _objects(text: str) -> list[tuple[int, int, dict[str, Any]]]:
    """The JSON objects of a text, outer and inner ones: (start, end, object)."""
    found, decoder = [], json.JSONDecoder()
    for match in re.finditer(r"\{", text):
        try:
            value, end = decoder.raw_decode(text, match.start())
        except ValueError:
            continue
        found.append((match.start(), end, value))
    return found


def _json(region: str, lead: str, source: str) -> CallSyntax | None:
    for start, end, value in _objects(region):
        name = next((key for key, x in value.items() if x == _NAMES[0]), None)
        arguments = next((key for key, x in value.items() if _KEYS[0] in str(x) and _VALUES[0] in str(x)), None)
        if name is None or arguments is None or "{" in region[:start]:
            continue
        if isinstance(value[arguments], str) and '\\"' in region:
            return None  # given as text, and written as JSON once more; another way is right
        listed = region[:start].rstrip().endswith("[")
        begin = region[:start].rstrip().removesuffix("[") if listed else region[:start]
        close = region[end:].rstrip()
        close = close.lstrip().removeprefix("]") if listed else close
        bare = not begin.strip()
        if bare:
            begin = "<|python_tag|>" if "<|python_tag|>" in source else ""
        return JsonCalls(
            begin=begin.lstrip(), end=close, lead=lead, bare=bare, listed=listed, name=name, arguments=arguments
        )
    return None


def _quoted(region: str, lead: str) -> CallSyntax | None:
    quoted = "".join(rf",?\s*{key}:(?P<q{i}><[^<>]+>){value}(?P=q{i})" for i, (key, value) in enumerate(_PAIRS))
    found = re.fullmatch(rf"\s*(\S.*?){_NAMES[0]}\s*\{{{quoted}\s*\}}(<[^<>]+>).*", region, re.DOTALL)
    if found is None:
        return None
    return QuotedCalls(open=found[1], quote=found["q0"], close=found[4], lead=lead)


def _python(region: str, lead: str) -> CallSyntax | None:
    found = re.search(rf"(\[?)\s*{_NAMES[0]}\({_KEYS[0]}\s*=\s*['\"]{_VALUES[0]}['\"].*?\)(\s*\]?)", region, re.DOTALL)
    if found is None:
        return None
    begin, end = region[: found.start()].strip(), region[found.end() :].strip()
    return PythonCalls(begin=begin, end=end, lead=lead, bare=not begin and bool(found[1]))


def _named(region: str, lead: str) -> CallSyntax | None:
    spans = [(start, end) for start, end, value in _objects(region) if _KEYS[0] in value]
    places = [region.find(name) for name in _NAMES if name in region]
    if not spans or len(spans) != len(places) or places[0] > spans[0][0]:
        return None
    prefix, suffix = region[: places[0]], region[spans[-1][1] :]
    separator = region[places[0] + len(_NAMES[0]) : spans[0][0]]
    if any(call_id in prefix for call_id in _IDS):
        return None
    separator, _, id_end = separator.partition(_IDS[0])
    between = region[spans[0][1] : places[1]] if len(places) > 1 else None
    wrap, opening, close, unwrap = _frame(prefix, between, suffix)
    if not opening.strip() or separator.rstrip().endswith("{"):
        return None
    return NamedCalls(
        wrap=wrap, open=opening, separator=separator, id_end=id_end, close=close, unwrap=unwrap, lead=lead
    )


def _tagged(region: str, lead: str) -> CallSyntax | None:
    words = [_NAMES[0], _KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1]]
    places = [region.find(word) for word in words]
    if -1 in places or places != sorted(places) or "'" in region:
        return None
    ends = [place + len(word) for place, word in zip(places, words, strict=True)]
    head, key_end, middle = (region[ends[i] : places[i + 1]] for i in (0, 1, 2))
    second = region.find(_NAMES[1])
    rest = region[ends[4] :] if second < 0 else region[region.rfind(_VALUES[1]) + len(_VALUES[1]) :]
    key_open = _common_end(head, middle)
    value_end = _common_start(middle, rest)
    name_end = head[: len(head) - len(key_open)]
    if not key_open.strip() or not value_end.strip() or not key_end.strip():
        return None
    quote, _, attribute = key_end.partition(" ")
    typed = f" {attribute}" if quote in ('"', "'") and attribute.endswith(f"{quote}true{quote}>") else ""
    between = region[ends[4] : second].removeprefix(value_end) if second >= 0 else None
    wrap, opening, close, unwrap = _frame(region[: places[0]], between, rest.removeprefix(value_end))
    if not opening.strip() or not close.strip():
        return None
    return TaggedCalls(
        wrap=wrap,
        open=opening,
        name_end=name_end,
        key_open=key_open.strip(),
        key_end=quote if typed else key_end,
        value_end=value_end.rstrip(),
        close=close.strip(),
        unwrap=unwrap,
        lead=lead,
        typed=typed,
    )


def _frame(prefix: str, between: str | None, suffix: str) -> tuple[str, str, str, str]:
    """What stands before the first, before each, after each, and after the last of some calls."""
    if between is None:
        return "", prefix.strip(), suffix.strip(), ""
    opening = _common_end(prefix, between)
    close = _common_start(between.removesuffix(opening), suffix)
    return (
        prefix.removesuffix(opening).strip(),
        opening.strip(),
        close.strip(),
        suffix.removeprefix(close).strip(),
    )


def _common_start(one: str, other: str) -> str:
    """The longest common beginning in whole words and tags."""
    common = ""
    for a, b in zip(_CHUNK.findall(one), _CHUNK.findall(other), strict=False):
        if a != b:
            break
        common += a
    return common


def _common_end(one: str, other: str) -> str:
    """The longest common end in whole words and tags."""
    common = ""
    for a, b in zip(reversed(_CHUNK.findall(one)), reversed(_CHUNK.findall(other)), strict=False):
        if a != b:
            break
        common = a + common
    return common
