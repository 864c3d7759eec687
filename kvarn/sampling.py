"""Sampling parameters, the order in which they apply, and the random numbers of a request.

Order: temperature, top-k, top-p, min-p; then one token by inverse transform: the surviving tokens stand in
descending order of probability (ties by lower id first), and the first one at which the cumulative share exceeds the
row's `uniform` is taken. Temperature 0 takes the most probable token (ties: the lowest id) and applies nothing else.
top-p keeps the smallest head of that order whose probability reaches p; min-p keeps tokens with at least min_p times
the probability of the most probable one. The most probable token always survives.
"""

import hashlib
from dataclasses import dataclass

from kvarn.errors import UsageError
from kvarn.step import SamplingRow


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen; checked when built (UsageError)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
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

    def row(self, index: int) -> SamplingRow:
        """The sampling row of a request's `index`-th generated token."""
        return SamplingRow(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            uniform=uniform(self.seed, index) if self.temperature > 0 else 0.0,
        )


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) of a request's `index`-th token: 53 bits of sha256(seed, index)."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / 2**53
