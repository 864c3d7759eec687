"""The syntax of calls, from how a chat template has written a sample call."""

import json
import re
from typing import Any

from kvarn.serve.http.parts import Collected
from kvarn.serve.toolcalls.answers import AnswerReader
from kvarn.serve.toolcalls.syntax import CallSyntax, JsonCalls, NamedCalls, PythonCalls, QuotedCalls, TaggedCalls

NAMES, KEYS, VALUES = ("kvarnfa", "kvarnfb"), ("kvarnka", "kvarnkb"), ("kvarnva", "kvarnvb")
PAIRS = tuple(zip(KEYS, VALUES, strict=True))
IDS = ("kvarnida0", "kvarnidb0")  # nine letters and digits, which every template takes
"""The words of the sample calls: two functions with two arguments each."""

CHUNK = re.compile(r"<[^<>]*>?|\[[^\[\]]*\]?|\s+|[^<\[\s]+")
"""A tag, white space, or a word."""


def shape(region: str, both: str, lead: str, *, python_tag: bool) -> CallSyntax | None:
    """The syntax of calls; None if it is not one of those that are known.

    region: the call of the first function as the template wrote it. both: the calls of both, or `region` again where it
    takes but one. lead: the space between a text and its first call. python_tag: the template knows Llama's mark.
    """
    syntax = (
        _json(region, lead, python_tag)
        or _quoted(region, lead)
        or _python(region, lead)
        or _named(both, lead)
        or _tagged(both, lead)
    )
    return syntax if syntax is not None and _reads_back(syntax, region) else None


def _reads_back(syntax: CallSyntax, region: str) -> bool:
    """Whether the sample call is found where the template wrote it."""
    reader = AnswerReader(syntax=syntax, functions={name: {} for name in NAMES}, new_id=lambda: "")
    found = Collected()
    for part in reader.add(region) + reader.finish():
        found.add(part)
    calls = [(call.name, call.arguments) for call in found.calls]
    try:
        return [(name, json.loads(text)) for name, text in calls] == [(NAMES[0], dict(PAIRS))]
    except ValueError:
        return False


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


def _json(region: str, lead: str, python_tag: bool) -> CallSyntax | None:
    for start, end, value in _objects(region):
        name = next((key for key, x in value.items() if x == NAMES[0]), None)
        arguments = next((key for key, x in value.items() if KEYS[0] in str(x) and VALUES[0] in str(x)), None)
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
            begin = "<|python_tag|>" if python_tag else ""
        return JsonCalls(
            begin=begin.lstrip(), end=close, lead=lead, bare=bare, listed=listed, name=name, arguments=arguments
        )
    return None


def _quoted(region: str, lead: str) -> CallSyntax | None:
    quoted = "".join(rf",?\s*{key}:(?P<q{i}><[^<>]+>){value}(?P=q{i})" for i, (key, value) in enumerate(PAIRS))
    found = re.fullmatch(rf"\s*(\S.*?){NAMES[0]}\s*\{{{quoted}\s*\}}(<[^<>]+>).*", region, re.DOTALL)
    if found is None:
        return None
    return QuotedCalls(open=found[1], quote=found["q0"], close=found[4], lead=lead)


def _python(region: str, lead: str) -> CallSyntax | None:
    found = re.search(rf"(\[?)\s*{NAMES[0]}\({KEYS[0]}\s*=\s*['\"]{VALUES[0]}['\"].*?\)(\s*\]?)", region, re.DOTALL)
    if found is None:
        return None
    begin, end = region[: found.start()].strip(), region[found.end() :].strip()
    return PythonCalls(begin=begin, end=end, lead=lead, bare=not begin and bool(found[1]))


def _named(region: str, lead: str) -> CallSyntax | None:
    spans = [(start, end) for start, end, value in _objects(region) if KEYS[0] in value]
    places = [region.find(name) for name in NAMES if name in region]
    if not spans or len(spans) != len(places) or places[0] > spans[0][0]:
        return None
    prefix, suffix = region[: places[0]], region[spans[-1][1] :]
    separator = region[places[0] + len(NAMES[0]) : spans[0][0]]
    if any(call_id in prefix for call_id in IDS):
        return None
    separator, _, id_end = separator.partition(IDS[0])
    between = region[spans[0][1] : places[1]] if len(places) > 1 else None
    wrap, opening, close, unwrap = _frame(prefix, between, suffix)
    if not opening.strip() or separator.rstrip()[-1:] in tuple("{\"'"):
        return None  # a text was given, and written as one
    return NamedCalls(
        wrap=wrap, open=opening, separator=separator, id_end=id_end, close=close, unwrap=unwrap, lead=lead
    )


def _tagged(region: str, lead: str) -> CallSyntax | None:
    words = [NAMES[0], KEYS[0], VALUES[0], KEYS[1], VALUES[1]]
    places = [region.find(word) for word in words]
    if -1 in places or places != sorted(places) or "'" in region:
        return None
    ends = [place + len(word) for place, word in zip(places, words, strict=True)]
    head, key_end, middle = (region[ends[i] : places[i + 1]] for i in (0, 1, 2))
    second = region.find(NAMES[1])
    rest = region[ends[4] :] if second < 0 else region[region.rfind(VALUES[1]) + len(VALUES[1]) :]
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
    for a, b in zip(CHUNK.findall(one), CHUNK.findall(other), strict=False):
        if a != b:
            break
        common += a
    return common


def _common_end(one: str, other: str) -> str:
    """The longest common end in whole words and tags."""
    common = ""
    for a, b in zip(reversed(CHUNK.findall(one)), reversed(CHUNK.findall(other)), strict=False):
        if a != b:
            break
        common = a + common
    return common
