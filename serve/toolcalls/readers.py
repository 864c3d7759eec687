"""Readers of calls, one for each family of formats. Each begins at the first mark of a call, and ends after its last.

A reader raises Mismatch where the text is no call after all; what it has read since the last call is text then.
"""

import ast
import json
from collections.abc import Mapping
from typing import Any

from kvarn.serve.toolcalls.calls import MAX_NAME, Calls
from kvarn.serve.toolcalls.python_calls import read_python
from kvarn.serve.toolcalls.quoted_calls import read_quoted
from kvarn.serve.toolcalls.scan import Mismatch, Reading, Source, after_space, close, drop_half
from kvarn.serve.toolcalls.syntax import CallSyntax, JsonCalls, NamedCalls, PythonCalls, QuotedCalls, TaggedCalls


def read_calls(source: Source, calls: Calls, syntax: CallSyntax, *, bare: bool = False) -> Reading[None]:
    """Read the calls that begin here. bare: without their first mark, and only of functions that are known."""
    match syntax:
        case JsonCalls():
            return read_json(source, calls, syntax, bare=bare)
        case NamedCalls():
            return read_named(source, calls, syntax)
        case TaggedCalls():
            return read_tagged(source, calls, syntax)
        case QuotedCalls():
            return read_quoted(source, calls, syntax)
        case PythonCalls():
            return read_python(source, calls, syntax, bare=bare)


# JSON objects.


def read_json(source: Source, calls: Calls, syntax: JsonCalls, *, bare: bool) -> Reading[None]:
    """One object, or a list of them."""
    if not bare:
        yield from source.expect(syntax.begin)
    yield from source.skip_space()
    in_list = yield from source.accept("[")
    while True:
        yield from source.skip_space()
        yield from _read_object(source, calls, syntax, bare=bare)
        source.forget()
        if not (yield from after_space(source, "," if in_list else ";")):
            break
    if in_list:
        yield from close(source, "]")
    if syntax.end:
        yield from close(source, syntax.end)
    source.forget()


def _read_object(source: Source, calls: Calls, syntax: JsonCalls, *, bare: bool) -> Reading[None]:
    yield from source.expect("{")
    count = calls.count
    try:
        yield from _read_fields(source, calls, syntax, bare)
    except Mismatch:
        if calls.count == count or not source.ended:
            raise
        source.at = len(source.text)  # cut after the arguments


def _read_fields(source: Source, calls: Calls, syntax: JsonCalls, bare: bool) -> Reading[None]:
    name, arguments, started = None, "{}", False
    while True:
        yield from source.skip_space()
        key = _decoded((yield from source.string()))
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        if key == syntax.name:
            name = _decoded((yield from source.string()))
        elif key in (syntax.arguments, "arguments", "parameters"):
            if name is None:
                arguments = yield from source.skim()
            elif not started:
                _start(calls, name, bare)
                started = True
                source.forget()
                yield from _read_arguments(source, calls, syntax.end.strip())
            else:
                yield from source.skim()
        else:
            yield from source.skim()
        if not (yield from after_space(source, ",")):
            break
    closed = yield from after_space(source, "}")
    if not started:
        if name is None or not closed:
            raise Mismatch
        _start(calls, name, bare)
        calls.arguments(_spelled(arguments))


def _start(calls: Calls, name: str, bare: bool) -> None:
    if bare and name not in calls.functions:
        raise Mismatch
    calls.start(name)


def _read_arguments(source: Source, calls: Calls, end: str) -> Reading[None]:
    """The value of `arguments` as it comes; what is neither an object nor a list, when it is whole."""
    if (yield from source.peek()) in ("{", "["):
        yield from source.value(end, calls.arguments)
        return
    try:
        calls.arguments(_spelled((yield from source.skim())))
    except Mismatch:  # cut in the middle
        calls.arguments(source.text)
        source.at = len(source.text)


def _spelled(value: str) -> str:
    """Some models write an object as a string that holds its JSON, or null for none."""
    if value == "null":
        return "{}"
    if value.startswith('"'):
        inner = _decoded(value)
        if inner.lstrip().startswith("{"):
            return inner
    return value


def _decoded(string: str) -> str:
    try:
        return str(json.loads(string, strict=False))
    except ValueError:
        raise Mismatch from None


# A name, then JSON.


def read_named(source: Source, calls: Calls, syntax: NamedCalls) -> Reading[None]:
    """Calls in a row."""
    if syntax.wrap and (yield from source.accept(syntax.wrap)):
        yield from source.skip_space()
    yield from source.expect(syntax.open)
    while True:
        name = yield from _read_name(source, (syntax.separator, syntax.id_end), "{")
        calls.start(name)
        yield from source.skip_space()
        source.forget()
        if (yield from source.peek()) == "{":
            yield from source.value(syntax.close, calls.arguments)
        elif (yield from source.need()):
            calls.arguments("{}")
        if syntax.close:
            yield from close(source, syntax.close)
        source.forget()
        if not (yield from after_space(source, syntax.open)):
            break
    if syntax.unwrap:
        yield from close(source, syntax.unwrap)
    source.forget()


