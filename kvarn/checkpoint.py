"""What every backend checks about a checkpoint before a framework reads it: whole files, and the end tokens."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvarn.errors import CapacityError, CheckpointError

_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}  # dtypes that are cast to the model's, and their bytes


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, for our own one-line errors."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def check_files(model_dir: Path) -> list[Path]:
    """The shards of a checkpoint; CheckpointError unless each that the index names is there and whole."""
    shards = sorted(model_dir.glob("*.safetensors"))
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        try:
            named = {Path(name).name for name in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
            raise CheckpointError(f"{index} is damaged: {first_line(error)}; get the model again") from error
        missing = sorted(named - {shard.name for shard in shards})
        if missing:
            raise CheckpointError(f"{model_dir} lacks {', '.join(missing[:3])}, which its index names")
        shards = [shard for shard in shards if shard.name in named]
    if not shards:
        raise CheckpointError(f"{model_dir} holds no .safetensors weights; pickled weights are not loaded")
    for shard in shards:
        _check_shard(shard)
    return shards


def _check_shard(shard: Path) -> None:
    """A safetensors file is 8 bytes of length, a JSON header, and exactly the bytes that its offsets speak of."""
    try:
        length, header = _header(shard)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        size, want = shard.stat().st_size, 8 + length + max(ends, default=0)
        if size != want:
            raise ValueError(f"it has {size} bytes, its header asks for {want}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{shard} is damaged: {first_line(error)}; get the model again") from error


def _header(shard: Path) -> tuple[int, dict[str, Any]]:
    """The length of a shard's header and its entries, by tensor name."""
    size = shard.stat().st_size
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _LONGEST_HEADER):
            raise ValueError("its header is cut off")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return length, header


def weight_bytes(shards: Sequence[Path], itemsize: int) -> int:
    """What the tensors of checked shards take in memory when floats of 2 and 4 bytes are held in `itemsize` bytes."""
    total = 0
    for shard in shards:
        for entry in _header(shard)[1].values():
            low, high = entry["data_offsets"]
            own = _FLOATS.get(entry["dtype"])
            total += (high - low) * itemsize // own if own else high - low
    return total


def check_memory(shards: Sequence[Path], itemsize: int, available: int, where: str) -> None:
    """CapacityError when the weights alone do not fit; before they are read, for a CPU would start to swap instead."""
    need = weight_bytes(shards, itemsize)
    if need > available:
        raise CapacityError(
            f"the weights take {need / 2**30:.1f} GiB and {available / 2**30:.1f} GiB are free on {where}; "
            "use a smaller model, or a --dtype of fewer bytes"
        )


def eos_token_ids(model_dir: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer: those of generation_config.json, else of config.json."""
    ids: Any = None
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the file is optional
        ids = json.loads((model_dir / "generation_config.json").read_text()).get("eos_token_id")
    if ids is None:
        ids = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
