"""Where this user's files of KVarN lie."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder of KVarN: $KVARN_CACHE, else $XDG_CACHE_HOME/kvarn, else ~/.cache/kvarn."""
    own = os.environ.get("KVARN_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvarn"
