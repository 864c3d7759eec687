"""What is taken of a JSON schema, and what is refused by name."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvarn.errors import UsageError
from kvarn.serve.schema_formats import ANYTHING, FORMATS
from kvarn.serve.schemas import MAX_SUBSCHEMAS, check_schema
from kvarn.serve.structured import Structured
from kvarn.serve.tokenizer import Tokenizer


def nested(depth: int, wrap: Callable[[Any], Any] = lambda x: {"type": "array", "items": x}) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = wrap(schema)
    return schema


@pytest.fixture(scope="module")
def structured(demo_dir: Path) -> Structured:
    return Structured(Tokenizer(demo_dir), 49_152)


def test_what_says_nothing_about_values_is_left_out_anywhere() -> None:
    noted = {"title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c", "x-own": {}}
    schema = {"type": "object", "properties": {"title": {"type": "string", **noted}}, **noted}
    assert check_schema(schema) == {"type": "object", "properties": {"title": {"type": "string"}}}
    assert check_schema(True) == {}


def test_values_are_not_read_as_schemas() -> None:
    schema = {"enum": [{"not": 1, "title": "kept"}], "const": {"if": 2}}
    assert check_schema(schema) == schema


@pytest.mark.parametrize(
    "keyword",
    [
        *("uniqueItems", "not", "if", "then", "else", "contains", "minContains", "propertyNames", "dependentRequired"),
        *("dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "nullable"),
        *("Type", "anyof"),
    ],
)
def test_a_keyword_that_is_not_enforced_is_refused_with_its_place(keyword: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"'{keyword}' at #/properties/a/items/{keyword} is not supported")):
        check_schema({"properties": {"a": {"items": {keyword: {}}}}})


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (False, "accepts nothing"),
        ({"properties": []}, "#/properties: this is an object"),
        ({"items": 3}, "#/items: a schema is an object"),
        ({"anyOf": [{}, "x"]}, "#/anyOf/1: a schema is an object"),
        ({"const": float("nan")}, "not JSON"),
        ({"const": {1, 2}}, "not JSON"),
        ({"enum": ["x" * (1 << 20)]}, "1048"),
        ({"prefixItems": [{}] * MAX_SUBSCHEMAS}, f"more than {MAX_SUBSCHEMAS} schemas"),
        ({"$ref": "https://example.com/a.json#/b"}, "https://example.com/a.json#/b"),
        ({"multipleOf": 1.23456789}, "multipleOf 1.23456789"),
        ({"format": "shoe"}, "format 'shoe' at #/format"),
        ({"format": ["date"]}, "format \"['date']\""),
        ({"minProperties": 3, "required": ["a"]}, "minProperties 3 at # is not supported"),
    ],
)
def test_what_is_wrong_is_said(schema: Any, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        check_schema(schema)


@pytest.mark.parametrize("depth", [300, 600, 900, 1200, 3000, 100_000])
def test_a_schema_that_is_nested_too_deeply_is_refused(structured: Structured, depth: int) -> None:
    structured.json_schema(nested(100))
    for wrap in (lambda x: {"items": x}, lambda x: {"properties": {"a": x}}, lambda x: {"anyOf": [x, {}]}):
        with pytest.raises(UsageError, match=r"too deeply|not JSON"):
            structured.json_schema(nested(depth, wrap))


ITSELF: Any = {"$ref": "#"}
LINK: Any = {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#/$defs/link"}}}


@pytest.mark.parametrize(
    "schema",
    [
        ITSELF,
        {"type": "object", "required": ["a"], "properties": {"a": ITSELF}},
        {"type": "array", "minItems": 1, "items": ITSELF},
        {"type": "array", "minItems": 2, "prefixItems": [{}, ITSELF]},
        {"anyOf": [ITSELF, {"type": "array", "minItems": 1, "items": ITSELF}]},
        {"allOf": [{"type": "object"}, ITSELF]},
        {"$ref": "#/$defs/link", "$defs": {"link": LINK}},
    ],
)
def test_a_schema_that_only_an_endless_value_would_meet_is_refused(schema: Any) -> None:
    with pytest.raises(UsageError, match="requires itself"):
        check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": ITSELF}},
        {"type": "array", "items": ITSELF},
        {"anyOf": [ITSELF, {"type": "null"}]},
        {"type": ["object", "null"], "required": ["a"], "properties": {"a": ITSELF}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}},
        {"$ref": "#/prefixItems/0", "prefixItems": [{"type": "null"}]},
    ],
)
def test_a_recursion_that_may_end_is_taken(schema: Any) -> None:
    assert check_schema(schema) == schema


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_stays_or_becomes_patterns_beside_what_was_there(name: str) -> None:
    schema = {"type": "string", "format": name, "pattern": "^a", "allOf": [{"minLength": 2}]}
    checked = check_schema(schema)
    assert checked["pattern"] == "^a"
    assert checked["allOf"][0] == {"minLength": 2}
    assert ("format" in checked) == (len(checked["allOf"]) == 1)


@pytest.mark.parametrize("name", ANYTHING)
def test_a_format_that_says_nothing_is_left_out(name: str) -> None:
    assert check_schema({"type": "number", "format": name}) == {"type": "number"}


@pytest.mark.parametrize(
    ("pattern", "text", "want"),
    [
        ('^[^"]$', "a", True),
        ('^[^"]$', '"', False),
        ('^[^"]$', "\x01", False),
        ("^[^-x]$", "a", True),
        ("^[^-x]$", "-", False),
        ("^[^-x]$", "x", False),
        (r"^\[\^a]$", "[^a]", True),
        (r"^\\[^a]$", r"\b", True),
    ],
)
def test_a_negated_class_leaves_out_one_control_character_more(pattern: str, text: str, want: bool) -> None:
    checked = check_schema({"pattern": pattern, "patternProperties": {pattern: {}}})
    assert (re.search(checked["pattern"], text) is not None) == want
    assert list(checked["patternProperties"]) == [checked["pattern"]]


def test_a_whole_exclusive_bound_moves_away_from_what_it_excludes() -> None:
    checked = check_schema({"exclusiveMinimum": 40, "exclusiveMaximum": 41})
    assert 40 < checked["exclusiveMinimum"] < 40.000001
    assert checked["exclusiveMaximum"] == 41
    checked = check_schema({"exclusiveMinimum": -3, "exclusiveMaximum": 0})
    assert -0.000001 < checked["exclusiveMaximum"] < 0
    assert checked["exclusiveMinimum"] == -3
    for schema in (
        {"type": "integer", "exclusiveMinimum": 40},
        {"exclusiveMinimum": 0.5},
        {"exclusiveMinimum": 10**400},
        {"exclusiveMinimum": True},
    ):
        assert check_schema(schema) == schema
