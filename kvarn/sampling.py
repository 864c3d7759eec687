"""Sampling parameters, the order in which they apply, and the random numbers of a request.

Order: the constraint, which takes out for good every token that it does not allow; logit bias; repetition penalty;
presence and frequency penalties; temperature; top-k; top-p; min-p; then one token by inverse transform: the surviving
tokens stand in descending order of probability (ties by lower id first), and the first one at which the cumulative
share exceeds the row's `uniform` is taken. Temperature 0 takes the token with the highest logit after bias and
penalties (ties: the lowest id).

* repetition r: for every token of the prompt or the answer so far, a positive logit is divided by r, another
  multiplied.
* presence p, frequency f: for every token of the answer so far, its logit loses p + f * (how often it stands there).
* top-k keeps the k most probable tokens; top-p the smallest head of what is left whose share reaches p; min-p tokens
  with at least min_p times the probability of the most probable one, which always survives.

Log-probabilities are those of the model's own distribution, before any of this.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvarn.errors import UsageError
from kvarn.step import SamplingRow


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen; checked when built (UsageError).

    logprobs: how many of the most probable tokens to report beside the chosen one's log-probability.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise UsageError(f"temperature {self.temperature} is not between 0 (greedy) and 100")
        if self.top_k < 0:
            raise UsageError(f"top_k {self.top_k} is negative; 0 means all tokens")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p {self.top_p} is not above 0 and at most 1; 1 means all tokens")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p {self.min_p} is not between 0 and 1; 0 means all tokens")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise UsageError(f"repetition_penalty {self.repetition_penalty} is not between 0.01 and 100; 1 means none")
        for name, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not -100 <= value <= 100:
                raise UsageError(f"{name}_penalty {value} is not between -100 and 100; 0 means none")
        for token, bias in self.logit_bias.items():
            if token < 0 or not -1000 <= bias <= 1000:
                raise UsageError(f"logit_bias of {bias} for token {token} is not a token id with -1000 to 1000")
        if self.logprobs < 0:
            raise UsageError(f"logprobs {self.logprobs} is negative; 0 means only the chosen token's")

    def row(
        self, prompt: Sequence[int], answer: Sequence[int], choice: int = 0, allowed: bytes | None = None
    ) -> SamplingRow:
        """The sampling row of the next token of a request's `choice`-th answer; `allowed` is a constraint's mask."""
        counted = self.presence_penalty != 0 or self.frequency_penalty != 0
        return SamplingRow(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seen=tuple(sorted({*prompt, *answer})) if self.repetition_penalty != 1 else (),
            counts=tuple(sorted(Counter(answer).items())) if counted else (),
            logit_bias=tuple(sorted(self.logit_bias.items())),
            logprobs=self.logprobs,
            allowed=allowed,
            uniform=uniform(self.seed, choice, len(answer)) if self.temperature > 0 else 0.0,
        )


def uniform(seed: int, choice: int, index: int) -> float:
    """The random number in [0, 1) of the `index`-th token of a request's `choice`-th answer: 53 bits of sha256."""
    digest = hashlib.sha256(f"{seed}:{choice}:{index}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / 2**53
