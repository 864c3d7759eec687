"""JSON schemas that can be met, made from a seed: every keyword that is enforced, nested and by reference."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
PATTERNS = [
    *("^[A-Z]{2,4}$", "^(red|green)-[0-9]+$", r"^\d{3}/\d{2}$", r"^\w+\s\w+$", "^.{2}$", r"^[^\"]{1,5}$"),
    *("[aeiou]{2}", "^x", r"\.$"),
]
NAMES = ["name", "a b", "é", 'x"y', "", "$id", "the_key", "😀"]
VALUES = ["red", 'green "2"', 1, 2.5, None, True, ["x"], {"k": "v"}, "\n", ""]
PLAIN: list[Schema] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"], "maxLength": 9},
    {"type": ["integer", "boolean"]},
    {"const": "only this"},
    {"const": {"a": [1, None]}},
    {"const": 0.5},
]
COMBINED: list[Schema] = [
    {"allOf": [{"type": "string", "pattern": "^[ab]+$"}, {"minLength": 3, "maxLength": 6}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 20}]},
    {
        "allOf": [
            {"type": "object", "properties": {"p": {"type": "string", "format": "date", "pattern": "^20"}}},
            {"properties": {"q": {"enum": [1, 2]}}, "required": ["p", "q"]},
        ]
    },
]


class SchemaMaker:
    """One schema a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._defs: dict[str, Schema] = {}
        self._names = 0

    def make(self) -> Schema:
        """A schema, mostly of an object, three levels deep."""
        schema = self._object(3) if self._random.random() < 0.7 else self._any(3)
        return schema | {"$defs": self._defs} if self._defs else schema

    def _any(self, depth: int) -> Schema:
        leaves = [self._string, self._string, self._integer, self._number, self._plain, self._enum]
        deep: list[Callable[[int], Schema]] = [
            *(self._object, self._object, self._array, self._array, self._union, self._ref),
        ]
        at = self._random.randrange(len(leaves) + len(deep) if depth else len(leaves))
        return leaves[at]() if at < len(leaves) else deep[at - len(leaves)](depth - 1)

    def _plain(self) -> Schema:
        return self._random.choice([*PLAIN, *COMBINED])

    def _enum(self) -> Schema:
        return {"enum": self._random.sample(VALUES, self._random.randrange(1, 5))}

    def _string(self) -> Schema:
        least = self._random.randrange(6)
        return self._random.choice(
            [
                {"type": "string"},
                {"type": "string", "minLength": least, "maxLength": least + self._random.randrange(8)},
                {"type": "string", "pattern": self._random.choice(PATTERNS)},
                {"type": "string", "pattern": "^[a-z0-9]*$", "minLength": 2, "maxLength": 5},
                {"type": "string", "format": self._random.choice(FORMATS)},
            ]
        )

    def _integer(self) -> Schema:
        least = self._random.randrange(-1000, 1000)
        bounds: Schema = {"minimum": least, "maximum": least + self._random.randrange(12, 300)}
        return {"type": "integer"} | self._random.choice(
            [{}, {"minimum": least}, {"exclusiveMaximum": least}, bounds, bounds | {"multipleOf": 7}]
        )

    def _number(self) -> Schema:
        least = round(self._random.uniform(-100, 100), self._random.randrange(4))
        width = self._random.choice([0.5, 1, 20.25])
        return {"type": "number"} | self._random.choice(
            [
                {},
                {"minimum": least},
                {"maximum": least},
                {"exclusiveMinimum": least, "exclusiveMaximum": round(least + width, 3)},
                {"multipleOf": self._random.choice([0.5, 0.25, 0.01]), "minimum": least, "maximum": least + 5},
            ]
        )

    def _object(self, depth: int) -> Schema:
        properties = {self._name(): self._any(depth) for _ in range(self._random.randrange(1, 5))}
        required = [name for name in properties if self._random.random() < 0.6]
        schema: Schema = {"type": "object", "properties": properties, "required": required}
        kind = self._random.randrange(6)
        if kind < 3:
            return schema | {"additionalProperties": False}
        if kind == 3:
            return schema | {"additionalProperties": self._any(0)}
        if kind == 4:
            count = len(properties)
            return schema | {"required": list(properties), "minProperties": count, "maxProperties": count + 1}
        keys = {"^k_[a-z]{1,3}$": self._any(0)}
        return {"type": "object", "patternProperties": keys, "additionalProperties": False, "minProperties": 1}

    def _array(self, depth: int) -> Schema:
        least, width = self._random.randrange(3), self._random.randrange(3)
        if self._random.random() < 0.3:
            first = [self._any(depth) for _ in range(1 + width)]
            rest = self._random.choice([False, self._any(0)])
            return {"type": "array", "prefixItems": first, "items": rest, "minItems": 1 + width, "maxItems": 4}
        schema: Schema = {"type": "array", "items": self._any(depth), "minItems": least}
        return schema if self._random.random() < 0.2 else schema | {"maxItems": least + width}

    def _union(self, depth: int) -> Schema:
        if self._random.random() < 0.7:
            return {"anyOf": [self._any(depth) for _ in range(self._random.randrange(2, 4))]}
        return {"oneOf": [closed({"kind": {"const": kind}, "v": self._any(depth)}) for kind in ("a", "b")]}

    def _ref(self, depth: int) -> Schema:
        if self._random.random() < 0.4:
            name = f"list{len(self._defs)}"
            following = {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]}
            self._defs[name] = closed({"v": self._any(0), "next": following})
        elif self._defs and self._random.random() < 0.5:
            name = self._random.choice(list(self._defs))
        else:
            schema = self._any(depth)
            name = f"part{len(self._defs)}"
            self._defs[name] = schema
        return {"$ref": f"#/$defs/{name}"}

    def _name(self) -> str:
        self._names += 1
        return f"{self._random.choice(NAMES)}{self._names}"


def closed(properties: Schema) -> Schema:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def keywords(schema: Any) -> set[str]:
    """The keywords that stand anywhere in a schema."""
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for name, value in schema.items():
        if name in ("properties", "patternProperties", "$defs"):
            parts = list(value.values())
        elif name not in ("const", "enum"):
            parts = value if isinstance(value, list) else [value]
        else:
            parts = []
        found.update(*(keywords(part) for part in parts))
    return found
