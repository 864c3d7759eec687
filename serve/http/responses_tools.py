"""Tools of POST /v1/responses: functions, custom tools, and namespaces of both. A model sees functions only."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag, WithJsonSchema, model_validator

from kvarn.serve.http.conversation import Named, Tool, ToolChoice
from kvarn.serve.http.fields import Strict, Text, fault
from kvarn.serve.http.tool_schema import MAX_TOOLS, Function, check_function

INPUT = "input"  # the one argument of a custom tool, as the model sees it

_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "allowed_callers": (([], ["direct"]), "only the model itself calls tools here"),
    "async": ((False,), "this server waits for every result"),
    "defer_loading": ((False,), "this server searches no tools, so all of them are in the prompt"),
}


class FunctionTool(Function):
    """A function that the client runs. strict: the arguments must fit; without it they need not."""

    accepted = ("cache_control", "output_schema")
    refused = _REFUSED
    type: Literal["function"]


class CustomFormat(Strict):
    """What a custom tool takes. A grammar is told to the model and not enforced."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        given = self.syntax is not None and self.definition is not None
        if (self.type == "grammar") != given:
            raise fault("definition", "a format of type grammar has a syntax and a definition, and only that has them")
        return self


class CustomTool(Strict):
    """A tool that takes a text. The model sees a function with one argument."""

    accepted = ("cache_control",)
    refused = _REFUSED
    type: Literal["custom"]
    name: Text
    description: Text | None = None
    format: CustomFormat | None = None

    @model_validator(mode="after")
    def _sound(self) -> Self:
        check_function(self.name, {}, "format")
        return self


def _known(value: Any) -> Any:
    """Refuse by name the tools that run at OpenAI, or that its models were trained for."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("function", "custom", "namespace"):
        raise fault(
            "type",
            f"tools of type {str(kind)[:64]!r} are not supported: they run at OpenAI, or its models were trained for "
            "them; this server takes function, custom and namespace; leave it out" + _HINTS.get(str(kind), ""),
            "unsupported_tool",
        )
    return value


_HINTS = {
    "web_search": ' (in Codex: web_search = "disabled")',
    "image_generation": " (in Codex: image_generation = false under [features])",
}


def _simple(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "namespace":
        raise fault("type", "a namespace holds function and custom tools, and no other namespace")
    return _known(value)


def _tag(value: Any) -> str:
    """The tag of a tool; in angle brackets, which kvarn.serve.http.errors leaves out of a field's path."""
    return f"<{value['type'] if isinstance(value, dict) else value.type}>"


_Simple = Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")]


class Namespace(Strict):
    """Tools under one name, as Codex sends those of an MCP server."""

    type: Literal["namespace"]
    name: Text
    description: Text | None = None
    tools: list[Annotated[_Simple, Discriminator(_tag), BeforeValidator(_simple)]] = Field(
        default_factory=list, max_length=MAX_TOOLS
    )

    @model_validator(mode="after")
    def _sound(self) -> Self:
        for tool in self.tools:
            check_function(flat_name(self.name, tool.name), {}, "tools")
        return self


ResponseTool = Annotated[
    _Simple | Annotated[Namespace, Tag("<namespace>")], Discriminator(_tag), BeforeValidator(_known)
]


def _choice(value: Any) -> ToolChoice:
    if value in ("auto", "none", "required"):
        choice: ToolChoice = value
        return choice
    if isinstance(value, dict) and value.get("type") in ("function", "custom") and isinstance(value.get("name"), str):
        return Named(value["name"])
    raise fault(
        None,
        'tool_choice is "auto", "none", "required" or {"type": "function", "name": ...} (or custom), and nothing else',
        "unsupported_parameter",
    )


ResponseChoice = Annotated[
    ToolChoice,
    PlainValidator(_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["auto", "none", "required"]},
                {
                    "type": "object",
                    "properties": {"type": {"enum": ["function", "custom"]}, "name": {"type": "string"}},
                    "required": ["type", "name"],
                },
            ]
        }
    ),
]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a function that the model calls is to the client."""

    name: str
    namespace: str | None = None
    custom: bool = False


def flat_name(namespace: str | None, name: str) -> str:
    """The name under which the model sees a tool of a namespace."""
    if not namespace:
        return name
    return namespace + ("" if namespace.endswith("_") else "__") + name


def origins(tools: Sequence[FunctionTool | CustomTool | Namespace]) -> dict[str, Origin]:
    """What each name is to the client that the model may call."""
    return {
        flat_name(namespace.name if namespace else None, tool.name): Origin(
            name=tool.name, namespace=namespace.name if namespace else None, custom=isinstance(tool, CustomTool)
        )
        for namespace, tool in _each(tools)
    }


def functions(tools: Sequence[FunctionTool | CustomTool | Namespace]) -> list[Tool]:
    """The tools as the model sees them."""
    found = []
    for namespace, tool in _each(tools):
        head = f"{namespace.description}\n" if namespace and namespace.description else ""
        name = flat_name(namespace.name if namespace else None, tool.name)
        description = head + (tool.description or "")
        if isinstance(tool, FunctionTool):
            found.append(Tool(name=name, description=description, parameters=tool.parameters, strict=tool.strict))
        else:
            found.append(Tool(name=name, description=description, parameters=_input_schema(tool)))
    return found


def _each(
    tools: Sequence[FunctionTool | CustomTool | Namespace],
) -> Iterator[tuple[Namespace | None, FunctionTool | CustomTool]]:
    for tool in tools:
        if isinstance(tool, Namespace):
            yield from ((tool, inner) for inner in tool.tools)
        else:
            yield None, tool


def _input_schema(tool: CustomTool) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "string"}
    if tool.format is not None and tool.format.definition is not None:
        text["description"] = f"A text of this grammar ({tool.format.syntax}):\n{tool.format.definition}"
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def custom_input(arguments: str) -> str:
    """The text in the arguments of a call of a custom tool; all of them where the model wrote something else."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def custom_arguments(text: str) -> str:
    """The arguments of a call of a custom tool, as the model wrote them."""
    return json.dumps({INPUT: text}, ensure_ascii=False)
