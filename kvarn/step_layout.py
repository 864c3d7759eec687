"""The spans of one step laid out one after another, in plain integers: what every backend does before it computes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvarn.format import SealStatus
from kvarn.step import Failure, Span


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """N tokens of B spans, one span after another.

    tokens, positions: of every token. starts: where each span begins among them. rows: the tokens whose logits are
    wanted. logits: each span's part of these.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    logits: list[slice] = field(default_factory=list)


def lay_out(spans: Sequence[Span]) -> StepLayout:
    """The layout of a step's spans, in their order."""
    layout = StepLayout()
    for span in spans:
        layout.starts.append(len(layout.tokens))
        layout.tokens.extend(span.tokens)
        layout.positions.extend(range(span.start, span.stop))
        layout.logits.append(slice(len(layout.rows), len(layout.rows) + span.num_logits))
        layout.rows.extend(range(len(layout.tokens) - span.num_logits, len(layout.tokens)))
    return layout


def slot_of(span: Span, tile: int, *, exact: bool) -> int:
    """The slot that holds a tile of this span while it is exact; `exact`: no preset, every tile has a slot."""
    return span.slots[tile if exact else min(tile, 1)]


def tiles_in_slots(first: int, last: int, *, exact: bool) -> tuple[int, ...]:
    """Which of a window's tiles `first` ... `last` stay in slots: under a preset tile 0 and the last one.

    The tiles between are sealed from the window.
    """
    return tuple(tile for tile in range(first, last + 1) if exact or tile in (0, last))


def failure_of(span: int, layer: int, status: NDArray[np.uint8]) -> Failure | None:
    """What the status words `[tiles, Hk]` of one span and layer say: the first kv head with the worst one, or None."""
    worst = status.max(0)
    head = int(worst.argmax())
    if not worst[head]:
        return None
    return Failure(span=span, layer=layer, kv_head=head, reason=SealStatus(int(worst[head])).reason)
