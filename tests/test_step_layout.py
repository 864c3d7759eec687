"""The spans of a step, laid out: every token once, every wanted row once, and each span's own part of both."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvarn.format import SealStatus
from kvarn.step import Failure, Span
from kvarn.step_layout import failure_of, lay_out, slot_of, tiles_in_slots

spans = st.builds(
    lambda tokens, start, want: Span(tokens=tuple(tokens), start=start, slots=(0,), want=want),
    st.lists(st.integers(0, 99), min_size=1, max_size=5),
    st.integers(0, 1000),
    st.sampled_from(["none", "last", "all"]),
)


@given(st.lists(spans, max_size=6))
def test_every_span_finds_its_tokens_positions_and_logits(spans: list[Span]) -> None:
    layout = lay_out(spans)
    assert len(layout.starts) == len(layout.logits) == len(spans)
    assert len(layout.tokens) == len(layout.positions) == sum(len(span.tokens) for span in spans)
    assert layout.rows == sorted(set(layout.rows))
    assert len(layout.rows) == sum(span.num_logits for span in spans)
    for span, at, logits in zip(spans, layout.starts, layout.logits, strict=True):
        part = slice(at, at + len(span.tokens))
        assert tuple(layout.tokens[part]) == span.tokens
        assert layout.positions[part] == list(range(span.start, span.stop))
        assert layout.rows[logits] == list(range(part.stop - span.num_logits, part.stop))


def test_under_a_preset_a_sequence_has_a_sink_and_a_tail_and_else_a_slot_per_tile() -> None:
    span = Span(tokens=(1,), start=0, slots=(7, 8, 9))
    assert [slot_of(span, tile, exact=False) for tile in (0, 1, 2, 5)] == [7, 8, 8, 8]
    assert [slot_of(span, tile, exact=True) for tile in (0, 1, 2)] == [7, 8, 9]


def test_what_lies_between_the_sink_and_the_last_tile_is_sealed_from_the_window() -> None:
    assert tiles_in_slots(0, 3, exact=False) == (0, 3)
    assert tiles_in_slots(2, 4, exact=False) == (4,)
    assert tiles_in_slots(0, 0, exact=False) == (0,)
    assert tiles_in_slots(2, 4, exact=True) == (2, 3, 4)


def test_the_first_head_with_the_worst_word_is_named() -> None:
    words = np.zeros((2, 3), np.uint8)
    assert failure_of(4, 1, words) is None
    words[0, 1] = words[1, 2] = SealStatus.KEYS_OVERFLOW
    assert failure_of(4, 1, words) == Failure(span=4, layer=1, kv_head=1, reason=SealStatus.KEYS_OVERFLOW.reason)
    words[1, 2] = SealStatus.VALUES_OVERFLOW
    assert failure_of(4, 1, words) == Failure(span=4, layer=1, kv_head=2, reason=SealStatus.VALUES_OVERFLOW.reason)
