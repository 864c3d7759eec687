"""Makers of constraints: a JSON schema, a regular expression or a Lark grammar, over one model's tokenizer.

llguidance does the work. What is wrong with a schema or a grammar is said here, before a request runs (UsageError).
"""

import json
import math
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from kvarn.constraint import Constraint, ConstraintMaker
from kvarn.errors import ConstraintError, UsageError
from kvarn.serve.schemas import check_schema
from kvarn.serve.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 64 << 10
MAX_GRAMMAR_LINES = 1000
MAX_FORCED = 4096
MAX_LEXER_STATES = 50_000  # 1 to 2 kB each

_BUILD_STACK_BYTES = 256 << 20  # virtual: a long chain of rules is a deep recursion while it is built
_SPACING = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}
"""JSON without line breaks, and with one space after a comma or a colon or none: no white space without end."""

_NOT_FORCED = '%llguidance {"no_forcing": true}\n'


class Structured:
    """The constraints of one model; safe to use from any thread.

    vocab_size: of the logits. A token that the tokenizer does not have is never allowed, nor is a control token, unless
    a Lark grammar names it. The tokenizer's data is built at the first use and takes about a second.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._inner: LLTokenizer | None = None

    def json_object(self) -> ConstraintMaker:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any] | bool) -> ConstraintMaker:
        """A JSON value that a schema accepts; UsageError for a schema that cannot be met or is not understood whole."""
        return self.lark(f"start: {json_rule(schema)}", what="the JSON schema")

    def regex(self, pattern: str) -> ConstraintMaker:
        """A text that a regular expression (Rust's syntax, without look-around) matches as a whole."""
        what = "the regular expression"
        _check_size(pattern, what)
        return self._maker(_NOT_FORCED + f"start: /{_in_slashes(pattern)}/", what)

    def grammar(self, text: str) -> ConstraintMaker:
        """A text of a Lark grammar that a user wrote; its first rule is `start`."""
        what = "the grammar"
        _check_size(text, what)
        if "::=" in text:
            raise UsageError(
                'this is a GBNF grammar, and grammar takes Lark: root ::= "a" [0-9]+ becomes start: "a" /[0-9]+/'
            )
        if text.count("\n") >= MAX_GRAMMAR_LINES:
            raise UsageError(f"the grammar has more than {MAX_GRAMMAR_LINES} lines; make it smaller")
        return self._maker(_NOT_FORCED + text, what)

    def lark(self, text: str, *, what: str = "the grammar") -> ConstraintMaker:
        """A Lark grammar that this program wrote, from `json_rule`, `literal` and `special` where others' words go in.

        Free text up to a trigger, which then asks for something, is a rule like `head[suffix="<call>"]: /(?s:.*)/`;
        before and after it the text is free: `start: (head call)* /(?s:.*)/`. Where only one text can follow, it is
        tokenized as the tokenizer itself would.
        """
        return self._maker(text if _short(text) else _NOT_FORCED + text, what)

    def _maker(self, grammar: str, what: str) -> ConstraintMaker:
        """Build a grammar and look at its beginning, so that every answer starts from a copy that is warm."""
        tokenizer = self._ready()
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        source = LLMatcher.grammar_from_lark(grammar)
        matcher = _with_stack(lambda: LLMatcher(tokenizer, source, log_level=0, limits=limits))
        if matcher.is_error():
            raise UsageError(f"{what} cannot be used: {_reason(matcher.get_error())}")
        try:
            first = _Matching(matcher, self._vocab_size)
            nothing = not any(first.allowed())
        except ConstraintError as error:
            raise UsageError(f"{what} cannot be met: {error}") from error
        if nothing:
            why = "it allows nothing but the empty answer" if first.may_end else "it allows no beginning"
            raise UsageError(f"{what} cannot be met: {why}")

        def make() -> Constraint:
            return _Matching(matcher.deep_copy(), self._vocab_size)

        return make

    def _ready(self) -> LLTokenizer:
        with self._lock:
            if self._inner is None:
                self._inner = LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size)))
            return self._inner


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """A JSON schema as the body of a Lark rule, all in one line; UsageError names what it does not support."""
    return "%json " + json.dumps(check_schema(schema) | {"x-guidance": _SPACING})


