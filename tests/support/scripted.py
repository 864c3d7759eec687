"""A model that says what a script has for it, over a tokenizer of one character a token and any chat template."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fake_backend import FakeBackend
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvarn.format import Preset
from kvarn.serve.tokenizer import Tokenizer

CHARACTERS = [chr(32 + i) for i in range(95)] + ["\n", "é", "日", "｜"]
END = "<|im_end|>"
MARK = "<|im_start|>assistant\n"

Script = Callable[[str], str]
"""A prompt's text -> the answer to it."""


def character_tokenizer(
    folder: Path, template: str, *, special: Sequence[str] = (), added: Sequence[str] = ()
) -> Tokenizer:
    """A tokenizer of characters, with control tokens (`special`) and other tokens (`added`) of more than one."""
    vocab = {char: index for index, char in enumerate(CHARACTERS)}
    backend = Backend(models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    backend.decoder = decoders.Fuse()  # type: ignore[assignment]
    inner: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    inner.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *special]})
    inner.add_tokens(list(added))
    inner.chat_template = template
    inner.save_pretrained(folder)
    return Tokenizer(folder)


class Scripted(FakeBackend):
    """What follows the last one of `marks` is what the script says to the text up to there; then the answer ends.

    Under a constraint that forbids the next token it ends, or says what may bring it to an end.
    """

    def __init__(self, preset: Preset, tokenizer: Tokenizer, script: Script, *marks: str, **fields: Any) -> None:
        end = tokenizer.eos_token_id
        assert end is not None
        super().__init__(preset, eos=(end,), vocab_size=len(tokenizer._inner), **fields)
        self.script = script
        self._marks = [tokenizer.encode_more(mark) for mark in marks or (MARK,)]
        self._end = end
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._closing = tokenizer.encode_more('"}])')
        self._tokenizer = tokenizer

    def _answer(self, prompt: tuple[int, ...], *, begins: bool) -> list[int]:
        if begins or prompt not in self._answers:
            text = self.script(self._tokenizer.spell(prompt))
            self._answers[prompt] = [*self._tokenizer.encode_more(text), self._end]
        return self._answers[prompt]

    def choose(self, history: Sequence[int], allowed: bytes | None) -> int:
        """See FakeBackend."""
        place = max(_after_last(history, mark) for mark in self._marks)
        said = list(history[place:])
        answer = self._answer(tuple(history[:place]), begins=not said)
        token = answer[len(said)] if said == answer[: len(said)] else self._end
        if allowed is None:
            return token
        own = [t for t in range(len(allowed) * 8) if allowed[t // 8] >> t % 8 & 1]
        return next(t for t in (token, self._end, *self._closing, *own) if t in own)


def _after_last(tokens: Sequence[int], mark: Sequence[int]) -> int:
    """The place after the last occurrence of a mark; 0 without one."""
    for end in range(len(tokens), len(mark) - 1, -1):
        if list(tokens[end - len(mark) : end]) == list(mark):
            return end
    return 0
