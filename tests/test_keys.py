"""Keys are a chain: equal for equal histories, on every machine, and for nothing else."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from kvarn.keys import block_key, chain, process_root

ROOT = process_root("")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_the_key_is_sha256_over_parent_and_little_endian_ids() -> None:
    want = hashlib.sha256(b"p" * 32 + bytes([1, 0, 0, 0, 0, 1, 0, 0])).digest()
    assert block_key(b"p" * 32, [1, 256]) == want


@given(TOKENS, st.integers(1, 8))
def test_a_chain_has_a_key_for_every_full_tile(tokens: list[int], tile: int) -> None:
    keys = chain(ROOT, tokens, tile)
    assert len(keys) == len(tokens) // tile
    assert chain(ROOT, tokens[: len(keys) * tile], tile) == keys


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_two_chains_agree_exactly_as_far_as_their_tiles_do(a: list[int], b: list[int], tile: int) -> None:
    for i, (x, y) in enumerate(zip(chain(ROOT, a, tile), chain(ROOT, b, tile), strict=False), 1):
        assert (x == y) == (a[: i * tile] == b[: i * tile])


def test_another_root_is_another_chain() -> None:
    assert not set(chain(ROOT, range(64), 8)) & set(chain(b"other", range(64), 8))
