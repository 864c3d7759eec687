"""What an answer may say next: the protocol that a grammar implements, and one answer's way through it.

A mask is bytes, one bit a token: token t is allowed where bit t % 8 of byte t // 8 is set, which is the same as
little-endian words of any width. A token beyond its end is not allowed.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from kvarn.errors import BackendError, ConstraintError, KvarnError

FORBIDDING_BIAS = -100.0
"""A logit bias that clients send to forbid a token. The sampler only adds it; here it decides whether any is left."""


class Constraint(Protocol):
    """The state of one answer within a grammar. Its methods raise ConstraintError where it cannot go on."""

    def allowed(self) -> bytes:
        """The mask of the tokens that may come next; stop tokens are not its matter, their bits are overwritten."""

    def accept(self, token: int) -> None:
        """Take in a token that the mask allowed."""

    @property
    def may_end(self) -> bool:
        """Whether the answer is complete as it stands."""


ConstraintMaker = Callable[[], Constraint]
"""Makes the constraint of one more answer, at its beginning."""


class Guide:
    """One answer under a constraint: the mask of its next step, or how it ends. No method raises.

    mask: what the next token may be, stop tokens included exactly where the grammar may end; empty where nothing is
    left to choose. ended: the grammar allows nothing more. empty: not even at the beginning. error: the answer cannot
    go on.
    """

    def __init__(self, make: ConstraintMaker, stop_token_ids: frozenset[int], forbidden: Iterable[int]) -> None:
        self.mask = b""
        self.ended = False
        self.empty = False
        self.error: KvarnError | None = None
        self._stops = stop_token_ids
        self._forbidden = tuple(forbidden)
        self._constraint: Constraint | None = None
        try:
            self._constraint = make()
            self._look(self._constraint)
            self.empty = self.ended
        except Exception as error:  # whatever a grammar does, only its own answer ends
            self._fail(error)

    def accept(self, token: int) -> None:
        """Take in the token that was sampled, a stop token or not, and look what may follow."""
        constraint = self._constraint
        if constraint is None or self.error is not None or self.empty:
            return
        try:
            if not _has(self.mask, token):
                raise BackendError(
                    f"token {token} was sampled against the grammar: no allowed token has a finite logit"
                )
            if token not in self._stops:
                constraint.accept(token)
                self._look(constraint)
        except Exception as error:
            self._fail(error)

    def _look(self, constraint: Constraint) -> None:
        mask = bytearray(constraint.allowed())
        may_end = constraint.may_end
        _put(mask, self._stops, False)
        if _is_empty(mask):
            if not may_end:
                raise ConstraintError("the grammar allows no token here, and the answer is not complete; loosen it")
            self.ended = True
            self.mask = b""
            return
        if may_end:
            _put(mask, self._stops, True)
        self.mask = bytes(mask)
        _put(mask, self._forbidden, False)
        if _is_empty(mask):
            raise ConstraintError("logit_bias forbids every token that the grammar allows here; loosen one of them")

    def _fail(self, error: Exception) -> None:
        self.error = error if isinstance(error, KvarnError) else ConstraintError(f"the grammar failed: {error!r}")


def _is_empty(mask: bytearray) -> bool:
    return mask.count(0) == len(mask)


def _has(mask: bytes, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def _put(mask: bytearray, tokens: Iterable[int], allowed: bool) -> None:
    for token in tokens:
        if token // 8 >= len(mask):
            continue
        if allowed:
            mask[token // 8] |= 1 << token % 8
        else:
            mask[token // 8] &= ~(1 << token % 8)