def literal(text: str) -> str:
    """A text as a Lark string."""
    return json.dumps(text)


def special(token: int) -> str:
    """A token by its id, as Lark knows it: the one way in which a control token is allowed."""
    return f"<[{token}]>"


class _Matching:
    """kvarn.constraint.Constraint over llguidance, which raises nothing itself."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // 32)
        self._end = vocab_size  # llguidance's own end token stands behind the vocabulary

    def allowed(self) -> bytes:
        """See kvarn.constraint.Constraint."""
        if self._matcher.is_stopped():
            self._check()
            return bytes(self._words * 4)
        mask = bytearray(self._matcher.compute_bitmask())
        self._check()
        if self._end // 8 < len(mask):
            mask[self._end // 8] &= ~(1 << self._end % 8)
        return bytes(mask[: self._words * 4])

    def accept(self, token: int) -> None:
        """See kvarn.constraint.Constraint."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def may_end(self) -> bool:
        """See kvarn.constraint.Constraint."""
        return self._matcher.is_accepting()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(_reason(self._matcher.get_error()))


class _Vocabulary:
    """A tokenizer as llguidance wants to see it, with an end token of its own behind the vocabulary."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = vocab_size
        self.tokens = [*(tokenizer.token_bytes(token) for token in range(vocab_size)), b"<end>"]
        self.special_token_ids = [*(token for token in range(vocab_size) if tokenizer.is_special(token)), vocab_size]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode()
        return self._tokenizer.encode_more(text)


_REASONS = {
    "NoExtensionBias": "no token can follow, and the answer is not complete",
    "ParserTooComplex": "the grammar is too ambiguous to follow",
    "LexerTooComplex": "its regular expressions take too much to follow",
    "oneOf constraints are not": "the cases of a oneOf must exclude each other by type or a constant; write an anyOf",
    "recursion limit exceeded": "it is nested too deeply; put parts of it in $defs",
    "not present in a registry": "a $ref leads out of the schema, and nothing is fetched; put what it means in $defs",
}


def _reason(error: str) -> str:
    """llguidance's error in one line, without the grammar that it quotes."""
    for mark, reason in _REASONS.items():
        if mark in error:
            return reason
    lines = [line.strip() for line in error.splitlines() if line.strip() and "<non-verbose/>" not in line]
    last = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    head = lines[0] if lines else "unknown"
    if "regex parse error" in error:
        return f"a regular expression is wrong: {last[0] if last else head}"[:300]
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?|\(at \".*$", "", head)[:300]


def _check_size(text: str, what: str) -> None:
    if not text:
        raise UsageError(f"{what} is empty")
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise UsageError(f"{what} has {len(text.encode())} bytes, and at most {MAX_GRAMMAR_BYTES} are taken")


def _in_slashes(pattern: str) -> str:
    """A regular expression that stands between two slashes in one line."""
    escaped = re.sub(r"\\.|/", lambda m: r"\/" if m[0] == "/" else m[0], pattern, flags=re.DOTALL)
    return escaped.replace("\n", r"\n").replace("\r", r"\r")


def _short(text: str) -> bool:
    """Whether no text that this grammar forces is so long that finding it would hold up the other answers."""
    counts = [int(x) for x in re.findall(r"\{(\d{1,9})", text)]
    lengths = [int(x) for x in re.findall(r'"min(?:Length|Items)": (\d{1,18})', text)]
    strings = [len(x) for x in re.findall(r'"(?:[^"\\]|\\.)*"', text)]
    return math.prod(counts) <= MAX_FORCED and max([0, *lengths, *strings]) <= MAX_FORCED


def _with_stack(build: Callable[[], LLMatcher]) -> LLMatcher:
    """Run on a thread with a deep stack."""
    result: list[LLMatcher] = []
    with _stack_lock:
        old = threading.stack_size(_BUILD_STACK_BYTES)
        try:
            thread = threading.Thread(target=lambda: result.append(build()), name="kvarn-grammar")
            thread.start()
        finally:
            threading.stack_size(old)
    thread.join()
    return result[0]


_stack_lock = threading.Lock()
