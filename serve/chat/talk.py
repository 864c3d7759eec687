"""What a chat asks of its other side, be that a model in this process or a server."""

from dataclasses import dataclass
from typing import Protocol

from kvarn.serve.chat.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an answer went: tokens, seconds, and whether the conversation now holds it.

    finish_reason is stop, length or cancelled, or what a server says. limit: what ended an answer for its length, with
    the number. None means that a server did not say.
    """

    text: str
    finish_reason: str
    kept: bool
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_completion_tokens: int | None
    prompt_seconds: float
    decode_seconds: float
    limit: str = ""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A user's message and its answer, as text."""

    user: str
    answer: str


class Listener(Protocol):
    """Who hears an answer while it comes."""

    def reading(self, done: int, total: int) -> None:
        """So many tokens of the prompt are computed."""

    def thought(self, piece: str) -> None:
        """The next piece of what the model thinks before it answers."""

    def text(self, piece: str) -> None:
        """The next piece of the answer."""


class Talk(Protocol):
    """One conversation with one model. Whatever raises KvarnError leaves the conversation as it was."""

    @property
    def name(self) -> str:
        """The model."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was said yet."""

    def ask(self, text: str, settings: Settings, listener: Listener) -> Outcome:
        """Say something and hear the answer; SIGINT ends it, and what was said so far stays."""

    def retry(self, settings: Settings, listener: Listener) -> Outcome:
        """Drop the last answer and answer again. An attempt that is stopped before its first word changes nothing."""

    def undo(self) -> Exchange:
        """Drop the last turn and return it."""

    def restart(self, system: str | None) -> None:
        """Begin anew with this system prompt."""

    @property
    def system(self) -> str | None:
        """The system prompt."""

    def save(self, name: str) -> None:
        """Keep the conversation under a name."""

    def load(self, name: str) -> None:
        """Go on with a conversation that was kept."""

    def last(self) -> Exchange | None:
        """The last turn, if there is one."""

    def show(self) -> list[str]:
        """Lines about the model and the conversation."""

    def stats(self) -> list[str]:
        """Lines about what the last answer took, beyond its Outcome."""

    def cache(self) -> list[str]:
        """Lines about the prefix cache."""

    def close(self) -> None:
        """End it."""
