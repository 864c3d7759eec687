"""What an answer consists of as it streams: text, thoughts and calls of functions; and who finds them in the text."""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Text:
    """More of what is said to the user."""

    text: str


@dataclass(frozen=True)
class Thought:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins. index: 0, 1, … within the answer. id: unique. name: as the model wrote it, known or not."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments: all of them together are the JSON text that the model wrote, valid or not."""

    index: int
    text: str


Part = Text | Thought | CallStart | CallArguments


class AnswerParser(Protocol):
    """One answer's text in, its parts out. How the text is cut into pieces changes nothing but the cuts of the parts.

    in_thought: what comes next belongs to a thought, as far as is known.
    """

    in_thought: bool

    def add(self, text: str) -> list[Part]:
        """The parts that are certain now; what may be the beginning of a mark is held back."""

    def finish(self) -> list[Part]:
        """What was still held back. Text that is no whole mark is text; a call that was cut stays as far as it came."""


class PlainParser:
    """Everything is text."""

    in_thought = False

    def add(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []


@dataclass(kw_only=True)
class Call:
    """A call of a function, as far as it has come. arguments: JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(kw_only=True)
class Collected:
    """The parts of one answer put together."""

    text: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, part: Part) -> None:
        """Take in the next part."""
        match part:
            case Text(text):
                self.text += text
            case Thought(text):
                self.thought += text
            case CallStart(_, call_id, name):
                self.calls.append(Call(id=call_id, name=name))
            case CallArguments(index, text):
                self.calls[index].arguments += text
