"""The disk cache of a command: its folder, its budget, and the fingerprint of the model that was loaded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.adapter import adapter_digest
from kvarn.disk_tier import DiskTier
from kvarn.errors import UsageError
from kvarn.folders import cache_folder
from kvarn.identity import tokenizer_identity
from kvarn.keys import ALGORITHM, Fingerprint, format_name, layer_names
from kvarn.serve.estimate import parse_bytes
from kvarn.serve.loading import Loaded, ModelOptions, say, size
from kvarn.store_disk import DiskStore, default_budget
from kvarn.tier import NO_TIER, Tier

# What config.json holds beside the model: who wrote it, and the dtype, which the fingerprint has by itself.
_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """--cache-dir, --cache-size and --no-cache."""

    cache_dir: Path | None = None
    cache_size: str | None = None
    no_cache: bool = False

    @property
    def folder(self) -> Path:
        """The folder in which the store has a subfolder of its own."""
        return cache_folder() if self.cache_dir is None else self.cache_dir.expanduser()

    def budget(self) -> tuple[int, str]:
        """The budget in bytes and why it is that."""
        if self.cache_size is None:
            return default_budget(self.folder)
        return parse_bytes(self.cache_size), f"{self.cache_size}, as asked for"


def open_tier(loaded: Loaded, model: ModelOptions, options: CacheOptions) -> Tier:
    """The tier that the options ask for, and one line about it. UsageError when a folder named by the user cannot be
    used; without its usual folder a command goes on, and says so.
    """
    if options.no_cache:
        say("disk cache off: --no-cache")
        return NO_TIER
    budget, why = options.budget()
    if budget <= 0:
        say(f"disk cache {why}" if why.startswith("off") else f"disk cache off: {why}")
        return NO_TIER
    found = fingerprint(loaded, model)
    try:
        store = DiskStore(options.folder, budget, fingerprint=found.root())
    except UsageError as error:
        if options.cache_dir is not None:
            raise
        say(f"disk cache off: {error}")
        return NO_TIER
    say(f"disk cache {store.folder}, {size(store.stats().total_bytes)} of {size(budget)} used ({why})")
    return DiskTier(store, loaded.backend, found)


def fingerprint(loaded: Loaded, model: ModelOptions) -> Fingerprint:
    """Everything about a loaded model that decides what its blocks hold."""
    info = loaded.backend.info
    config: dict[str, Any] = json.loads((loaded.model_dir / "config.json").read_text())
    config = {name: x for name, x in config.items() if name not in _NOT_THE_MODEL}
    return Fingerprint(
        format=format_name(info.plan),
        algorithm=ALGORITHM,
        layers=layer_names(info.plan),
        dtype=info.dtype,
        weights=loaded.weights(),
        config=config,
        tokenizer=tokenizer_identity(loaded.model_dir),
        rope=info.rope,
        adapter="" if model.adapter is None else adapter_digest(model.adapter),
    )


def describe_root(text: str) -> str:
    """A stored fingerprint in a few words: architecture, weights, dtype, format, adapter, tenant."""
    try:
        parts = json.loads(text)
        config = parts["config"]
        words = [
            str(config.get("model_type", "a model")),
            f"weights {parts['weights'][:8]}",
            parts["dtype"],
            parts["format"],
            f"adapter {parts['adapter'][:8]}" if parts["adapter"] else "",
            f"tenant {parts['tenant'][:8]}" if parts["tenant"] else "",
        ]
        return ", ".join(word for word in words if word)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "a fingerprint that this version does not know"
