"""The bodies of POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shape."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)

from kvarn.serve.http.fields import Strict, Text, fault, unreadable
from kvarn.serve.http.schema import JsonAnswer, Stops
from kvarn.serve.http.tool_schema import MAX_TOOLS, check_function

_SIZE = 200_000  # blocks of one message; the body's size bounds everything else


class TextBlock(Strict):
    """Text. What it cites, in an answer that comes back, is said in the text."""

    accepted = ("cache_control", "citations")
    type: Literal["text"]
    text: Text


def _json(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise fault(None, "this holds a number or a text that JSON does not have; take it out") from None
    return value


class ToolUseBlock(Strict):
    """A call in an answer that comes back."""

    accepted = ("cache_control", "caller")
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Annotated[dict[str, Any], AfterValidator(_json)]


def _blocks(value: Any) -> Any:
    """A string is short for one block of text."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _only_text(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind != "text":
        raise fault(None, f"blocks of type {str(kind)[:64]!r} are not supported here; send text", "unsupported_content")
    return value


def _text_or_note(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    return {"type": "text", "text": unreadable(kind)} if kind in ("image", "document") else value


OnlyText = Annotated[TextBlock, BeforeValidator(_only_text)]
Texts = Annotated[list[OnlyText], Field(max_length=_SIZE), BeforeValidator(_blocks)]


Results = Annotated[
    list[Annotated[OnlyText, BeforeValidator(_text_or_note)]], Field(max_length=_SIZE), BeforeValidator(_blocks)
]


class ToolResultBlock(Strict):
    """What a call has given; a note stands for an image or a document."""

    accepted = ("cache_control",)
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Results = Field(default_factory=list)
    is_error: bool = False


class ThinkingBlock(Strict):
    """A thought in an answer that comes back. With an empty text, the signature holds it (display: omitted)."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class RedactedThinkingBlock(Strict):
    """A thought that only another server can read; it is left out."""

    accepted = ("data",)
    type: Literal["redacted_thinking"]


_KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
_BY_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}


def _known(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in _KINDS:
        raise fault(
            None,
            f"blocks of type {str(kind)[:64]!r} are not supported; this server reads {', '.join(_KINDS)}",
            "unsupported_content",
        )
    return value


def _tag(value: Any) -> str:
    """The tag of a block; in angle brackets, which kvarn.serve.http.errors leaves out of a field's path."""
    return f"<{value['type'] if isinstance(value, dict) else value.type}>"


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
    Discriminator(_tag),
    BeforeValidator(_known),
]


class MessageTurn(Strict):
    """One message. A system message between others is taken where the chat template takes it."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(max_length=_SIZE), BeforeValidator(_blocks)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        wrong = next((block.type for block in self.content if block.type not in _BY_ROLE[self.role]), None)
        if wrong is not None:
            raise fault("content", f"a message of role {self.role} holds no block of type {wrong}")
        return self


def _tool(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "custom"):
        raise fault(
            "type",
            f"tools of type {str(kind)[:64]!r} are not supported: they run at Anthropic, or the model was trained for "
            "them; this server takes tools with an input_schema; leave it out",
            "unsupported_tool",
        )
    return value


class ClientTool(Strict):
    """A tool that the client runs. strict: the input must fit the schema."""

    accepted = ("cache_control", "eager_input_streaming")
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "allowed_callers": (([], ["direct"]), "only the model itself calls tools here"),
        "defer_loading": ((False,), "this server searches no tools, so all of them are in the prompt"),
        "input_examples": (([],), "put examples into the description"),
    }
    type: Literal["custom"] = "custom"
    name: Text
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool = False

    @model_validator(mode="after")
    def _sound(self) -> Self:
        check_function(self.name, self.input_schema, "input_schema")
        return self


class Choice(Strict):
    """tool_choice."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _named(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise fault("name", "tool_choice has a name with type tool, and only there")
        return self


class ThinkingConfig(Strict):
    """Whether to think. budget_tokens is accepted and bounds nothing: max_tokens bounds the thought and the answer.
    between_tools is when the chat template lets the model think."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] = "summarized"


def _format(value: Any) -> JsonAnswer:
    given = {name: x for name, x in value.items() if x is not None} if isinstance(value, dict) else {}
    wrong = set(given) - {"type", "schema", "name", "strict"}
    if wrong or given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise fault(None, 'the format is an object like {"type": "json_schema", "schema": {...}}', "invalid_type")
    return JsonAnswer(given["schema"])


AnswerFormat = Annotated[
    JsonAnswer,
    PlainValidator(_format),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
            "required": ["type", "schema"],
        }
    ),
]


class OutputConfig(Strict):
    """How to answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnswerFormat | None = None


def _no_edits(value: Any) -> Any:
    """Edits that remove nothing are taken: none at all, or to keep all thoughts."""
    edits = value.get("edits", []) if isinstance(value, dict) and not set(value) - {"edits"} else None
    if not isinstance(edits, list):
        raise fault(None, 'context_management is an object like {"edits": [...]}', "invalid_type")
    for edit in edits:
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not (kind == "clear_thinking_20251015" and edit.get("keep") in ("all", {"type": "all"})):
            raise fault(
                None,
                f"edits of type {str(kind)[:64]!r} are not supported (but clear_thinking_20251015 that keeps all): "
                "this server removes nothing from a conversation; leave it out",
                "unsupported_parameter",
            )
    return None


class CountBody(Strict):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    accepted = (
        *("billing_policy", "cache_control", "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo"),
        *("metadata", "service_tier", "speed", "user_profile_id", "workspace_id"),
    )
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "compaction": ((), "this server removes nothing from a conversation"),
        "container": ((), "this server runs no tools"),
        "mcp_servers": (([],), "this server calls no other servers; let the client run these tools"),
        "safeguards": (([],), "this server judges no calls, so switch off what relies on it (Claude Code: auto mode)"),
        "thread": ((), "this server keeps no conversations; send all messages"),
    }
    model: Text
    messages: list[MessageTurn] = Field(min_length=1)
    system: Texts = Field(default_factory=list)
    tools: list[Annotated[ClientTool, BeforeValidator(_tool)]] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Choice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    output_format: AnswerFormat | None = Field(None, description="the older name of output_config.format")
    context_management: Annotated[None, BeforeValidator(_no_edits)] = None

    @model_validator(mode="after")
    def _together(self) -> Self:
        names = [tool.name for tool in self.tools]
        if self.tool_choice is not None and self.tool_choice.type in ("any", "tool") and not names:
            raise fault("tool_choice", f"tool_choice {self.tool_choice.type} needs tools; send some, or leave it out")
        if self.output_format is not None and self.output_config.format is not None:
            raise fault("output_format", "output_format is the older name of output_config.format; send one of them")
        return self


class MessagesBody(CountBody):
    """POST /v1/messages. max_tokens 0 only reads the prompt into the cache."""

    max_tokens: int = Field(ge=0)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0 means all tokens")
    stop_sequences: Stops = ()
    stream: bool = False
