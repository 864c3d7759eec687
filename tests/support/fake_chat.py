"""A chat over the fake backend and a tokenizer of one character a token; as a program, a chat on its own terminal."""

import argparse
import time
from collections.abc import Mapping, Sequence

from fake_backend import FakeBackend, next_token

from kvarn.engine import Engine, EngineConfig
from kvarn.errors import UsageError
from kvarn.format import Preset
from kvarn.sampling import SamplingParams
from kvarn.serve.chat.local import LocalModel, LocalTalk
from kvarn.serve.chat.settings import Settings
from kvarn.serve.sessions import Session
from kvarn.step import StepPlan, StepResult

ALPHABET = [chr(32 + i) for i in range(95)] + ["\n", "\x1b"]


class FakeTokenizer:
    """One token per character of ALPHABET; others count as the first. A message is `<role>text`, one a line."""

    has_chat_template = True
    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return [ALPHABET.index(c) if c in ALPHABET else 0 for c in text]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if any(message["content"] == "refuse me" for message in messages):
            raise UsageError("the template refuses: as asked")
        return self.encode("".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>")

    def encode_next_turn(self, text: str) -> list[int]:
        return self.encode("\n") + self.encode_chat([{"role": "user", "content": text}])

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(ALPHABET[token] for token in ids)

    def token_bytes(self, token: int) -> bytes:
        return ALPHABET[token].encode()

    def stream(self) -> "FakeStream":
        return FakeStream()


class FakeStream:
    """Every token is a whole character."""

    def add(self, token: int) -> str:
        return ALPHABET[token]

    def finish(self) -> str:
        return ""


class SlowBackend(FakeBackend):
    """The fake backend with `seconds` a step."""

    seconds = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        time.sleep(self.seconds)
        return super().run(plan)


def answer_to(text: str, count: int) -> str:
    """The fake model's answer to a conversation as the template writes it."""
    history = FakeTokenizer().encode(text)
    start = len(history)
    for _ in range(count):
        history.append(next_token(history))
    return FakeTokenizer().decode(history[start:])


def fake_talk(*, context: int = 1024, seconds: float = 0.0, system: str | None = None) -> LocalTalk:
    """A conversation with the fake model, in tiles of 64 tokens."""
    backend = SlowBackend(Preset(tile_tokens=64))
    backend.seconds = seconds
    engine = Engine(backend, EngineConfig(context=context, prefill_chunk=128))
    model = LocalModel(
        name="fake",
        about="a test",
        tokenizer=FakeTokenizer(),  # type: ignore[arg-type]
        engine=engine,
        identity="t",
    )
    return LocalTalk(model, Session(tokens=(), tokenizer="t", system=system))


if __name__ == "__main__":
    from kvarn.serve.chat.chat import ChatOptions, converse

    parser = argparse.ArgumentParser()
    parser.add_argument("--max-tokens", type=int, default=20)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--session")
    asked = parser.parse_args()
    first = Settings(sampling=SamplingParams(temperature=asked.temp), max_tokens=asked.max_tokens)
    converse(fake_talk(seconds=asked.seconds), ChatOptions(settings=first, session=asked.session))
