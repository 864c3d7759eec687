"""A request: what was asked for, and its counters while it waits, runs and ends."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvarn.errors import KvarnError, UsageError
from kvarn.sampling import SamplingParams

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, kw_only=True)
class RequestParams:
    """What the caller asks for; checked when built.

    prompt: token ids, at least one. max_tokens: the most tokens to generate; 0 only computes the prompt.
    stop_token_ids end the answer and are not part of it. return_logits: every step returns the logits of the tokens
    that it ran, for scoring; then max_tokens is 0.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    return_logits: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UsageError("the prompt is empty; give at least one token")
        if self.max_tokens < 0 or (self.return_logits and self.max_tokens):
            raise UsageError(f"max_tokens {self.max_tokens} is not possible here; use 0 or more, and 0 for scoring")


@dataclass(kw_only=True)
class Request:
    """The state of one request. `tokens` is the prompt and what was generated; the scheduler alone writes here."""

    id: int
    params: RequestParams
    tokens: list[int]
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, restored instead of computed
    slots: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.params.prompt)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.params.prompt)


@dataclass(frozen=True, kw_only=True)
class Event:
    """What one step did for one request.

    token: a generated token (never a stop token). logits: float32 `[n, vocab]` of the n prompt tokens that the step
    ran. finish_reason is set on the request's last event, with `error` where that is the reason.
    """

    request: Request
    token: int | None = None
    logprob: float | None = None
    logits: NDArray[np.float32] | None = None
    finish_reason: FinishReason | None = None
    error: KvarnError | None = None
