"""The operations of ops.py on a CPU, in C++: same names, arguments and meaning. Reference: kvarn.reference.

Attention agrees with the reference within 3e-6 of the largest output, with the same bits for any number of threads.
They run on as many threads as torch does.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from kvarn.backends.triton import ops
from kvarn.backends.triton.cpu.build import library
from kvarn.backends.triton.ops import Pages, Tiles
from kvarn.errors import BackendError
from kvarn.format import HEAD_DIMS, TILE_TOKENS, Preset, TileFormat

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Kind of vectors.h

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_ARGUMENTS: dict[str, list[Any]] = {
    "kvarn_seal": [_P, _P, _N, _P, _P, _P, _I],
    "kvarn_decode": [_P, _N, _N, _N, _P, _I, _N, _N, _P, _P, _P, _N, _P, _P, _N, _P, _P, _N, _F, _P, _I],
    "kvarn_attend": [_P, _N, _N, _N, _P, _N, _N, _P, _N, _N, _I, _P, _P, _N, _P, _N, _N, _F, _P, _I],
}


@functools.cache
def load(fmt: TileFormat) -> Any:
    """The library of a format, built where it is not there yet; BuildError where that is not possible."""
    loaded = library(fmt)
    for name, arguments in _ARGUMENTS.items():
        getattr(loaded, name).argtypes = arguments
    loaded.kvarn_seal.restype = None
    return loaded


def prepare(fmt: TileFormat | None) -> None:
    """Build and load what a format needs, so that no step waits for it; BuildError where that is not possible."""
    load(Preset().with_head_dim(64) if fmt is None else fmt)


def seal(keys: Tensor, values: Tensor, fmt: TileFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize tiles, each by itself, float32 `[..., G, D]`; see ops.seal. The bytes are the reference's."""
    lead = keys.shape[:-2]
    keys, values = keys.contiguous(), values.contiguous()
    tiles = torch.empty((*lead, fmt.tile_nbytes), dtype=torch.uint8)
    flags, status = torch.empty(lead, dtype=torch.uint8), torch.empty(lead, dtype=torch.uint8)
    load(fmt).kvarn_seal(
        *(keys.data_ptr(), values.data_ptr(), flags.numel()),
        *(tiles.data_ptr(), flags.data_ptr(), status.data_ptr(), torch.get_num_threads()),
    )
    return tiles, flags, status


def decode(
    query: Tensor,
    pool: Tensor,
    pages: Pages,
    tiles: Tensor | None,
    flags: Tensor | None,
    blocks: Tiles,
    scale: float,
    fmt: TileFormat | None,
) -> Tensor:
    """Attention of many sequences in one layer, one query each; see ops.decode. Returns float32 `[B, H, D]`."""
    b, h, d = query.shape
    hk, g = pool.shape[2:4]
    if fmt is None:
        if d not in HEAD_DIMS or g not in TILE_TOKENS:
            return ops.decode(query, pool, pages, tiles, flags, blocks, scale, fmt)
        fmt = Preset(tile_tokens=g).with_head_dim(d)  # exact pages alone: any format of their shape will do
    query = query.float().contiguous()
    pool = pool if pool.stride()[1:] == (hk * g * d, g * d, d, 1) else pool.contiguous()
    output = torch.empty_like(query)
    lists = [x.contiguous() for x in (pages.row, pages.index, pages.valid, blocks.row, blocks.index)]
    if tiles is not None and flags is not None:
        tiles, flags = tiles.contiguous(), flags.contiguous()
    failed = load(fmt).kvarn_decode(
        *(query.data_ptr(), b, h, hk),
        *(pool.data_ptr(), KINDS[pool.dtype], len(pool), pool.stride(0)),
        *(lists[0].data_ptr(), lists[1].data_ptr(), lists[2].data_ptr(), len(lists[0])),
        *(0, 0, 0) if tiles is None or flags is None else (tiles.data_ptr(), flags.data_ptr(), len(tiles)),
        *(lists[3].data_ptr(), lists[4].data_ptr(), len(lists[3])),
        *(scale, output.data_ptr(), torch.get_num_threads()),
    )
    if failed:
        raise BackendError(f"a page or block of this step is outside the pools of {len(pool)} slots")
    return output


def attend(
    query: Tensor,
    sink: Tensor,
    window: Tensor,
    tiles: Tensor,
    flags: Tensor,
    blocks: Tensor,
    start: int,
    scale: float,
    fmt: TileFormat,
) -> Tensor:
    """Attention of one sequence in one sealed layer; see ops.attend. Returns float32 `[N, H, D]`."""
    n, h, d = query.shape
    hk = window.shape[1]
    query = query.float().contiguous()
    sink, window = (x if x.stride()[2:] == (d, 1) else x.contiguous() for x in (sink, window.to(sink.dtype)))
    tiles, flags, blocks = tiles.contiguous(), flags.contiguous(), blocks.contiguous()
    output = torch.empty_like(query)
    failed = load(fmt).kvarn_attend(
        *(query.data_ptr(), n, h, hk),
        *(sink.data_ptr(), sink.stride(0), sink.stride(1)),
        *(window.data_ptr(), window.stride(0), window.stride(1), KINDS[sink.dtype]),
        *(tiles.data_ptr(), flags.data_ptr(), len(tiles), blocks.data_ptr(), len(blocks)),
        *(start, scale, output.data_ptr(), torch.get_num_threads()),
    )
    if failed:
        raise BackendError(f"a block of this span is outside the pool of {len(tiles)} blocks")
    return output
