"""Why a prompt hits or misses: which parts of two fingerprints differ, and where a chain leaves what is stored."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvarn.keys import Key, chain
from kvarn.store import ByteStore


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How far a prompt's chain is stored.

    tiles: whole tiles in store. diverges_at: the first token that differs from the nearest stored chain, None where
    nothing stored follows; then `wanted` and `stored` are the two token ids there (None: the prompt ends).
    """

    tiles: int
    reusable_tokens: int
    diverges_at: int | None
    wanted: int | None
    stored: int | None


def reach(store: ByteStore, root: Key, tokens: Sequence[int], tile_tokens: int) -> Reach:
    """Follow a prompt's chain through the store."""
    keys = chain(root, tokens, tile_tokens)
    tiles = 0
    while tiles < len(keys) and store.contains(keys[tiles]):
        tiles += 1
    at = tiles * tile_tokens
    rest = tuple(tokens[at : at + tile_tokens])
    best, stored = -1, None
    for child in store.children(keys[tiles - 1] if tiles else root):
        same = 0
        while same < min(len(rest), len(child.tokens)) and rest[same] == child.tokens[same]:
            same += 1
        if same > best and same < len(child.tokens):
            best, stored = same, child.tokens[same]
    found = best >= 0
    return Reach(
        tiles=tiles,
        reusable_tokens=min(tiles, (len(tokens) - 1) // tile_tokens) * tile_tokens,
        diverges_at=at + best if found else None,
        wanted=rest[best] if found and best < len(rest) else None,
        stored=stored,
    )


def differences(one: str, other: str) -> list[str]:
    """The parts in which two fingerprints' texts differ, with both values; empty for equal ones."""
    a, b = (_flat(json.loads(text)) for text in (one, other))
    return [
        f"{name}: {_short(a.get(name))} here, {_short(b.get(name))} there"
        for name in sorted({*a, *b})
        if a.get(name) != b.get(name)
    ]


def _flat(parts: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(parts, Mapping):
        return {prefix: parts}
    flat: dict[str, Any] = {}
    for name, value in parts.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:18]}...{text[-18:]}"
