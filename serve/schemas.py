"""JSON schemas of requests: every keyword is enforced, says nothing about the value, or is refused by name."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvarn.errors import UsageError
from kvarn.serve.schema_formats import ANYTHING, FORMATS, narrower

MAX_SCHEMA_BYTES = 1 << 20
MAX_SUBSCHEMAS = 5000
MAX_MULTIPLE = 10_000

_VALUES = {
    *("type", "const", "enum", "required", "$ref", "$id", "$anchor", "$schema"),
    *("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords that are enforced, with a plain value."""

_ONE = {"items", "additionalItems", "additionalProperties"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems", "items"}
_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
"""Keywords that are enforced and hold other schemas: one, a list, or by name."""

_ANNOTATIONS = {
    *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$comment"),
    *("contentEncoding", "contentMediaType", "contentSchema", "discriminator", "markdownDescription"),
}
"""Keywords that say nothing about which values are valid; so do those that begin with x-."""

_HINTS = {
    "nullable": 'add "null" to type instead',
    "if": "write the cases as anyOf",
    "not": "say what is allowed instead",
    "dependencies": "write the cases as anyOf",
    "dependentRequired": "write the cases as anyOf",
}


def check_schema(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """The schema without what says nothing about values; UsageError names the keyword that is not supported, where."""
    if schema is False:
        raise UsageError("the JSON schema cannot be met: it is false, which accepts nothing")
    if schema is True:
        return {}
    try:
        size = len(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from error
    if size > MAX_SCHEMA_BYTES:
        raise UsageError(f"the JSON schema has {size} bytes, and at most {MAX_SCHEMA_BYTES} are taken; make it smaller")
    try:
        cleaned = _Cleaner().clean(schema, "#")
        assert isinstance(cleaned, dict)
        _check_finite(cleaned)
    except RecursionError as error:
        raise UsageError("the JSON schema is nested too deeply; put parts of it in $defs") from error
    return cleaned


class _Cleaner:
    """One walk over a schema."""

    def __init__(self) -> None:
        self._count = 0

    def clean(self, schema: Any, path: str) -> dict[str, Any] | bool:
        self._count += 1
        if self._count > MAX_SUBSCHEMAS:
            raise UsageError(f"the JSON schema has more than {MAX_SUBSCHEMAS} schemas in it; make it smaller")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise UsageError(f"the JSON schema is wrong at {path}: a schema is an object, true or false")
        cleaned: dict[str, Any] = {}
        for name, value in schema.items():
            at = f"{path}/{name}"
            if name in _ANNOTATIONS or name.startswith("x-") or (name == "format" and value in ANYTHING):
                continue
            if name in _MAPS:
                key = _exact if name == "patternProperties" else str
                cleaned[name] = {key(k): self.clean(x, f"{at}/{k}") for k, x in _mapping(value, at).items()}
            elif name in _LISTS and isinstance(value, list):
                cleaned[name] = [self.clean(x, f"{at}/{i}") for i, x in enumerate(value)]
            elif name in _ONE:
                cleaned[name] = self.clean(value, at)
            elif name in _VALUES:
                cleaned[name] = _value(name, value, at)
            else:
                hint = _HINTS.get(name, "leave it out, or say it otherwise")
                raise UsageError(f"the JSON schema's keyword {name[:64]!r} at {at[:200]} is not supported; {hint}")
        _check_count(cleaned, path)
        return _narrowed(cleaned)


def _mapping(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"the JSON schema is wrong at {at}: this is an object with a schema for each name")
    return value


def _value(name: str, value: Any, at: str) -> Any:
    """A keyword's value as it is; UsageError for one that would take too much, or be fetched."""
    if name == "$ref" and isinstance(value, str) and "//" in value.partition("#")[0]:
        raise UsageError(f"the JSON schema's $ref {value[:200]!r} at {at} is not fetched; put what it means in $defs")
    if name == "pattern" and isinstance(value, str):
        return _exact(value)
    if name == "format" and value not in FORMATS:
        raise UsageError(
            f"the JSON schema's format {str(value)[:64]!r} at {at[:200]} is not supported, only "
            f"{', '.join(FORMATS)}; leave it out, or write a pattern"
        )
    if name == "multipleOf" and isinstance(value, int | float) and _digits(value) > MAX_MULTIPLE:
        raise UsageError(
            f"the JSON schema's multipleOf {value} at {at} has too many digits: at most {MAX_MULTIPLE}, at any scale"
        )
    return value


def _exact(pattern: str) -> str:
    """A regular expression whose negated classes leave out U+0001 too.

    llguidance takes a class with every control character in it for one that has the quote and the backslash as well.
    """
    return re.sub(
        r"\\.|\[\^(-?)",
        lambda m: m[0] if m[1] is None else r"[^\x01" + m[1].replace("-", r"\-"),
        pattern,
        flags=re.DOTALL,
    )


def _check_count(schema: Mapping[str, Any], path: str) -> None:
    """UsageError for a number of properties that an answer may reach by saying one name twice: nothing forbids that."""
    least, required = schema.get("minProperties"), schema.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > len(required) + 1:
        raise UsageError(
            f"the JSON schema's minProperties {least} at {path[:200]} is not supported: it is more than one beyond the "
            f"{len(required)} properties in required; name more of them there"
        )


def _narrowed(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of one level in words that llguidance holds to exactly."""
    if isinstance(name := schema.get("format"), str) and (parts := narrower(name)):
        schema = {key: value for key, value in schema.items() if key != "format"}
        others = schema.get("allOf", [])
        schema["allOf"] = [*(others if isinstance(others, list) else [others]), *parts]
    if schema.get("type") != "integer":
        # An exclusive bound that is whole, with the other bound less than 1 away, lets the bound itself through there.
        for name, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
            bound = schema.get(name)
            if isinstance(bound, int | float) and not isinstance(bound, bool) and 0 <= bound * sign < 1e15:
                schema[name] = _beyond(bound * sign) * sign if bound == int(bound) else bound
    return schema


def _beyond(bound: float) -> float:
    """A number just beyond a bound; the very next one is too near, as llguidance reads a float's last digit roughly."""
    return max(bound * (1 + 1e-14), 1e-14)


def _digits(value: int | float) -> int:
    """The digits of a number as an integer, without the zeros at its ends."""
    digits = f"{value:.15g}".partition("e")[0].replace(".", "").strip("-0")
    return int(digits or "0")


# Recursion without an end.


def _check_finite(root: dict[str, Any]) -> None:
    """UsageError for a schema that only an endless value would meet: one that requires itself."""
    targets = {x["$ref"]: _resolve(root, x["$ref"]) for x in _subschemas(root) if isinstance(x.get("$ref"), str)}
    known = {ref: target for ref, target in targets.items() if target is not None}
    finite: set[str] = set(targets) - set(known)
    grown = True
    while grown:
        more = {ref for ref, target in known.items() if ref not in finite and _finite(target, finite)}
        finite |= more
        grown = bool(more)
    if not _finite(root, finite):
        raise UsageError("the JSON schema cannot be met: it requires itself, so no answer would ever be complete")


def _finite(schema: Any, refs: set[str]) -> bool:
    """Whether a finite value may meet a schema, if those that `refs` point to have one."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    if isinstance(ref := schema.get("$ref"), str) and ref not in refs:
        return False
    for name, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if isinstance(parts := schema.get(name), list) and parts and not enough(_finite(x, refs) for x in parts):
            return False
    types = schema.get("type")
    only = types if isinstance(types, str) else types[0] if isinstance(types, list) and len(types) == 1 else None
    if only == "object":
        required, properties = schema.get("required"), schema.get("properties", {})
        return not isinstance(required, list) or all(
            _finite(properties.get(name), refs) for name in required if isinstance(name, str)
        )
    if only == "array" and isinstance(least := schema.get("minItems"), int) and least > 0:
        prefix = schema.get("prefixItems", [])
        rest = [schema.get("items")] if least > len(prefix) else []
        return all(_finite(x, refs) for x in [*prefix[:least], *rest])
    return True


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(schema, dict):
        return
    yield schema
    for name, value in schema.items():
        if name in _MAPS:
            for x in value.values():
                yield from _subschemas(x)
        elif name in _LISTS and isinstance(value, list):
            for x in value:
                yield from _subschemas(x)
        elif name in _ONE:
            yield from _subschemas(value)


def _resolve(root: dict[str, Any], ref: str) -> dict[str, Any] | None:
    """What a local pointer points to; None for any other reference."""
    if not ref.startswith("#"):
        return None
    at: Any = root
    for part in ref[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict):
            at = at.get(part)
        elif isinstance(at, list) and part.isdigit() and int(part) < len(at):
            at = at[int(part)]
        else:
            return None
    return at if isinstance(at, dict) else None
