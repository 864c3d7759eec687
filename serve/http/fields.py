"""What the bodies of requests are made of: texts, contents, and objects that take nothing that they do not know."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError


def fault(param: str | None, text: str, code: str = "invalid_value") -> PydanticCustomError:
    """A refusal that kvarn.serve.http.errors turns into a sentence about `param`."""
    return PydanticCustomError("kvarn_field", "{text}", {"text": text, "param": param, "code": code})


def whole_unicode(text: str) -> str:
    """The text itself; refused if it has half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise fault(
            None, "a string holds half of a surrogate pair, which is not valid Unicode; send whole characters"
        ) from None
    return text


Text = Annotated[str, AfterValidator(whole_unicode)]


class Strict(BaseModel):
    """An object. accepted: fields that cannot change the answer. refused: those that would, by name, with the values
    that ask for nothing and the reason."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    accepted: ClassVar[tuple[str, ...]] = ()
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, data: Any) -> Any:
        """Take out nulls and what cannot change the answer; refuse by name what would, and what is unknown."""
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if value is None or name in cls.accepted:
                continue
            if name in cls.refused:
                neutral, reason = cls.refused[name]
                if value not in neutral:
                    raise fault(name, f"{name} is not supported: {reason}; leave it out", "unsupported_parameter")
                continue
            if name not in cls.model_fields:
                raise fault(name, f"unknown field {name[:64]!r}; leave it out", "unknown_parameter")
            kept[name] = value
        return kept


def unreadable(kind: str) -> str:
    """What the model is told in the place of an image or a file that a tool has given. Refusing it would end an
    agent's conversation, for agents send the whole of it every time."""
    return f"[{kind}: it cannot be shown to this model, which reads text only]"


def _content(value: Any) -> str:
    """A message's text: a string, or text parts, which are joined by line breaks."""
    if isinstance(value, str):
        return whole_unicode(value)
    if not isinstance(value, list) or not value:
        raise fault(None, "content must be a string or a list of text parts", "invalid_type")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise fault(
                None, f"content parts of type {str(kind)[:64]!r} are not supported; send text", "unsupported_content"
            )
        unknown = {name for name, x in part.items() if x is not None} - {"type", "text", "cache_control"}
        if unknown or not isinstance(part.get("text"), str):
            raise fault(None, 'a text part is {"type": "text", "text": a string}', "invalid_type")
        texts.append(whole_unicode(part["text"]))
    return "\n".join(texts)


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    str,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]}),
]
