"""Text <-> token ids: the model's own tokenizer and chat template, and text that streams without broken characters."""

import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.backend import ModelInfo
from kvarn.errors import ModelError, UsageError
from kvarn.serve.toolcalls.learn import ChatFormat, learn

_FOREIGN_ROLES = {"user", "tool"}  # whose text comes from outside the conversation's author


@dataclass(frozen=True)
class JsonText:
    """A JSON text in a message. A template sees its value; in the prompt stands this text wherever the template writes
    the value as JSON. value: an object, or the text itself where it is none."""

    text: str
    value: Any


@dataclass(frozen=True)
class MarkedText:
    """A message's text of which every second piece is a mark, which may be a control token."""

    pieces: tuple[str, ...]


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

    def encode_more(self, text: str) -> list[int]:
        """Token ids of a text that goes on after others."""
        ids: list[int] = self._inner(text, add_special_tokens=False)["input_ids"]
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the answer; UsageError if it refuses.

        With `continue_final` the last message stays open, and the answer goes on where it ends. No text of a message
        becomes a control token: a message that spells one is tokenized as plain text, apart from the template. Any
        other conversation is tokenized as one string. tools, variables: for the template. A message's values may hold
        JsonText, and its texts be MarkedText.
        """
        hidden = _Hidden(secrets.token_hex(8))
        masked = [self._mask(message, hidden) for message in messages]
        described = [self._mask_within(tool, "system", hidden) for tool in tools]
        rendered = hidden.put_json(self.render(masked, continue_final, described, variables))
        if rendered is None:  # the template takes arguments apart, so it gets them as they are
            plain = [self._mask(_without_json(message), hidden) for message in messages]
            rendered = self.render(plain, continue_final, described, variables)
        return self._encode_rendered(rendered, hidden)

    def encode_next_turn(self, text: str) -> list[int]:
        """Token ids that follow an answer: its end as the template writes it, a user's next message, and the beginning
        of the next answer. UsageError where the template does not write an answer as it is.
        """
        hidden = _Hidden(secrets.token_hex(8))
        user = self._mask({"role": "user", "content": text}, hidden)
        answer = f"{hidden.nonce}answer"
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}, user]
        _, found, rest = self.render(turns).rpartition(answer)
        if not found:
            raise UsageError("the model's chat template drops answers, so a conversation cannot go on; use --raw")
        return self._encode_rendered(rest, hidden)

    def _encode_rendered(self, rendered: str, hidden: "_Hidden") -> list[int]:
        ids: list[int] = []
        # Template text and the numbers of hidden texts take turns.
        for i, piece in enumerate(re.split(f"{hidden.nonce}x([0-9]+)x{hidden.nonce}", rendered)):
            if i % 2:
                ids += self._encode_plain(*hidden.texts[int(piece)])
            elif hidden.nonce in piece:
                raise UsageError(
                    "the model's chat template cuts messages, so one that spells a control token is refused"
                )
            elif piece:
                ids += self._inner(piece, add_special_tokens=False)["input_ids"]
        return ids

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        prompt: bool = True,
    ) -> str:
        """The conversation as the chat template writes it; UsageError if it refuses. prompt: with the beginning of the
        answer."""
        try:
            text: str = self._inner.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=prompt and not continue_final,
                continue_final_message=continue_final,
                **(variables or {}),
            )
        except Exception as error:  # the template is the model's own program, and runs in jinja's sandbox
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UsageError(
                f"the model's chat template refuses these messages: {first}; send the text as a raw prompt "
                "(--raw, or /v1/completions)"
            ) from error
        return text

    def _mask(self, message: Mapping[str, Any], hidden: "_Hidden") -> dict[str, Any]:
        """The message with each text that spells a control token replaced by a word that no template changes."""
        role = message.get("role", "")
        control = self._control_texts(role)
        masked = dict(message)
        for name, text in message.items():
            if isinstance(text, MarkedText):
                pieces = [x if i % 2 else self._mask_within(x, role, hidden) for i, x in enumerate(text.pieces)]
                masked[name] = "".join(pieces)
            elif not isinstance(text, str):
                masked[name] = self._mask_within(text, role, hidden)
            elif name != "role" and self._spells(text, control):
                core = text.strip()
                before, _, after = text.partition(core)  # templates may trim, so the outer spaces stay outside
                masked[name] = f"{before}{hidden.word(core, role)}{after}"
        return masked

    def _mask_within(self, value: Any, role: str, hidden: "_Hidden") -> Any:
        """The same for the texts within a value. A template may write them as JSON, so only the names of the control
        tokens are replaced."""
        if isinstance(value, JsonText):
            return hidden.json_word(self._mask_within(value.text, role, hidden))
        if isinstance(value, Mapping):
            return {self._mask_within(k, role, hidden): self._mask_within(x, role, hidden) for k, x in value.items()}
        if isinstance(value, list | tuple):
            return [self._mask_within(x, role, hidden) for x in value]
        if not isinstance(value, str):
            return value
        control = self._control_texts(role)
        if not self._spells(value, control):
            return value
        names = "|".join(re.escape(token) for token in sorted(control, key=len, reverse=True))
        masked = re.sub(names, lambda found: hidden.word(found[0], role), value)
        if self._spells(masked, control):
            raise UsageError("a text within tools or arguments becomes a control token when it is normalized; drop it")
        return masked

    def _spells(self, text: str, control: tuple[str, ...]) -> bool:
        if any(token in text for token in control):
            return True
        normalizer = self._inner.backend_tokenizer.normalizer
        if normalizer is None:
            return False
        normalized = normalizer.normalize_str(text)
        return any(token in normalized for token in control)

    @functools.cached_property
    def _added(self) -> dict[int, tuple[str, bool]]:
        """The added tokens: id -> text, and whether it is special."""
        decoder = self._inner.backend_tokenizer.get_added_tokens_decoder()
        return {int(index): (token.content, bool(token.special)) for index, token in decoder.items()}

    def _control_texts(self, role: str) -> tuple[str, ...]:
        """The tokens that no text of this role may become: the special ones; for users and tools also added ones that
        the chat template writes (like `<tool_call>`), which an assistant's message may rightly hold."""
        template = self._inner.chat_template or ""
        return tuple(
            text
            for text, special in self._added.values()
            if text.strip() and (special or (role in _FOREIGN_ROLES and text in str(template)))
        )

    def _encode_plain(self, text: str, role: str) -> list[int]:
        control = self._control_texts(role)
        ids: list[int] = self._plain_tokenizer(control).encode(text, add_special_tokens=False).ids
        texts = {self._added[index][0] for index in ids if index in self._added}
        if found := sorted(texts & set(control)):
            raise UsageError(
                f"this model's tokenizer cannot tell the text {found[0]!r} from its control token; drop it"
            )
        return ids

    @functools.cached_property
    def _plain_tokenizers(self) -> dict[tuple[str, ...], Any]:
        return {}

    def _plain_tokenizer(self, control: tuple[str, ...]) -> Any:
        """A copy of the tokenizer in which the control tokens are text like any other."""
        from tokenizers import Tokenizer as Backend

        if control not in self._plain_tokenizers:
            content = json.loads(self._inner.backend_tokenizer.to_str())
            for token in content["added_tokens"]:
                token["special"] = token["content"] in control
            plain = Backend.from_str(json.dumps(content))
            plain.encode_special_tokens = True
            self._plain_tokenizers[control] = plain
        return self._plain_tokenizers[control]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text

    def spell(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens by their names."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=False)
        return text

    def is_special(self, token: int) -> bool:
        """Whether a token is none of the text's."""
        return token in self._added and self._added[token][1]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, be they a whole character or not; a control token's are its name."""
        if token in self._added:
            return self._added[token][0].encode()
        piece: str | None = self._inner.backend_tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(_BYTES[c] for c in piece if c in _BYTES)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    @functools.cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._inner.backend_tokenizer.to_str())["decoder"])

    def stream(self, shown: frozenset[int] = frozenset()) -> "TextStream":
        """A fresh stream of text. shown: special tokens that are not left out."""
        return TextStream(self, shown)

    def special_in(self, text: str) -> frozenset[int]:
        """The special tokens whose names stand in a text."""
        return frozenset(token for token, (name, special) in self._added.items() if special and name in text)

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens by name."""
        return {name: token for token, (name, special) in self._added.items() if special}

    @property
    def template(self) -> str:
        """The chat template's program; empty where there is none."""
        template = self._inner.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        return str(template or "")

    @functools.cached_property
    def chat_format(self) -> ChatFormat:
        """What the chat template can do with tools and thoughts."""
        return learn(self)

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The chat template's variables that a caller may set."""
        from jinja2 import Environment, TemplateSyntaxError, meta

        try:
            tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", self.template))
        except TemplateSyntaxError:
            return frozenset()
        own = _OWN_VARIABLES | set(self._inner.special_tokens_map)
        return frozenset(name for name in meta.find_undeclared_variables(tree) if name not in own)


