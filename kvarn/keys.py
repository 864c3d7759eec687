"""The chain of block keys: a block's key names the tokens of its tile and, through its parent, all before them.

key = sha256(parent key || the tile's token ids as uint32 little-endian). The root is the fingerprint of everything
else that decides what a block holds. One function each, used by every path that writes, reads or matches.
"""

import hashlib
import struct
from collections.abc import Sequence

Key = bytes

ROOT: Key = hashlib.sha256(b"kvarn: blocks of one engine").digest()  # a chain that never leaves its process


def block_key(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of the tile with these tokens that follows `parent`."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


def chain(root: Key, tokens: Sequence[int], tile_tokens: int) -> list[Key]:
    """The keys of every full tile of a sequence, the sink's first."""
    keys, parent = [], root
    for start in range(0, len(tokens) - tile_tokens + 1, tile_tokens):
        parent = block_key(parent, tokens[start : start + tile_tokens])
        keys.append(parent)
    return keys
