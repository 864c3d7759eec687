"""The visibility rule against its definition, position by position."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvarn.visibility import completed_tiles, num_sealed, pieces

relaxed = settings(deadline=None)  # a shared machine may stall
spans = st.tuples(st.integers(0, 1500), st.integers(0, 700)).map(lambda x: (x[0], x[0] + x[1]))
tile_lengths = st.sampled_from([1, 2, 64, 128])


@relaxed
@given(st.integers(0, 10**6), tile_lengths)
def test_a_query_reads_the_tiles_between_sink_and_its_own_as_sealed(position: int, g: int) -> None:
    assert num_sealed(position, g) == len(range(1, position // g))


@relaxed
@given(spans, tile_lengths)
def test_pieces_cover_each_query_once_in_order(span: tuple[int, int], g: int) -> None:
    start, stop = span
    assert [p for piece in pieces(start, stop, g) for p in range(piece.start, piece.stop)] == list(range(start, stop))


@relaxed
@given(spans, tile_lengths)
def test_every_query_of_a_piece_sees_what_it_would_see_alone(span: tuple[int, int], g: int) -> None:
    for piece in pieces(*span, g):
        assert piece.start < piece.stop
        for p in range(piece.start, piece.stop):
            assert (piece.tile, piece.sealed) == (p // g, len(range(1, p // g)))


@relaxed
@given(spans, tile_lengths)
def test_completed_tiles_are_those_whose_last_token_is_among_the_positions(span: tuple[int, int], g: int) -> None:
    start, stop = span
    assert list(completed_tiles(start, stop, g)) == [p // g for p in range(start, stop) if p % g == g - 1 and p >= g]


@relaxed
@given(st.lists(st.integers(0, 300), max_size=6), tile_lengths)
def test_chunks_complete_each_tile_exactly_once(chunks: list[int], g: int) -> None:
    done: list[int] = []
    start = 0
    for chunk in chunks:
        done += completed_tiles(start, start + chunk, g)
        start += chunk
    assert done == list(range(1, start // g))


@relaxed
@given(st.integers(0, 1500), tile_lengths)
def test_a_query_never_reads_a_tile_that_is_not_complete_before_it(position: int, g: int) -> None:
    sealed_before = len([t for t in range(1, position + 1) if (t + 1) * g <= position])
    assert num_sealed(position, g) <= sealed_before
