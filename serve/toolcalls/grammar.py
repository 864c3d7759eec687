"""Grammars of calls and thoughts, in Lark: what an answer may be that has to call a function, or may not."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from kvarn.errors import UsageError
from kvarn.serve.schemas import check_schema
from kvarn.serve.structured import json_rule, literal, special
from kvarn.serve.toolcalls.syntax import (
    CallSyntax,
    JsonCalls,
    NamedCalls,
    PythonCalls,
    QuotedCalls,
    TaggedCalls,
    ThoughtMarks,
    triggers,
)

T = TypeVar("T")

_SPACE = "/[ \\n]{0,2}/"
_ANYTHING = "/(?s:.*)/"


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A function that may be called. parameters: the JSON schema of its arguments. strict: they have to fit."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True, kw_only=True)
class Marks:
    """How marks are written in a grammar: control tokens by their ids, which are `special`, the rest as text."""

    special: Mapping[str, int]

    def word(self, text: str) -> str:
        """A Lark expression for a text; empty for none."""
        parts, rest = [], text
        while rest:
            found = min(
                ((rest.find(name), -len(name)) for name in self.special if name in rest), default=(len(rest), 0)
            )
            place, length = found[0], -found[1]
            if place:
                parts.append(literal(rest[:place]))
            if length:
                parts.append(special(self.special[rest[place : place + length]]))
            rest = rest[place + length :]
        return " ".join(parts)

    def until(self, rule: str, mark: str) -> str:
        """A rule for any text up to a mark, and the mark."""
        name = next((name for name in self.special if mark.startswith(name)), None)
        if name is None:
            return f"{rule}[suffix={literal(mark)}]: {_ANYTHING}\n"
        return f"{rule}: {_ANYTHING} {self.word(mark)}\n"


def thought(thoughts: ThoughtMarks, marks: Marks, *, opened: bool) -> str:
    """A thought, from its beginning or from within."""
    begin = "" if opened else marks.word(thoughts.open) + " "
    return f"start: {begin}inner /\\n{{0,2}}/\n" + marks.until("inner", thoughts.close)


def no_calls(syntax: CallSyntax, marks: Marks) -> str | None:
    """Any text that begins no call; None where a call begins with no mark of its own."""
    if isinstance(syntax, JsonCalls | PythonCalls) and syntax.bare:
        return None
    words = [word for word in triggers(syntax) if not any(name in word for name in marks.special)]
    return (
        "start: TEXT\nTEXT: "
        + " & ".join([_ANYTHING, *(f"~/(?s:.*){_escaped(word)}(?s:.*)/" for word in words)])
        + "\n"
    )


def _escaped(word: str) -> str:
    return "".join(c if c.isalnum() or not c.isascii() else f"\\x{ord(c):02x}" for c in word)


def calls(syntax: CallSyntax, functions: Sequence[Signature], marks: Marks, *, several: bool) -> str:
    """One call of one of the functions, or with `several` one or more; UsageError for a schema that cannot be met."""
    return _rules(syntax, functions, marks, several).text("start: calls", marks)


def text_or_calls(syntax: CallSyntax, functions: Sequence[Signature], marks: Marks, *, several: bool) -> str:
    """Any text, which may end with calls: these fit. UsageError as for `calls`."""
    rules = _rules(syntax, functions, marks, several)
    if isinstance(syntax, JsonCalls | PythonCalls) and syntax.bare:
        return rules.text("start: calls | OTHER?\nOTHER: /[^\\[{\\s](?s:.*)/", marks)
    word = rules.mark.split()[0]
    head = marks.until("head", word)
    begin = f"{marks.word(rules.mark.removeprefix(word))} {rules.begin}"
    return rules.text(f"start: TEXT | head {begin} {rules.rest}\nTEXT: {_ANYTHING}\n{head}", marks)


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """The calls of one answer are the text `mark`, then `begin rest`; below are the rules that these name."""

    mark: str
    begin: str
    rest: str
    below: str

    def text(self, start: str, marks: Marks) -> str:
        return f"{start}\ncalls: {marks.word(self.mark)} {self.begin} {self.rest}\n{self.below}"


def _rules(syntax: CallSyntax, functions: Sequence[Signature], marks: Marks, several: bool) -> _Rules:
    made = {JsonCalls: _json, NamedCalls: _named, TaggedCalls: _tagged, QuotedCalls: _quoted, PythonCalls: _python}[
        type(syntax)
    ]
    rules: _Rules = made(syntax, functions, marks, several)  # type: ignore[operator]
    return rules


def _one_of(name: str, bodies: Sequence[str]) -> str:
    return (
        f"{name}: "
        + " | ".join(f"{name}{i}" for i in range(len(bodies)))
        + "\n"
        + "".join(f"{name}{i}: {body}\n" for i, body in enumerate(bodies))
    )


def _arguments(functions: Sequence[Signature]) -> str:
    return "".join(f"args{i}: {_object_rule(function)}\n" for i, function in enumerate(functions))


def _json(syntax: JsonCalls, functions: Sequence[Signature], marks: Marks, several: bool) -> _Rules:
    bodies = []
    for i, function in enumerate(functions):
        head = f"{{{json.dumps(syntax.name)}: {json.dumps(function.name)}, {json.dumps(syntax.arguments)}: "
        bodies.append(f'{literal(head)} args{i} "}}"')
    mark, end = ("", "") if syntax.bare else (syntax.begin, marks.word(syntax.end))
    begin = ""
    if syntax.listed:
        more = '(", " one)*' if several else ""
        begin, rest = '"["', f'one {more} "]" {end}'
    else:
        again = f"({marks.word(syntax.lead)} {marks.word(mark)} one {end})*" if several and mark else ""
        rest = f"one {end} {again}"
    return _Rules(mark=mark, begin=begin, rest=rest, below=_one_of("one", bodies) + _arguments(functions))


def _named(syntax: NamedCalls, functions: Sequence[Signature], marks: Marks, several: bool) -> _Rules:
    call_id = f"/[a-zA-Z0-9]{{9}}/ {marks.word(syntax.id_end)} " if syntax.id_end else ""
    bodies = [
        f"{marks.word(f.name + syntax.separator)} {call_id}args{i} {_SPACE} {marks.word(syntax.close)}"
        for i, f in enumerate(functions)
    ]
    opening = marks.word(syntax.open)
    more = f"({_SPACE} {opening} one)*" if several else ""
    begin = f"{_SPACE} {opening}" if syntax.wrap else ""
    unwrap = f"{_SPACE} {marks.word(syntax.unwrap)}" if syntax.unwrap else ""
    below = _one_of("one", bodies) + _arguments(functions)
    return _Rules(mark=syntax.wrap or syntax.open, begin=begin, rest=f"one {more} {unwrap}", below=below)


def _tagged(syntax: TaggedCalls, functions: Sequence[Signature], marks: Marks, several: bool) -> _Rules:
    below, bodies = marks.until("free", syntax.value_end), []
    for i, f in enumerate(functions):
        fields = []
        for j, (key, required, schema) in enumerate(_fields(f)):
            kind = _kind(schema, f)
            attribute = syntax.typed
            if kind == "text":
                value = "free"
            elif kind == "other":
                value = f"{_value_rule(schema, f)} {marks.word(syntax.value_end)}"
                attribute = attribute.replace("true", "false")
            else:
                value = f"{_choices(kind)} {marks.word(syntax.value_end)}"
            head = f"{_SPACE} {marks.word(syntax.key_open + key + syntax.key_end + attribute)}"
            below += f"field{i}x{j}: {head} {value}\n"
            fields.append(f"field{i}x{j}" + ("" if required else "?"))
        bodies.append(f"{marks.word(f.name + syntax.name_end)} {' '.join(fields)} {_SPACE} {marks.word(syntax.close)}")
    opening = marks.word(syntax.open)
    more = f"({_SPACE} {opening} one)*" if several else ""
    begin = f"{_SPACE} {opening}" if syntax.wrap else ""
    unwrap = f"{_SPACE} {marks.word(syntax.unwrap)}" if syntax.unwrap else ""
    below += _one_of("one", bodies)
    return _Rules(mark=syntax.wrap or syntax.open, begin=begin, rest=f"one {more} {unwrap}", below=below)


_TEXT_LIMITS = ("pattern", "format", "minLength", "maxLength")


def _kind(schema: Mapping[str, Any], function: Signature) -> tuple[str, ...] | Literal["text", "other"]:
    """What a value is, where strings stand without quotes: one of some strings, any string, or something else.

    UsageError where a strict function needs to know more.
    """
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(x, str) for x in choices):
        return tuple(choices)
    types = schema.get("type", ["string"])
    if "string" not in types:
        return "other"
    fault = next((f"the JSON schema's keyword {name!r}" for name in _TEXT_LIMITS if name in schema), None)
    if schema.get("type") != "string":
        fault = "a property of no type, or of several,"
    if fault is not None and function.strict:
        raise UsageError(
            f"the arguments of {function.name!r} cannot be enforced: this model writes strings without JSON's "
            f"quotes, and {fault} is not supported there; leave it out, or strict"
        )
    return "text"


def _choices(values: Sequence[str]) -> str:
    return f"({' | '.join(literal(x) for x in values)})"


def _quoted(syntax: QuotedCalls, functions: Sequence[Signature], marks: Marks, several: bool) -> _Rules:
    quote, below, bodies = marks.word(syntax.quote), marks.until("free", syntax.quote) + _QUOTED_VALUES, []
    below += f"text: {quote} free\n"
    for i, f in enumerate(functions):
        fields = []
        for j, (key, required, schema) in enumerate(sorted(_fields(f), key=lambda field: field[0].lower())):
            kind = _kind(schema, f)
            if isinstance(kind, tuple):
                value = f"{quote} {_choices(kind)} {quote}"
            elif kind == "text":
                value = "text"
            elif schema.get("type") in ("integer", "number", "boolean", "null"):
                value = _value_rule(schema, f)
            elif f.strict:
                raise UsageError(
                    f"the arguments of {f.name!r} cannot be enforced: in this model's own notation only strings, "
                    f"numbers and booleans can, and {key!r} is something else; leave out strict"
                )
            else:
                value = "value"
            below += f"field{i}x{j}: {literal(key + ':')} value{i}x{j}\nvalue{i}x{j}: {value}\n"
            fields.append((f"field{i}x{j}", required))
        bodies.append(f'{marks.word(f.name)} "{{" {_with_commas(fields, ",")} "}}" {marks.word(syntax.close)}')
    more = f"({marks.word(syntax.open)} one)*" if several else ""
    return _Rules(mark=syntax.open, begin="", rest=f"one {more}", below=below + _one_of("one", bodies))


_QUOTED_VALUES = """\
value: text | number | "true" | "false" | "null" | list | object
number: %json {"type": "number"}
list: "[" (value ("," value)*)? "]"
object: "{" (key ":" value ("," key ":" value)*)? "}"
key: /[A-Za-z_][A-Za-z0-9_-]*/
"""


def _python(syntax: PythonCalls, functions: Sequence[Signature], marks: Marks, several: bool) -> _Rules:
    below, bodies = "", []
    for i, f in enumerate(functions):
        fields = []
        for j, (key, required, schema) in enumerate(_fields(f)):
            below += f"field{i}x{j}: {literal(key + '=')} value{i}x{j}\nvalue{i}x{j}: {_value_rule(schema, f)}\n"
            fields.append((f"field{i}x{j}", required))
        bodies.append(f"{literal(f.name + '(')} {_with_commas(fields)} {literal(')')}")
    below += _one_of("one", bodies)
    commas, lines = ('(", " one)*', '("\\n" one)*') if several else ("", "")
    rest = f'"[" one {commas} "]"'
    if not syntax.bare:
        rest = f"{_SPACE} ({rest} | one {lines}) {_SPACE} {marks.word(syntax.end)}"
    return _Rules(mark=syntax.begin, begin="", rest=rest, below=below)


def _with_commas(fields: Sequence[tuple[str, bool]], comma: str = ", ") -> str:
    """Fields in order (name, required), with commas between those that are there."""
    after = ""  # what may follow a field
    choices: list[str] = []  # all that may come, by the field that it begins with
    may_be_none = True
    for name, required in reversed(fields):
        one = f"{name} {after}".strip()
        choices = [one] if required else [one, *choices]
        may_be_none = may_be_none and not required
        after = f"({literal(comma)} {name}){'' if required else '?'} {after}"
    if not choices:
        return ""
    return f"({' | '.join(choices)})" + ("?" if may_be_none else "")


# Schemas.


def _object_rule(function: Signature) -> str:
    """The arguments as one JSON object."""
    schema = dict(function.parameters) | {"type": "object"}
    simple = not {"patternProperties", "anyOf", "oneOf", "allOf", "$ref", "additionalProperties"} & set(schema)
    if "properties" in schema and simple:
        schema["additionalProperties"] = False
    return _or_anything(schema, function, {"type": "object"})


def _value_rule(schema: Mapping[str, Any], function: Signature) -> str:
    shared = {name: function.parameters[name] for name in ("$defs", "definitions") if name in function.parameters}
    return _or_anything({**shared, **schema}, function, {})


def _or_anything(schema: Mapping[str, Any], function: Signature, anything: Mapping[str, Any]) -> str:
    """A schema's rule. One that is not understood binds nothing, unless the function is strict."""
    if function.strict:
        return _or_refused(json_rule, schema, function)
    try:
        return json_rule(schema)
    except UsageError:
        return json_rule(anything)


def _or_refused(use: Callable[[Mapping[str, Any]], T], schema: Mapping[str, Any], function: Signature) -> T:
    try:
        return use(schema)
    except UsageError as error:
        raise UsageError(f"the arguments of {function.name!r} cannot be enforced: {error}") from error


_OF_FIELDS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
"""Keywords of a schema of arguments that mean the same where these are written one by one."""


def _fields(function: Signature) -> list[tuple[str, bool, Mapping[str, Any]]]:
    """The arguments one by one: (name, required, schema). UsageError where a strict function says more than these."""
    schema = function.parameters
    if function.strict:
        more = sorted(set(_or_refused(check_schema, schema, function)) - _OF_FIELDS)
        if more:
            raise UsageError(
                f"the arguments of {function.name!r} cannot be enforced: this model writes them one by one, and the "
                f"JSON schema's keyword {more[0]!r} is not supported there; leave it out, or strict"
            )
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return []
    names = required if isinstance(required, list) else []
    return [(key, key in names, x if isinstance(x, Mapping) else {}) for key, x in properties.items()]
