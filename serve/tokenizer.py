"""Text <-> token ids: the model's own tokenizer and chat template, and text that streams without broken characters."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvarn.errors import ModelError, UsageError


class Tokenizer:
    """A model folder's tokenizer, through transformers."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        try:
            self._inner: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"the tokenizer in {model_dir} cannot be used: {first}") from error
        if getattr(self._inner, "backend_tokenizer", None) is None:
            raise ModelError(f"the tokenizer in {model_dir} has no tokenizer.json form; convert it first")

    @property
    def has_chat_template(self) -> bool:
        """Whether the model comes with a chat template."""
        return self._inner.chat_template is not None

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end token."""
        token: int | None = self._inner.eos_token_id
        return token

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer itself puts around it."""
        ids: list[int] = self._inner(text)["input_ids"]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the answer; UsageError if it refuses."""
        from jinja2 import TemplateError

        try:
            text = self._inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError) as error:
            raise UsageError(f"the model's chat template refuses these messages: {error}; try --raw") from error
        ids: list[int] = self._inner(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self) -> "TextStream":
        """A fresh stream of text."""
        return TextStream(self)


class TextStream:
    """Token ids in, whole characters out: a character is held back until its last byte is there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self.text = ""

    def add(self, token: int) -> str:
        """The text that this token completes, possibly none."""
        self._ids.append(token)
        fresh = self._stream.step(self._tokenizer._inner.backend_tokenizer, token) or ""
        self.text += fresh
        return fresh

    def finish(self) -> str:
        """What is still held back: an incomplete character comes out as U+FFFD."""
        rest = self._tokenizer.decode(self._ids)[len(self.text) :]
        self.text += rest
        return rest