# What the renderer itself gives to a template, and its tag that jinja does not know.
_OWN_VARIABLES = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "raise_exception",
    "strftime_now",
}
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


class _Hidden:
    """Texts that take no part in the rendering, and the words that stand for them."""

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self.texts: list[tuple[str, str]] = []  # text, role
        self._json: list[str] = []

    def word(self, text: str, role: str) -> str:
        """A word for a text that is tokenized apart."""
        self.texts.append((text, role))
        return f"{self.nonce}x{len(self.texts) - 1}x{self.nonce}"

    def json_word(self, text: str) -> dict[str, int]:
        """A JSON object for a JSON text."""
        self._json.append(text)
        return {f"{self.nonce}j{len(self._json) - 1}j{self.nonce}": 0}

    def put_json(self, rendered: str) -> str | None:
        """The rendered text with the JSON texts in it; None if the template did not write all of them as JSON."""
        pattern = rf'\{{\s*"{self.nonce}j([0-9]+)j{self.nonce}"\s*:\s*0\s*\}}'
        put = re.sub(pattern, lambda found: self._json[int(found[1])], rendered)
        return None if f"j{self.nonce}" in put else put


def _without_json(value: Any) -> Any:
    if isinstance(value, JsonText):
        return value.value
    if isinstance(value, Mapping):
        return {name: _without_json(x) for name, x in value.items()}
    return [_without_json(x) for x in value] if isinstance(value, list) else value


