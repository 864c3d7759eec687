"""The visibility rule: what a query at a position reads exactly, and what it reads from sealed tiles.

For a query at position p in tile t = p // G: tile 0 (the sink) is exact, tiles 1 ... t-1 are read sealed, and tile t
is read exactly and causally. It depends on p alone: not on chunks, batch, speculation, restarts or cache hits.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Queries of one tile, `start` to `stop`: they read the sink (if `tile` > 0), `sealed` sealed tiles, their own."""

    tile: int
    start: int
    stop: int
    sealed: int


def num_sealed(position: int, tile_tokens: int) -> int:
    """How many sealed tiles (1, 2, ...) a query at this position reads."""
    return max(position // tile_tokens - 1, 0)


def pieces(start: int, stop: int, tile_tokens: int) -> Iterator[Piece]:
    """Cut the queries `start` to `stop` at the tile edges; every query of a piece reads the same whole tiles."""
    while start < stop:
        tile = start // tile_tokens
        end = min(stop, (tile + 1) * tile_tokens)
        yield Piece(tile=tile, start=start, stop=end, sealed=num_sealed(start, tile_tokens))
        start = end


def completed_tiles(start: int, stop: int, tile_tokens: int) -> range:
    """The tiles that positions `start` to `stop` fill to the end and that are sealed: never tile 0."""
    return range(max(start // tile_tokens, 1), max(stop // tile_tokens, 1))
