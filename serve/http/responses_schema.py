"""The body of POST /v1/responses."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag, WithJsonSchema, model_validator

from kvarn.serve.http.fields import Strict, Text, fault, unreadable, whole_unicode
from kvarn.serve.http.responses_tools import ResponseChoice, ResponseTool
from kvarn.serve.http.schema import JsonAnswer
from kvarn.serve.http.tool_schema import MAX_TOOLS

_STATELESS = "this server keeps nothing, so the whole conversation goes into input"


def _texts(value: Any) -> str:
    """A string, or parts that hold text, joined by line breaks."""
    if isinstance(value, str):
        return whole_unicode(value)
    if not isinstance(value, list):
        raise fault(None, "this is a string or a list of text parts", "invalid_type")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        field = _PART_FIELDS.get(str(kind))
        if field is None:
            raise fault(None, f"parts of type {str(kind)[:64]!r} are not supported; send text", "unsupported_content")
        unknown = {name for name, x in part.items() if x is not None} - {"type", field, *_PART_ACCEPTED}
        if unknown or not isinstance(part.get(field), str):
            raise fault(None, f'a part of type {kind} is {{"type": "{kind}", "{field}": a string}}', "invalid_type")
        texts.append(whole_unicode(part[field]))
    return "\n".join(texts)


_PART_FIELDS = {
    **dict.fromkeys(("input_text", "output_text", "text", "summary_text", "reasoning_text"), "text"),
    "refusal": "refusal",
}
_PART_ACCEPTED = ("annotations", "logprobs", "prompt_cache_breakpoint")
_PART = {
    "type": "object",
    "properties": {"type": {"const": "input_text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Texts = Annotated[
    str, PlainValidator(_texts), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]})
]


def _with_notes(value: Any) -> Any:
    """Parts of a call's output, a note for each image and file."""
    if not isinstance(value, list):
        return value
    kinds = [part.get("type") if isinstance(part, dict) else None for part in value]
    return [
        {"type": "input_text", "text": unreadable(_UNREAD[kind])} if kind in _UNREAD else part
        for part, kind in zip(value, kinds, strict=True)
    ]


_UNREAD = {"input_image": "image", "input_file": "file"}

_ITEM_ACCEPTED = ("id", "status", "caller", "created_by", "metadata", "internal_chat_message_metadata_passthrough")


class MessageItem(Strict):
    """What somebody says."""

    accepted = (*_ITEM_ACCEPTED, "phase", "end_turn")
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts


class CallItem(Strict):
    """A call in an answer that comes back. arguments: the JSON text that the model wrote."""

    accepted = (*_ITEM_ACCEPTED, "async")
    type: Literal["function_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    arguments: Text


class CustomCallItem(Strict):
    """A call of a custom tool in an answer that comes back."""

    accepted = _ITEM_ACCEPTED
    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    input: Text


class OutputItem(Strict):
    """What a call has given; a note stands for an image or a file."""

    accepted = (*_ITEM_ACCEPTED, "name")
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Annotated[Texts, BeforeValidator(_with_notes)]


class ReasoningItem(Strict):
    """A thought in an answer that comes back: as content, or sealed in encrypted_content. Summaries are left out."""

    accepted = (*_ITEM_ACCEPTED, "summary")
    type: Literal["reasoning"]
    content: Texts = ""
    encrypted_content: Text = ""


_ITEMS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
)
_TAGS = {"custom_tool_call_output": "function_call_output"}


def _known(value: Any) -> Any:
    kind = (value.get("type") or "message") if isinstance(value, dict) else None
    if kind == "item_reference" or (kind == "message" and "role" not in value and "id" in value):
        raise fault(None, f"items of type item_reference are not supported: {_STATELESS}", "unsupported_content")
    if kind not in _ITEMS:
        raise fault(
            None,
            f"items of type {str(kind)[:64]!r} are not supported; this server reads {', '.join(_ITEMS)}",
            "unsupported_content",
        )
    return value


def _tag(value: Any) -> str:
    """The tag of an item; in angle brackets, which kvarn.serve.http.errors leaves out of a field's path."""
    kind = (value.get("type") or "message") if isinstance(value, dict) else value.type
    return f"<{_TAGS.get(kind, kind)}>"


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[OutputItem, Tag("<function_call_output>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_tag),
    BeforeValidator(_known),
]


def _input(value: Any) -> Any:
    """A string is short for one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class Reasoning(Strict):
    """How to think. summary is accepted: thoughts come whole, as content."""

    accepted = ("summary", "generate_summary")
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "context": (("auto",), "the chat template decides which thoughts of earlier turns the model sees"),
        "mode": (("standard",), "this server has one"),
    }
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


def _format(value: Any) -> JsonAnswer | None:
    """text.format: the fields of chats' response_format, without the object around the schema."""
    given = {name: x for name, x in value.items() if x is not None} if isinstance(value, dict) else {}
    kind = given.pop("type", None)
    known = {"text": set(), "json_object": set(), "json_schema": {"name", "description", "schema", "strict"}}
    if kind not in known or set(given) - known[kind]:
        raise fault(None, "format is an object of type text, json_object or json_schema (with name, schema)")
    if kind == "json_schema" and not isinstance(given.get("schema"), dict):
        raise fault("schema", "a format of type json_schema has a schema, which is an object", "invalid_type")
    if kind == "text":
        return None
    return JsonAnswer(given.get("schema", {"type": "object"}))


_FORMAT = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, "name": {"type": "string"}, "schema": {"type": "object"}},
            "required": ["type", "schema"],
        },
    ]
}


class TextConfig(Strict):
    """text: the answer's form."""

    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "verbosity": (("medium",), "this server does not steer verbosity")
    }
    format: Annotated[JsonAnswer | None, PlainValidator(_format), WithJsonSchema(_FORMAT)] = None


class StreamOptions(Strict):
    """stream_options: about padding and summaries, neither of which this server makes. The usage always comes."""

    accepted = ("include_obfuscation", "include_usage", "reasoning_summary_delivery")


def _include(value: Any) -> list[str]:
    """What else to send. Of what there is to ask for, this server has the sealed thoughts alone."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise fault(None, "include is a list of strings", "invalid_type")
    if "message.output_text.logprobs" in value:
        raise fault(
            None,
            "message.output_text.logprobs is not supported here; ask /v1/chat/completions for logprobs",
            "unsupported_parameter",
        )
    return value


class ResponsesBody(Strict):
    """POST /v1/responses."""

    accepted = (
        *("access_programs", "client_metadata", "image", "max_tool_calls", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"),
    )
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "background": ((False,), "this server keeps nothing, so an answer could not be fetched later"),
        "context_management": (([],), "this server removes nothing from a conversation"),
        "conversation": ((), _STATELESS),
        "moderation": ((), "this server does not moderate"),
        "previous_response_id": ((), _STATELESS),
        "prompt": ((), "this server stores no prompts; send it as input"),
        "top_logprobs": ((0,), "ask /v1/chat/completions for logprobs"),
        "truncation": (("disabled",), "this server removes nothing from a conversation; send a shorter one"),
    }
    model: Text
    input: Annotated[list[InputItem], BeforeValidator(_input)] = Field(min_length=1)
    instructions: Text | None = None
    tools: list[ResponseTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ResponseChoice = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: Reasoning = Field(default_factory=Reasoning)
    include: Annotated[list[str], PlainValidator(_include), WithJsonSchema({"type": "array"})] = Field(
        default_factory=list
    )
    metadata: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise fault("stream_options", "stream_options goes with stream: true; leave it out, or stream")
        return self