def stop_token_ids(info: ModelInfo, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer: the model's, else the tokenizer's own."""
    own = tokenizer.eos_token_id
    return frozenset(info.eos_token_ids or (() if own is None else (own,)))


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes as: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_characters()


class TextStream:
    """Token ids in, whole characters out: a character is held back until its last byte is there."""

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int] = frozenset()) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._shown = shown
        self._stream: Any = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self.text = ""

    def add(self, token: int) -> str:
        """The text that this token completes, possibly none."""
        if self._tokenizer.is_special(token) and token not in self._shown:
            return ""
        self._ids.append(token)
        fresh = self._step(token)
        self.text += fresh
        return fresh

    def _step(self, token: int) -> str:
        if self._stream is not None:
            try:
                return self._stream.step(self._tokenizer._inner.backend_tokenizer, token) or ""
            except Exception:  # it gives up on some byte sequences, for good; the engine must not end with it
                self._stream = None
        text = self._tokenizer.spell(self._ids)
        if text.endswith("\ufffd") or not text.startswith(self.text):
            return ""
        return text[len(self.text) :]

    def finish(self) -> str:
        """What is still held back: an incomplete character comes out as U+FFFD."""
        rest = self._tokenizer.spell(self._ids)[len(self.text) :]
        self.text += rest
        return rest
