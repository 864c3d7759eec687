"""The loop of a chat: read a message or a command, do it, say how it went."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from kvarn.errors import ContextOverflowError, KvarnError, UsageError
from kvarn.serve.chat.keyboard import Reader
from kvarn.serve.chat.report import outcome_lines
from kvarn.serve.chat.screen import Screen
from kvarn.serve.chat.settings import Settings
from kvarn.serve.chat.talk import Outcome, Talk

_AS_IT_WAS = "the conversation is as it was"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: its arguments in words, what it does, and the method that does it."""

    usage: str
    text: str
    run: Callable[["Chat", str], None]


class Chat:
    """One chat. `session` is the name under which the conversation is saved whenever it changes."""

    def __init__(
        self, talk: Talk, screen: Screen, reader: Reader, settings: Settings, *, session: str | None = None
    ) -> None:
        self.talk = talk
        self.screen = screen
        self.reader = reader
        self.settings = settings
        self.session = session
        self.num_failures = 0
        self.over = False
        self._last: Outcome | None = None
        self._tries = 0  # of /retry for the last turn

    def greet(self) -> None:
        """Who is there, and where a session stands."""
        self.screen.note(f"{self.talk.name}; /help lists the commands, Ctrl-D leaves")
        self._recall()

    def run(self) -> None:
        """Until the input ends, or /bye."""
        while not self.over:
            try:
                line = self.reader.read()
            except EOFError:
                return
            except KeyboardInterrupt:
                self.screen.note("Ctrl-D or /bye leaves")
                continue
            self.handle(line)

    def run_lines(self) -> None:
        """The same for lines of a pipe; an interrupted answer ends it. KvarnError when a line could not be done."""
        lines = 0
        while not self.over:
            try:
                line = self.reader.read()
            except EOFError:
                break
            lines += bool(line.strip())
            self.handle(line)
            if self._last is not None and self._last.finish_reason == "cancelled":
                raise KeyboardInterrupt
        if self.num_failures:
            raise KvarnError(f"{self.num_failures} of {lines} lines could not be done; see above")

    def handle(self, line: str) -> None:
        """Do one message or command; what goes wrong is said and changes nothing."""
        try:
            if not line.strip():
                return
            if line.startswith("/") and not line.startswith("//"):
                self._command(line[1:])
            else:
                self._ask(line[1:] if line.startswith("//") else line)
        except ContextOverflowError as error:
            self._fail(
                f"the context is full: with this message the conversation has {error.num_prompt_tokens} tokens, which "
                f"leaves no room to answer in a context of {error.context}; /undo drops the last turn, /clear all"
            )
        except KvarnError as error:
            full = getattr(error, "code", None) == "context_length_exceeded"
            self._fail(f"{error}" + ("; /undo drops the last turn, /clear all" if full else ""))
        except KeyboardInterrupt:
            self._fail("stopped")

    def _fail(self, text: str) -> None:
        self.num_failures += 1
        self.screen.error(text)

    def _command(self, line: str) -> None:
        name = re.split(r"\s", line, maxsplit=1)[0]
        rest = line[len(name) :].strip()
        command = COMMANDS.get(name)
        if command is None:
            raise UsageError(f"no command /{name[:40]}; /help lists them, and // begins a message with a slash")
        if command.usage and not rest:
            raise UsageError(f"/{name} needs more: /{name} {command.usage}")
        if rest and not command.usage:
            raise UsageError(f"/{name} takes nothing after it")
        command.run(self, rest)

    # Answers.

    def _ask(self, text: str) -> None:
        self._hear(lambda: self.talk.ask(text, self.settings, self.screen))
        self._tries = 0

    def _hear(self, answer: Callable[[], Outcome]) -> None:
        with self.reader.silent():
            try:
                outcome = answer()
            finally:
                self.screen.end()
        self._last = outcome
        if outcome.finish_reason == "cancelled":
            self.screen.note(
                "stopped; what was said so far stays" if outcome.kept else f"stopped before a word; {_AS_IT_WAS}"
            )
        elif outcome.finish_reason == "length":
            full = "context" in outcome.limit
            remedy = "/undo drops the last turn, /clear all" if full else "/set max_tokens N changes that"
            self.screen.note(f"the answer ends here because {outcome.limit}; {remedy}")
        elif not outcome.text:
            self.screen.note("the answer is empty; /retry asks again")
        if outcome.kept:
            self._keep()

    def _keep(self) -> None:
        if self.session is not None:
            self.talk.save(self.session)

    def _recall(self) -> None:
        last = self.talk.last()
        if not self.talk.is_empty:
            self.screen.note("; ".join(line for line in self.talk.show() if line.startswith("tokens")))
        if last is not None:
            self.screen.quote(last.user)
            self.screen.text(last.answer)
            self.screen.end()

    # Commands.

    def help(self, _: str) -> None:
        """/help"""
        for name, command in COMMANDS.items():
            words = f"/{name} {command.usage}".strip()
            self.screen.note(f"{words}: {command.text}")
        self.screen.note("Alt-Enter, or a backslash at the end: another line. // begins a message with a slash.")
        self.screen.note("Ctrl-C stops an answer, Ctrl-D leaves.")

    def set(self, rest: str) -> None:
        """/set NAME VALUE"""
        name, _, value = rest.partition(" ")
        self.settings = self.settings.changed(name, value.strip())
        self.screen.note(f"{name} is {self.settings.values()[name]}")

    def show(self, _: str) -> None:
        """/show"""
        for line in self.talk.show():
            self.screen.note(line)
        self.screen.note("settings: " + ", ".join(f"{name} {value}" for name, value in self.settings.values().items()))
        self.screen.note(f"system: {'none' if self.talk.system is None else self.talk.system}")
        self.screen.note(f"session: {self.session or 'none; /save NAME keeps this conversation'}")

    def system(self, text: str) -> None:
        """/system TEXT"""
        self._restart(text)
        self.screen.note("the conversation begins anew with this system prompt")

    def clear(self, _: str) -> None:
        """/clear"""
        self._restart(self.talk.system)
        self.screen.note("the conversation begins anew")

    def _restart(self, system: str | None) -> None:
        self.talk.restart(system)
        self._tries = 0
        self._keep()

    def save(self, name: str) -> None:
        """/save NAME"""
        self.talk.save(name)
        self.screen.note(f"saved; /load {name} brings it back")

    def load(self, name: str) -> None:
        """/load NAME"""
        self.talk.load(name)
        self._tries = 0
        self._recall()
        self._keep()

    def retry(self, _: str) -> None:
        """/retry"""
        if self.talk.last() is None:
            self.talk.undo()  # says why there is nothing to answer again
        settings = self.settings
        if settings.sampling.temperature == 0:
            self.screen.note("temperature is 0, so the same words come again; /set temperature 0.7 gives others")
        else:
            self._tries += 1
            settings = settings.sampled("seed", settings.sampling.seed + self._tries)
            self.screen.note(f"again with seed {settings.sampling.seed}")
        self._hear(lambda: self.talk.retry(settings, self.screen))

    def undo(self, _: str) -> None:
        """/undo"""
        dropped = self.talk.undo()
        self._tries = 0
        first = " ".join(dropped.user.split())
        self.screen.note(f"dropped: {first[:60]}{'...' if len(first) > 60 else ''}")
        self._keep()

    def stats(self, _: str) -> None:
        """/stats"""
        if self._last is None:
            raise UsageError("nothing was answered yet")
        for line in [*outcome_lines(self._last), *self.talk.stats()]:
            self.screen.note(line)

    def cache(self, _: str) -> None:
        """/cache"""
        for line in self.talk.cache():
            self.screen.note(line)

    def bye(self, _: str) -> None:
        """/bye"""
        self.over = True


COMMANDS = {
    "help": Command(usage="", text="this list", run=Chat.help),
    "set": Command(usage="NAME VALUE", text="change a setting, like /set temperature 0.7", run=Chat.set),
    "show": Command(usage="", text="the model, the cache, the settings and the tokens", run=Chat.show),
    "system": Command(usage="TEXT", text="begin anew with this system prompt", run=Chat.system),
    "clear": Command(usage="", text="begin anew", run=Chat.clear),
    "save": Command(usage="NAME", text="keep the conversation as it is now", run=Chat.save),
    "load": Command(usage="NAME", text="go on with a conversation that was kept", run=Chat.load),
    "retry": Command(usage="", text="drop the last answer and answer again with another seed", run=Chat.retry),
    "undo": Command(usage="", text="drop the last turn", run=Chat.undo),
    "stats": Command(usage="", text="what the last answer took", run=Chat.stats),
    "cache": Command(usage="", text="what the prefix cache holds and saved", run=Chat.cache),
    "bye": Command(usage="", text="leave", run=Chat.bye),
}
