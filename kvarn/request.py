"""A request: what was asked for, and its counters while it waits, runs and ends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvarn.constraint import ConstraintMaker, Guide
from kvarn.errors import KvarnError, UsageError
from kvarn.keys import Key
from kvarn.sampling import SamplingParams
from kvarn.stopping import StopStrings
from kvarn.tier import Fetch

FinishReason = Literal["stop", "length", "error", "cancelled"]


class TextStream(Protocol):
    """Token ids in, whole characters out."""

    def add(self, token: int) -> str:
        """The text that this token completes, possibly none."""

    def finish(self) -> str:
        """What is still held back."""


@dataclass(frozen=True, kw_only=True)
class RequestParams:
    """What the caller asks for; checked when built.

    prompt: token ids, at least one. max_tokens: the most tokens to generate; 0 only computes the prompt.
    n: how many answers to the same prompt. stop_token_ids end an answer and are not part of it; so do the strings of
    `stop`, which need `text`, the maker of a text stream. return_logits: every step returns the logits of the prompt
    tokens that it ran, for scoring; then max_tokens is 0. tenant: whose prefix cache this is; nothing is shared
    between tenants. constraint: makes the grammar that an answer keeps to, one for each.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    text: Callable[[], TextStream] | None = None
    return_logits: bool = False
    tenant: str = ""
    constraint: ConstraintMaker | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UsageError("the prompt is empty; give at least one token")
        if self.max_tokens < 0 or (self.return_logits and self.max_tokens):
            raise UsageError(f"max_tokens {self.max_tokens} is not possible here; use 0 or more, and 0 for scoring")
        if self.n < 1 or (self.n > 1 and not self.max_tokens):
            raise UsageError(f"n = {self.n} answers are not possible here; use 1 or more, and 1 without an answer")
        if not all(self.stop):
            raise UsageError("a stop string is empty; give at least one character")
        if self.stop and self.text is None:
            raise UsageError("stop strings need a text stream")


@dataclass(kw_only=True)
class Times:
    """When things happened, in seconds of the engine's clock."""

    arrived: float = 0.0
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(kw_only=True, eq=False)
class Request:
    """The state of one answer. `tokens` is the prompt and what was generated; the scheduler alone writes here.

    The answers of one call share its `group`; `choice` tells them apart.
    """

    group: int
    params: RequestParams
    tokens: list[int]
    choice: int = 0
    to_fork: int = 0  # further answers that fork from this one when the prompt is computed
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, reused instead of computed, when it was first admitted
    num_preemptions: int = 0
    num_scored_tokens: int = 0  # whose logits were returned
    slots: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)  # of the full tiles of `tokens`
    fetch: Fetch | None = None  # tiles on their way from the tier below
    stream: TextStream | None = None
    stops: StopStrings | None = None
    guide: Guide | None = None  # its way through the constraint; advances with `tokens`, whatever is recomputed
    times: Times = field(default_factory=Times)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.params.prompt)

    @property
    def answer(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[len(self.params.prompt) :]

    @property
    def num_generated_tokens(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - len(self.params.prompt)


@dataclass(frozen=True, kw_only=True)
class Event:
    """What one step did for one request.

    token: a generated token (never a stop token), with its log-probability and those of the most probable tokens.
    text: what became certain of the answer's text, where a text stream was asked for. logits: float32 `[n, vocab]` of
    the n prompt tokens that the step ran. finish_reason is set on a request's last event, with `error` where that is
    the reason.
    """

    request: Request
    token: int | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    text: str = ""
    logits: NDArray[np.float32] | None = None
    finish_reason: FinishReason | None = None
    error: KvarnError | None = None
