"""Tools, the choice among them, and calls, as they stand in the bodies of chats."""

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from kvarn.serve.http.fields import Strict, Text, fault

MAX_TOOLS = 512
MAX_TOOL_DEPTH = 64
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class Function(Strict):
    """A function that may be called. parameters: a JSON schema of its arguments."""

    name: Text
    description: Text | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False

    @model_validator(mode="after")
    def _sound(self) -> Self:
        check_function(self.name, self.parameters, "parameters")
        return self


def check_function(name: str, parameters: dict[str, Any], field: str) -> None:
    """Refuse a name that no model could write, and parameters (in `field`) that no template could."""
    if not _NAME.fullmatch(name):
        raise fault("name", "a function's name has 1 to 128 letters, digits and _ - . : / only")
    if parameters.get("type", "object") != "object":
        raise fault(field, f'{field} is a JSON schema of type "object"; put other values in a property of it')
    if _depth(parameters) > MAX_TOOL_DEPTH:
        raise fault(field, f"{field} is nested more than {MAX_TOOL_DEPTH} levels deep; make it flatter")
    try:
        json.dumps(parameters, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise fault(field, f"{field} holds a number or a text that JSON does not have; take it out") from None


def _depth(value: Any) -> int:
    """How deep lists and objects are nested in a value; counted no further than is of interest."""
    level, depth = [value], 0
    while level and depth <= MAX_TOOL_DEPTH:
        level = [
            x for one in level if isinstance(one, dict | list) for x in (one.values() if isinstance(one, dict) else one)
        ]
        depth += 1
    return depth


class ToolBody(Strict):
    """An entry of `tools`."""

    accepted = ("cache_control",)
    type: Literal["function"]
    function: Function


def _choice(value: Any) -> str:
    """auto, none, required, or the name of a function after `=`."""
    if value in ("auto", "none", "required"):
        return str(value)
    asked = value if isinstance(value, dict) and set(value) == {"type", "function"} else {}
    function = asked.get("function") if asked.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) and len(function) == 1 else None
    if not isinstance(name, str):
        raise fault(
            None,
            'tool_choice is "auto", "none", "required" or {"type": "function", "function": {"name": ...}}',
            "invalid_type",
        )
    return f"={name}"


Choice = Annotated[
    str,
    PlainValidator(_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["auto", "none", "required"]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                            "additionalProperties": False,
                        },
                    },
                    "required": ["type", "function"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]


class CalledFunction(Strict):
    """What a call of an earlier answer called. arguments: the JSON text that the model wrote."""

    name: Text
    arguments: Text = ""


class CallBody(Strict):
    """A call in a message of the assistant."""

    accepted = ("index",)
    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction
