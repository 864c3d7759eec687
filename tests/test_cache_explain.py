"""Explanations name the part that differs, and the first token that does."""

import json

import pytest

from kvarn.cache_explain import differences, reach
from kvarn.keys import block_key
from kvarn.store import BlockMeta, MemoryStore

ROOT = b"r" * 32


def store(*texts: tuple[int, ...]) -> MemoryStore:
    """A store of chains of tiles of four tokens."""
    held = MemoryStore()
    for tokens in texts:
        parent = ROOT
        for at in range(0, len(tokens) - 3, 4):
            tile = tokens[at : at + 4]
            key = block_key(parent, tile)
            held.put(BlockMeta(key=key, parent=parent, tokens=tile, fingerprint=ROOT, format="f"), b"x")
            parent = key
    return held


@pytest.mark.parametrize(
    ("prompt", "tiles", "reusable", "diverges_at", "wanted", "stored"),
    [
        ((1, 2, 3, 4, 5, 6, 7, 8, 9), 2, 8, None, None, None),
        ((1, 2, 3, 4, 5, 6, 7, 8), 2, 4, None, None, None),  # one token is always computed
        ((1, 2, 3, 4, 5, 6, 99, 8, 9), 1, 4, 6, 99, 7),
        ((1, 2, 3, 4, 5, 70, 77), 1, 4, 6, 77, 71),  # the nearer one of two
        ((1, 2, 3, 4, 5, 6), 1, 4, 6, None, 7),
        ((9, 9, 9, 9, 9), 0, 0, 0, 9, 1),
        ((), 0, 0, 0, None, 1),
    ],
)
def test_a_prompt_is_followed_as_far_as_it_is_stored(
    prompt: tuple[int, ...], tiles: int, reusable: int, diverges_at: int | None, wanted: int | None, stored: int | None
) -> None:
    held = store((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 70, 71, 72) if 77 in prompt else ())
    found = reach(held, ROOT, prompt, 4)
    assert (found.tiles, max(found.reusable_tokens, 0)) == (tiles, reusable)
    assert (found.diverges_at, found.wanted, found.stored) == (diverges_at, wanted, stored)


def test_nothing_stored_is_nothing_near() -> None:
    assert reach(MemoryStore(), ROOT, (1, 2, 3, 4, 5), 4).diverges_at is None


def test_differences_name_the_part_down_to_the_field() -> None:
    one = {"weights": "a", "config": {"rope_theta": 1.0, "x": [1]}, "dtype": "float32"}
    other = {"weights": "b", "config": {"rope_theta": 2.0, "x": [1]}, "dtype": "float32", "adapter": "c" * 64}
    assert differences(json.dumps(one), json.dumps(one)) == []
    assert differences(json.dumps(one), json.dumps(other)) == [
        f'adapter: null here, "{"c" * 17}...{"c" * 17}" there',
        "config.rope_theta: 1.0 here, 2.0 there",
        'weights: "a" here, "b" there',
    ]
