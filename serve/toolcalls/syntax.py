"""How models write calls and thoughts. The marks are learned from the chat template (kvarn.serve.toolcalls.learn)."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class JsonCalls:
    """`begin {"name": …, "arguments": …} end`, or a list of such objects.

    bare: the answer itself may be such an object, without `begin` (which may be empty then). listed: one call is a list
    too. Hermes, Qwen, Granite, Mistral up to 7B v0.3, Llama 3.
    """

    begin: str
    end: str = ""
    lead: str = ""
    bare: bool = False
    listed: bool = False
    name: str = "name"
    arguments: str = "arguments"


@dataclass(frozen=True, kw_only=True)
class NamedCalls:
    """`wrap (open NAME separator {JSON} close)* unwrap`. id_end: where a call's id stands between separator and this.

    Mistral Small 3, DeepSeek V3.
    """

    wrap: str = ""
    open: str
    separator: str
    id_end: str = ""
    close: str = ""
    unwrap: str = ""
    lead: str = ""


@dataclass(frozen=True, kw_only=True)
class TaggedCalls:
    """`wrap (open NAME name_end (key_open KEY key_end VALUE value_end)* close)* unwrap`.

    Strings stand as they are, other values as JSON. typed: what follows key_end where the value is a string; for others
    it has false instead of true. Qwen3-Coder, GLM 4.5, MiniMax M2; DeepSeek V3.2.
    """

    wrap: str = ""
    open: str
    name_end: str
    key_open: str
    key_end: str
    value_end: str
    close: str
    unwrap: str = ""
    lead: str = ""
    typed: str = ""


@dataclass(frozen=True, kw_only=True)
class QuotedCalls:
    """`open NAME {KEY:VALUE,...} close` in a row: bare keys, sorted, and strings between `quote`s. Gemma 4."""

    open: str
    quote: str
    close: str
    lead: str = ""


@dataclass(frozen=True, kw_only=True)
class PythonCalls:
    """`begin [f(x=1), g(y="a")] end`, the brackets optional between marks. bare: as above. Llama 4, LFM2, Olmo 3."""

    begin: str = ""
    end: str = ""
    lead: str = ""
    bare: bool = False


@dataclass(frozen=True, kw_only=True)
class ThoughtMarks:
    """A thought stands between these, at the beginning of an answer."""

    open: str
    close: str


CallSyntax = JsonCalls | NamedCalls | TaggedCalls | QuotedCalls | PythonCalls


def triggers(syntax: CallSyntax) -> tuple[str, ...]:
    """The words that begin a call within a text."""
    match syntax:
        case JsonCalls() | PythonCalls():
            texts = [syntax.begin]
        case NamedCalls() | TaggedCalls():
            texts = [syntax.wrap, syntax.open]
        case QuotedCalls():
            texts = [syntax.open]
    return tuple(dict.fromkeys(words[0] for text in texts if (words := text.split())))
