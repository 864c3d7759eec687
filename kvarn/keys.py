"""The fingerprint and the chain of block keys: a block's key names its tokens, all tokens before, and what made them.

key = sha256(parent key || the tile's token ids as uint32 little-endian). The root of a chain is the fingerprint:
everything else that decides what a block holds. One function each, used by every path that writes, reads or matches.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvarn.format import FORMAT_VERSION
from kvarn.model_plan import ModelPlan

Key = bytes

# Raised when sealing or attention gives other keys and values for the same tokens, the format being the same.
ALGORITHM = 1


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Everything but the tokens and the tenant that decides what a block holds, typed. The backend is not in it.

    format: the tile format's version and the preset. layers: per layer its kind, kv heads, head_dim and window.
    weights, tokenizer, adapter: content hashes, the last one empty without an adapter. config: config.json as it lies
    there. rope: the RoPE really used, overrides included.
    """

    format: str
    algorithm: int
    layers: tuple[str, ...]
    dtype: str
    weights: str
    config: Mapping[str, Any]
    tokenizer: str
    rope: Mapping[str, Any]
    adapter: str

    def text(self, tenant: str = "") -> str:
        """Canonical JSON with the tenant: the same parts give the same text in every process."""
        parts = {**asdict(self), "tenant": tenant}
        return json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def root(self, tenant: str = "") -> Key:
        """The root of a tenant's chains."""
        return hashlib.sha256(self.text(tenant).encode()).digest()


def format_name(plan: ModelPlan) -> str:
    """The tile format of a plan as records name it."""
    return f"KVarN-{FORMAT_VERSION} {plan.name}"


def layer_names(plan: ModelPlan) -> tuple[str, ...]:
    """The layer plan, one word per layer."""
    return tuple(
        f"{layer.kind} {layer.num_kv_heads}x{layer.head_dim}" + (f" window {layer.window}" if layer.window else "")
        for layer in plan.layers
    )


def process_root(tenant: str) -> Key:
    """The root of chains that never leave their process."""
    return hashlib.sha256(b"kvarn: blocks of one engine, of tenant " + tenant.encode()).digest()


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
