"""What the tests of a chat share: a screen that remembers, and a reader of given lines."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from fake_chat import fake_talk

from kvarn.serve.chat.commands import Chat
from kvarn.serve.chat.local import LocalTalk
from kvarn.serve.chat.settings import Settings
from kvarn.serve.chat.talk import Talk


class Recorder:
    """A screen that keeps what it is told; `on_text` sees every piece as it comes."""

    def __init__(self) -> None:
        self.answers: list[str] = [""]
        self.thoughts = ""
        self.notes: list[str] = []
        self.errors: list[str] = []
        self.on_text: Callable[[str], None] = lambda piece: None

    def reading(self, done: int, total: int) -> None:
        return

    def thought(self, piece: str) -> None:
        self.thoughts += piece

    def text(self, piece: str) -> None:
        self.answers[-1] += piece
        self.on_text(piece)

    def end(self) -> None:
        self.answers.append("")

    def quote(self, text: str) -> None:
        self.notes.append(f"> {text}")

    def note(self, line: str) -> None:
        self.notes.append(line)

    def error(self, line: str) -> None:
        self.errors.append(line)

    @property
    def answer(self) -> str:
        """The last answer that has ended."""
        return self.answers[-2]


class Lines:
    """A reader of given lines; an exception among them is raised."""

    def __init__(self, lines: list[str | type[BaseException]]) -> None:
        self.lines = lines

    def read(self) -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    def silent(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.fixture
def talk() -> Iterator[LocalTalk]:
    """A conversation with the fake model."""
    made = fake_talk()
    yield made
    made.close()


@pytest.fixture
def chatting() -> Callable[..., Chat]:
    """A chat over a talk: `chatting(talk, *lines)`; its screen is a Recorder."""

    def make(talk: Talk, *lines: str | type[BaseException], max_tokens: int = 10, session: str | None = None) -> Chat:
        return Chat(talk, Recorder(), Lines([*lines]), Settings(max_tokens=max_tokens), session=session)

    return make
