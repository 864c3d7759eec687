"""A check of the kernels on the device that they will run on, before any answer depends on them."""

import numpy as np
import torch

from kvarn import reference
from kvarn.backends.triton import ops
from kvarn.backends.triton.kernels import operations
from kvarn.format import SealStatus, TileFormat

TOLERANCE = 4e-3  # of the largest output; twice what the kernels promise
TILES = 3  # sealed ones


def probe(fmt: TileFormat, heads: int, kv_heads: int, dtype: torch.dtype, device: str) -> str | None:
    """What is wrong with the kernels here, in words, or None.

    Seals tiles of a model of these heads and compares their bytes with kvarn.reference; attends one query and several
    over them and compares with ops.attend. Every kernel is compiled on the way.
    """
    rng = np.random.default_rng(2606)
    g, d, length = fmt.tile_tokens, fmt.head_dim, (TILES + 1) * fmt.tile_tokens + 3
    shape = (2, kv_heads, length, d)
    exact = torch.tensor(rng.standard_normal(shape, dtype=np.float32) * rng.uniform(0.2, 3, d).astype(np.float32))
    exact = exact.to(dtype)  # on the CPU
    cut = exact[:, :, g : (TILES + 1) * g].reshape(2, kv_heads, TILES, g, d).transpose(1, 2)  # [2, tiles, Hk, G, D]
    try:
        there = cut.to(device)
        tiles, flags, status = operations.seal(there[0], there[1], fmt)
        fault = _compare_tiles(cut, tiles, flags, status, fmt)
        if fault is not None:
            return fault
        for count in (1, 3):
            query = torch.tensor(rng.standard_normal((count, heads, d), dtype=np.float32)).to(dtype)
            fault = _compare_attention(query, exact, tiles, flags, length, fmt, device)
            if fault is not None:
                return fault
    except Exception as error:  # whatever a compiler or a driver raises
        return f"the Triton kernels do not run here: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return None


def _compare_tiles(
    cut: torch.Tensor, tiles: torch.Tensor, flags: torch.Tensor, status: torch.Tensor, fmt: TileFormat
) -> str | None:
    keys, values = cut.float().numpy()
    for at in np.ndindex(keys.shape[:2]):
        want, flag = reference.seal(keys[at], values[at], fmt)
        same = int(status[at]) == SealStatus.OK and int(flags[at]) == flag
        if not same or tiles[at].cpu().numpy().tobytes() != want.tobytes():
            return "a tile sealed by the Triton kernel is not the reference's, byte for byte"
    return None


def _compare_attention(
    query: torch.Tensor,
    exact: torch.Tensor,
    tiles: torch.Tensor,
    flags: torch.Tensor,
    length: int,
    fmt: TileFormat,
    device: str,
) -> str | None:
    g, d, n = fmt.tile_tokens, fmt.head_dim, len(query)
    start, scale = length - n, d**-0.5
    sink, window = exact[:, :, :g], exact[:, :, start // g * g :]
    blocks = torch.arange(len(tiles))
    want = ops.attend(query, sink, window, tiles.cpu(), flags.cpu(), blocks, start, scale, fmt)
    if n == 1:
        own = torch.zeros_like(sink)
        own[:, :, : window.shape[2]] = window
        row = torch.zeros(2, dtype=torch.int64)
        pages = ops.Pages(row, torch.arange(2), torch.tensor([g, window.shape[2]]))
        read = ops.Tiles(torch.zeros_like(blocks), blocks)
        pool = torch.stack([sink, own]).to(device)
        got = operations.decode(query.to(device), pool, pages, tiles, flags, read, scale, fmt)
    else:
        got = operations.attend(
            query.to(device), sink.to(device), window.to(device), tiles, flags, blocks.to(device), start, scale, fmt
        )
    worst = float((got.cpu().float() - want).abs().max() / want.abs().max())
    if not worst <= TOLERANCE:
        what = "decode" if n == 1 else "prefill"
        return f"the Triton {what} kernel is {worst:.1e} off the reference, more than {TOLERANCE:.0e}"
    return None
