"""The bodies of requests: a field is supported, accepted because it cannot change the answer, or refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from kvarn.serve.http.fields import Content, Strict, Text, fault, whole_unicode
from kvarn.serve.http.tool_schema import MAX_TOOLS, CallBody, Choice, ToolBody

MAX_ANSWERS = 128  # of one request: prompts times n
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024

ACCEPTED: tuple[str, ...] = (
    "cache_control",
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields of a request that cannot change the answer here; any value is accepted."""

_CHAT_ONLY = "it goes with /v1/chat/completions"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "this server answers with text only"),
    "function_call": (("none",), "its newer name is tool_choice"),
    "functions": (([],), "the newer form is tools"),
    "guided_choice": ((), "here it is a regex like a|b|c"),
    "guided_grammar": ((), "here it is grammar"),
    "guided_json": ((), "here it is response_format with a json_schema"),
    "guided_regex": ((), "here it is regex"),
    "json_schema": ((), "here it is response_format with a json_schema"),
    "modalities": ((["text"],), "this server answers with text only"),
    "reasoning": ((), "here it is reasoning_effort"),
    "structured_outputs": ((), "here it is response_format, regex or grammar"),
    "suffix": (("",), "this server does not fill in the middle"),
    "verbosity": (("medium",), "this server does not steer verbosity"),
    "web_search_options": ((), "this server does not search"),
}
"""Fields that would change the answer and are not supported: the values that ask for nothing, and the reason."""

_CHAT_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "chat_template_kwargs": (({},), _CHAT_ONLY),
    "reasoning_effort": ((), _CHAT_ONLY),
    "tool_choice": (("none",), _CHAT_ONLY),
    "tools": (([],), _CHAT_ONLY),
}
"""The same for completions."""

_MESSAGE_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "annotations": (([],), "only text is supported"),
    "audio": ((), "only text is supported"),
    "function_call": ((), "the newer form is tool_calls"),
    "reasoning_details": (([],), "send it as reasoning_content"),
    "refusal": ((), "send it as content"),
}


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise fault(None, "stop must be a string or a list of strings", "invalid_type")
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise fault(None, f"stop takes up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(whole_unicode(stop) for stop in stops)


Stops = Annotated[
    tuple[str, ...],
    PlainValidator(_stops),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOPS}]}
    ),
]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several, each a string or token ids."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not prompts:
        raise fault(
            None, "prompt must be a string, a list of strings, token ids, or a list of token ids", "invalid_type"
        )
    if len(prompts) > MAX_ANSWERS:
        raise fault(None, f"prompt holds {len(prompts)} prompts; send {MAX_ANSWERS} or fewer")
    for prompt in prompts:
        if not isinstance(prompt, str) and not _is_ids(prompt):
            raise fault(None, "every prompt must be a string, or token ids (at least one)", "invalid_type")
        if isinstance(prompt, str):
            whole_unicode(prompt)
    return prompts


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise fault(None, f"logit_bias must be an object of up to {MAX_BIASES} token ids with a number each")
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise fault(None, f"logit_bias: {token[:64]!r} is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -1000 <= bias <= 1000:
            raise fault(None, f"logit_bias of token {token} must be a number from -1000 to 1000")
    return {int(token): float(bias) for token, bias in value.items()}


Biases = Annotated[
    dict[int, float],
    PlainValidator(_biases),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -1000, "maximum": 1000}}),
]


@dataclass(frozen=True)
class JsonAnswer:
    """The answer is JSON that this schema accepts."""

    schema: Mapping[str, Any] | bool


def _response_format(value: Any) -> JsonAnswer | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise fault(None, "response_format is an object of type text, json_object or json_schema", "invalid_type")
    given = {name: x for name, x in value.items() if x is not None and name != "type"}
    if kind == "text":
        _known(given, ())
        return None
    if kind == "json_object":
        _known(given, ("schema",))
        return JsonAnswer(_schema(given.get("schema", {"type": "object"})))
    _known(given, ("json_schema",))
    inner = given.get("json_schema")
    if not isinstance(inner, dict) or inner.get("schema") is None:
        raise fault(None, 'json_schema is an object like {"name": "answer", "schema": {...}}', "invalid_type")
    _known({name: x for name, x in inner.items() if x is not None}, ("name", "description", "schema", "strict"))
    return JsonAnswer(_schema(inner["schema"]))


def _known(given: Mapping[str, Any], names: tuple[str, ...]) -> None:
    unknown = next((name for name in given if name not in names), None)
    if unknown is not None:
        raise fault(None, f"unknown field {unknown[:64]!r} in response_format; leave it out", "unknown_parameter")


def _schema(value: Any) -> Mapping[str, Any] | bool:
    if not isinstance(value, dict | bool):
        raise fault(None, "a JSON schema is an object, true or false", "invalid_type")
    return value


