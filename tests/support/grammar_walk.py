"""A model that is drawn: any token that a constraint allows, as a server would sample it, to the answer's end."""

from collections.abc import Callable

import numpy as np

from kvarn.constraint import ConstraintMaker, Guide
from kvarn.serve.tokenizer import Tokenizer

END = 2
VOCAB = 49_152 + 64  # the demo's tokens, and rows of padding that no token has


def allowed_ids(mask: bytes) -> np.ndarray:
    """The tokens of a mask, ascending."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))


class Walker:
    """Draws answers with one tokenizer. `likes` says which tokens, by their bytes, are taken where any is allowed, in
    `share` of the steps."""

    def __init__(self, tokenizer: Tokenizer, likes: Callable[[bytes], bool], share: float) -> None:
        self._tokenizer = tokenizer
        self._likes = np.array([likes(tokenizer.token_bytes(token)) for token in range(VOCAB)])
        self._likes[END] = True
        self._share = share

    def answer(self, make: ConstraintMaker, seed: int, limit: int = 500) -> str | None:
        """A finished answer; None where it is not finished within a limit of tokens."""
        random = np.random.default_rng(seed)
        guide = Guide(make, frozenset({END}), ())
        stream = self._tokenizer.stream()
        text = ""
        for _ in range(limit):
            if guide.error is not None:
                raise guide.error
            if guide.ended:
                return text + stream.finish()
            ids = allowed_ids(guide.mask)
            liked = ids[self._likes[ids]]
            token = int(random.choice(liked if len(liked) and random.random() < self._share else ids))
            if token == END:
                return text + stream.finish()
            guide.accept(token)
            text += stream.add(token)
        return None


def closes(token: bytes) -> bool:
    """Whether a token may bring a JSON value to its end."""
    return not set(token).isdisjoint(b'"}],')


def is_space(token: bytes) -> bool:
    """Whether a token begins with white space."""
    return token[:1] in (b" ", b"\n", b"\t", b"\r")
