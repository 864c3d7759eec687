"""StepPlan and StepResult: the only things that cross between the core and a backend. Host data only, picklable."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Want = Literal["none", "last", "all"]


@dataclass(frozen=True, kw_only=True)
class SamplingRow:
    """How to choose the next token of one span; kvarn.sampling says in which order the parts apply.

    `uniform` in [0, 1) is this token's random number, drawn by the core from the request's seed, so that a request
    gives the same tokens alone and in a batch, on every backend.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seen: tuple[int, ...] = ()  # tokens of prompt and answer, for the repetition penalty
    counts: tuple[tuple[int, int], ...] = ()  # tokens of the answer and how often, for the other two
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = 0  # how many of the most probable tokens to report
    allowed: bytes | None = None  # the mask of the tokens that may be chosen, see kvarn.constraint; None: all
    uniform: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Span:
    """One sequence's part of a step.

    tokens: ids to run, the first at position `start`.
    slots: exact slots, in the order of the tiles that they hold. Under a preset: the sink, then (once a token
        reaches tile 1) the tail; while tile 0 fills, the sink slot is the tail. Under `exact`: one slot per tile.
    blocks: the blocks of the sealed tiles 1, 2, ... that are complete before this span.
    seal_into: block ids for the tiles that this span completes, in order.
    want: which logits; `sampling` None returns them, else a token is sampled on the device from the last ones.
    """

    tokens: tuple[int, ...]
    start: int
    slots: tuple[int, ...]
    blocks: tuple[int, ...] = ()
    seal_into: tuple[int, ...] = ()
    want: Want = "last"
    sampling: SamplingRow | None = None

    def __post_init__(self) -> None:
        assert self.tokens, "a span runs at least one token"
        assert self.slots, "a span has at least its sink slot"
        assert self.sampling is None or self.want == "last", "sampling wants the last logits"

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    @property
    def num_logits(self) -> int:
        """How many of its tokens give logits: its last ones."""
        return {"none": 0, "last": 1, "all": len(self.tokens)}[self.want]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one step runs. The same plan means the same on every backend."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A tile of one span that could not be sealed; its request ends with this error."""

    span: int
    layer: int
    kv_head: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SpanOutput:
    """What a span asked for: a sampled token with its log-probability and those of the most probable tokens, or
    logits float32 `[1 or N, vocab]`."""

    token: int | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    logits: NDArray[np.float32] | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One output per span, in order, and the failures read from the status words."""

    outputs: tuple[SpanOutput, ...]
    failures: tuple[Failure, ...] = ()
