"""The operations over NumPy arrays, for kvarn.selfcheck, and what `kvarn doctor` says of this backend."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvarn.backends.triton import ops
from kvarn.backends.triton.dispatch import choose
from kvarn.format import Preset, TileFormat
from kvarn.selfcheck import Floats
from kvarn.tile import Bytes


def device() -> str:
    """The device that `auto` picks."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def describe() -> str:
    """The device, and which route runs there and why."""
    name = torch.cuda.get_device_name() if device() == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return f"{name}; {choose(Preset().with_head_dim(64), device()).why}"


class Operations:
    """See kvarn.selfcheck.Operations."""

    def seal(self, keys: Floats, values: Floats, fmt: TileFormat) -> tuple[Bytes, Bytes, Bytes]:
        tiles, flags, status = choose(fmt, device()).seal(_there(keys), _there(values), fmt)
        return _here(tiles), _here(flags), _here(status)

    def unseal(self, tiles: Bytes, flags: Bytes, fmt: TileFormat) -> tuple[Floats, Floats]:
        keys, values = ops.unseal(_there(tiles), _there(flags), fmt)
        return _here(keys), _here(values)

    def attend(
        self, query: Floats, keys: Floats, values: Floats, tiles: Bytes, flags: Bytes, start: int, fmt: TileFormat
    ) -> Any:
        both = _there(np.stack([keys, values])).transpose(1, 2)  # [2, Hk, T, D]
        g = fmt.tile_tokens
        blocks = torch.arange(len(tiles), device=both.device)
        sink, window = both[:, :, :g], both[:, :, start // g * g :]
        scale = fmt.head_dim**-0.5
        run = choose(fmt, device())
        if len(query) > 1:
            return _here(
                run.attend(_there(query), sink, window, _there(tiles), _there(flags), blocks, start, scale, fmt)
            )
        own = torch.zeros_like(sink)
        own[:, :, : window.shape[2]] = window
        row = torch.zeros(2, dtype=torch.int64, device=both.device)
        valid = torch.tensor([g, window.shape[2]], device=both.device)
        pages = ops.Pages(row, torch.arange(2, device=both.device), valid)
        read = ops.Tiles(torch.zeros_like(blocks), blocks)
        pool = torch.stack([sink, own])
        return _here(run.decode(_there(query), pool, pages, _there(tiles), _there(flags), read, scale, fmt))


def _there(x: NDArray[Any]) -> Tensor:
    return torch.tensor(x, device=device())


def _here(x: Tensor) -> Any:
    return x.cpu().numpy()