_SCHEMA = {"type": "object"}
ResponseFormat = Annotated[
    JsonAnswer | None,
    PlainValidator(_response_format),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
                {
                    "type": "object",
                    "properties": {"type": {"const": "json_object"}, "schema": _SCHEMA},
                    "required": ["type"],
                },
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "json_schema"},
                        "json_schema": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}, "schema": _SCHEMA},
                            "required": ["schema"],
                        },
                    },
                    "required": ["type", "json_schema"],
                },
            ]
        }
    ),
]


class StreamOptions(Strict):
    """stream_options. Obfuscation only pads chunks, which this server never does."""

    accepted = ("include_obfuscation",)
    include_usage: bool = False


class Generation(Strict):
    """What /v1/chat/completions and /v1/completions share."""

    accepted = ACCEPTED
    refused = _REFUSED
    model: Text
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, description="0 and -1 mean all tokens")
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-100, le=100)
    frequency_penalty: float = Field(0.0, ge=-100, le=100)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    logit_bias: Biases = Field(default_factory=dict)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    stop: Stops = ()
    response_format: ResponseFormat = None
    regex: Text | None = Field(None, description="in Rust's syntax; the whole answer matches it")
    grammar: Text | None = Field(None, description="in llguidance's Lark")
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise fault("stream_options", "stream_options goes with stream: true; leave it out, or stream")
        asked = [name for name in ("response_format", "regex", "grammar") if getattr(self, name) is not None]
        if len(asked) > 1:
            raise fault(asked[1], f"{' and '.join(asked)} exclude each other; send one of them")
        return self


class Message(Strict):
    """One message of a conversation. A message of the assistant may have calls instead of content; what it thought may
    stand under either name."""

    accepted = ("cache_control",)
    refused = _MESSAGE_REFUSED
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Text | None = None
    tool_call_id: Text | None = None
    tool_calls: list[CallBody] = Field(default_factory=list)
    reasoning_content: Text | None = None
    reasoning: Text | None = None

    @model_validator(mode="after")
    def _of_the_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise fault("content", "content is missing", "missing_required_parameter")
        for field in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(self, field) and self.role != "assistant":
                raise fault(field, f"{field} is for messages of the assistant; this one is of the role {self.role}")
        return self

    @property
    def for_template(self) -> dict[str, Any]:
        """As kvarn.serve.http.conversation wants it: developer is the newer name of system."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        thought = self.reasoning_content or self.reasoning
        extra = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": thought or None}
        message |= {name: text for name, text in extra.items() if text is not None}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


def _variables(value: Any) -> dict[str, Any]:
    """Variables of the chat template. Nothing but plain values: what they do is the template's matter."""
    if not isinstance(value, dict) or not all(isinstance(x, str | bool | int | float) for x in value.values()):
        raise fault(None, "chat_template_kwargs is an object of strings, numbers and booleans by name", "invalid_type")
    for x in (*value, *value.values()):
        if isinstance(x, str):
            whole_unicode(x)
    return value


Variables = Annotated[
    dict[str, Any],
    PlainValidator(_variables),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}),
]


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    accepted = tuple(name for name in ACCEPTED if name != "parallel_tool_calls")
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[ToolBody] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Choice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: Variables = Field(default_factory=dict)

    @model_validator(mode="after")
    def _chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise fault("top_logprobs", "top_logprobs goes with logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise fault("max_tokens", "max_tokens and max_completion_tokens differ; send one of them")
        return self


class CompletionBody(Generation):
    """POST /v1/completions. Without max_tokens an answer has up to 16 tokens, as at OpenAI."""

    refused = _REFUSED | _CHAT_FIELDS
    prompt: Prompts
    max_tokens: int = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _completion(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise fault(
                "best_of", f"best_of {self.best_of} is not n = {self.n}; this server does not choose among answers"
            )
        if self.echo and self.logprobs is not None:
            raise fault(
                "logprobs", "logprobs of the prompt (echo with logprobs) are not supported; leave out one of them"
            )
        if len(self.prompt) * self.n > MAX_ANSWERS:
            raise fault(
                "n", f"{len(self.prompt)} prompts with n = {self.n} are more than {MAX_ANSWERS} answers; send fewer"
            )
        if self.n > 1 and self.max_tokens == 0:
            raise fault("n", "n above 1 needs max_tokens above 0")
        return self


class TokenizeBody(Strict):
    """POST /tokenize: a text, or a conversation in the model's chat template, maybe with tools."""

    model: Text | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[ToolBody] = Field(default_factory=list, max_length=MAX_TOOLS)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise fault("prompt", "send one of prompt and messages")
        if self.tools and self.messages is None:
            raise fault("tools", "tools go with messages; leave them out")
        return self