def _read_name(source: Source, ends: tuple[str, ...], stop: str) -> Reading[str]:
    """A name up to one of the marks `ends`, which is read; where these are but space, up to `stop`, which is not.

    With two marks an id may stand between them.
    """
    marks = [end for end in ends if end.strip()]
    start = source.at
    while True:
        for i, mark in enumerate(marks):
            before = source.at
            if (yield from source.accept(mark)):
                name = source.text[start:before]
                while i + 1 < len(marks) and not (yield from source.accept(marks[i + 1])):
                    if not (yield from source.peek()) or source.at - before > MAX_NAME:
                        raise Mismatch
                    source.at += 1
                return name.strip()
        char = yield from source.peek()
        if not char or source.at - start > MAX_NAME or (marks and char in "{}\n"):
            raise Mismatch
        if char in stop and not marks:
            return source.text[start : source.at].strip()
        source.at += 1


# A name, then arguments in tags.


def read_tagged(source: Source, calls: Calls, syntax: TaggedCalls) -> Reading[None]:
    """Calls in a row."""
    if syntax.wrap and (yield from source.accept(syntax.wrap)):
        yield from source.skip_space()
    yield from source.expect(syntax.open)
    while True:
        name = yield from _read_name(source, (syntax.name_end,), syntax.close[0] + syntax.key_open.strip()[0])
        calls.start(name)
        source.forget()
        yield from _read_tags(source, calls, syntax, calls.functions.get(name, {}))
        source.forget()
        if not (yield from after_space(source, syntax.open)):
            break
    if syntax.unwrap:
        yield from close(source, syntax.unwrap)
    source.forget()


def _read_tags(source: Source, calls: Calls, syntax: TaggedCalls, schema: Mapping[str, Any]) -> Reading[None]:
    before = "{"
    while (yield from after_space(source, syntax.key_open)):
        key = yield from _read_key(source, syntax.key_end.strip())
        if key is None:
            return
        calls.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        types = _types(schema, key)
        if syntax.typed:
            types = yield from _read_type(source, types)
        if not (yield from _read_value(source, calls, syntax, types)):
            return
    yield from source.skip_space()
    if (yield from source.accept(syntax.close)) or not drop_half(source, syntax.close, syntax.key_open):
        calls.arguments("{}" if before == "{" else "}")


def _read_key(source: Source, end: str) -> Reading[str | None]:
    start = source.at
    while not (yield from source.accept(end)):
        if not (yield from source.peek()):
            return None
        source.at += 1
    return source.text[start : source.at].removesuffix(end).strip()


def _read_type(source: Source, types: frozenset[str]) -> Reading[frozenset[str]]:
    """The rest of a key's tag, which says whether the value is a string."""
    start = source.at
    while not (yield from source.accept(">")) and (yield from source.peek()):
        source.at += 1
    said = source.text[start : source.at]
    return frozenset({"string"}) if "true" in said else types - {"string"} if "false" in said else types


def _read_value(source: Source, calls: Calls, syntax: TaggedCalls, types: frozenset[str]) -> Reading[bool]:
    """One value; a string as it comes. False if the text ended in it."""
    mark = syntax.value_end.strip()
    if syntax.key_end.endswith("\n"):
        yield from source.need()
        source.at += source.rest.startswith("\n")
    marks = ("\n" + mark, mark) if syntax.value_end.startswith("\n") else (mark,)
    if types == {"string"}:
        calls.arguments('"')
        found = yield from source.until(marks, lambda text: calls.arguments(_escaped(text)))
        calls.arguments('"' if found else "")
        return bool(found)
    pieces: list[str] = []
    found = yield from source.until(marks, pieces.append)
    value = "".join(pieces)
    calls.arguments(_typed(value, types) if found else value.strip())
    return bool(found)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that an argument may have; none where the schema does not say."""
    properties = schema.get("properties")
    own = properties.get(key) if isinstance(properties, Mapping) else None
    kinds: set[str] = set()
    pending = [own]
    while pending:
        part = pending.pop()
        if not isinstance(part, Mapping):
            return frozenset()
        kind, options = part.get("type"), part.get("anyOf", part.get("oneOf"))
        if isinstance(kind, str):
            kinds.add(kind)
        elif isinstance(kind, list):
            kinds.update(str(x) for x in kind)
        elif isinstance(options, list):
            pending += options
        elif isinstance(part.get("enum"), list) and all(isinstance(x, str) for x in part["enum"]):
            kinds.add("string")
        else:
            return frozenset()
    return frozenset(kinds)


_TYPE_NAMES: dict[type, set[str]] = {
    dict: {"object"},
    list: {"array"},
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
}


def _typed(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that stands in tags: itself where it is JSON of a type that fits, else a string."""
    bare = text.strip()
    bare = {"True": "true", "False": "false", "None": "null"}.get(bare, bare)
    try:
        value = json.loads(bare)
    except ValueError:
        value = _python_value(bare) if types & {"object", "array"} else text
        bare = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str) and (not types or _TYPE_NAMES[type(value)] & types):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _python_value(text: str) -> Any:
    """A list or dict in Python's spelling, as some templates write them; the text itself if it is none."""
    try:
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return value if isinstance(value, list | dict) else text
