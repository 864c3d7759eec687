"""The call sites of the Metal kernels: the operations of kvarn.backends.mlx.ops, same names and argument order.

`available()` says whether they run here. Nothing waits for the device: every call is one lazy MLX operation.
"""

from functools import cache
from typing import Any

import mlx.core as mx
from mlx.core import array

from kvarn.backends.mlx.kernels.source import compose, constants, head_dim_constants
from kvarn.format import TileFormat

metal_kernel: Any = mx.fast.metal_kernel  # tests put the host runner's look-alike here

SEAL_THREADS = 512  # SIMDS of seal.metal times 32
ROTATE_SIMDGROUPS = 8
ATTEND_THREADS = 128  # SIMDS of attend.metal times 32
MOST_QUERIES = 8  # of decode and verify
MOST_ROWS = 8  # query heads of one kv head, over all queries, that one threadgroup of attention takes
FEWEST_ELEMENTS = 8  # of an array that MLX hands over as `device`; smaller ones are another source, compiled anew
NO_BLOCK = 2**24  # beyond every pool: a kernel that reads it is found on the host runner
PREFILL_ROWS = 32  # BLOCK_ROWS of prefill.metal
PREFILL_CHANNELS = 256  # SLICE of prefill.metal, at most
WANTED_THREADGROUPS = 256  # of attention: a few for every core of the largest device
MOST_TILES_PER_PART = 16


def available() -> bool:
    """Whether the kernels run on the device that MLX uses now: Metal only."""
    return bool(mx.metal.is_available() and mx.default_device().type == mx.gpu)


@cache
def _rotate_kernel(head_dim: int) -> Any:
    header, body = compose("rotate", head_dim_constants(head_dim))
    return metal_kernel(f"kvarn_rotate_d{head_dim}", ["x"], ["out"], body, header)


def rotate(x: array) -> array:
    """Walsh-Hadamard transform of the last axis, `[..., D]` of any float type -> float32; its own inverse."""
    d = x.shape[-1]
    rows = x.size // d
    threads = 32 * ROTATE_SIMDGROUPS
    (out,) = _rotate_kernel(d)(
        inputs=[x.reshape(rows, d)],
        grid=(-(-rows // ROTATE_SIMDGROUPS) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, d)],
        output_dtypes=[mx.float32],
    )
    result: array = out.reshape(x.shape)
    return result


def _name(kind: str, fmt: TileFormat) -> str:
    return f"{fmt.name.replace('kvarn_', f'kvarn_{kind}_')}_d{fmt.head_dim}"


@cache
def _seal_kernel(fmt: TileFormat) -> Any:
    header, body = compose("seal", constants(fmt))
    names = ["keys", "rotated_keys", "values", "rotated_values"]
    return metal_kernel(_name("seal", fmt), names, ["tiles", "flags", "status"], body, header)


def seal(keys: array, values: array, fmt: TileFormat) -> tuple[array, array, array]:
    """Quantize tiles, each by itself.

    keys (after RoPE) and values: float32 `[..., G, D]`. Returns tiles `uint8 [..., tile_nbytes]`, flags `uint8 [...]`
    and status words `uint8 [...]` (kvarn.format.SealStatus); the bytes of a tile whose status is not OK mean nothing.
    """
    lead = keys.shape[:-2]
    k, v = (x.reshape(-1, *x.shape[-2:]) for x in (keys, values))
    count = len(k)
    tiles, flags, status = _seal_kernel(fmt)(
        inputs=[k, rotate(k), v, rotate(v)],
        grid=(count * SEAL_THREADS, 1, 1),
        threadgroup=(SEAL_THREADS, 1, 1),
        output_shapes=[(count, fmt.tile_nbytes), (count,), (count,)],
        output_dtypes=[mx.uint8] * 3,
    )
    return tiles.reshape(*lead, -1), flags.reshape(lead), status.reshape(lead)


@cache
def _attend_kernel(fmt: TileFormat, ratio: int, rows: int) -> Any:
    header, body = compose("attend", constants(fmt) | {"RATIO": str(ratio), "ROWS": str(rows)})
    names = ["query", "rotated_query", "sink", "window", "tiles", "flags", "blocks", "sizes", "scale"]
    name = f"{_name('attend', fmt)}_h{ratio}_r{rows}"
    # The sink and the window are views of pages: read by their strides, not copied.
    return metal_kernel(name, names, ["partials", "stats"], body, header, ensure_row_contiguous=False)


def _padded(blocks: array) -> array:
    """A block table that is long enough to be `device` memory; what is added is never read."""
    if len(blocks) >= FEWEST_ELEMENTS:
        return mx.contiguous(blocks)
    return mx.pad(blocks, (0, FEWEST_ELEMENTS - len(blocks)), constant_values=mx.array(NO_BLOCK, mx.int32))


@cache
def _combine_kernel(head_dim: int) -> Any:
    header, body = compose("combine", head_dim_constants(head_dim))
    return metal_kernel(f"kvarn_combine_d{head_dim}", ["partials", "stats", "exact_parts"], ["out"], body, header)


def attend(
    query: array,
    sink: array,
    window: array,
    tiles: array,
    flags: array,
    blocks: array,
    start: int,
    scale: float,
    fmt: TileFormat,
) -> array:
    """Attention of one sequence in one sealed layer under the visibility rule; shapes as in ops.attend.

    Decode, verify and prefill: up to MOST_QUERIES queries take the kernel without matrices. Returns float32
    `[N, H, D]`.
    """
    if len(query) > MOST_QUERIES:
        return _prefill(query, sink, window, tiles, flags, blocks, start, scale, fmt)
    n, h, d = query.shape
    hk, g = window.shape[1], fmt.tile_tokens
    ratio = h // hk
    chunks = -(-n * ratio // MOST_ROWS)
    # Two kernels for a model, decode's and one for every other count: a stream would wait while more are compiled.
    rows = -(-ratio // chunks) if n == 1 else MOST_ROWS
    sealed = len(blocks)
    exact_parts = 1 + -(-window.shape[2] // g)
    per_part = min(max(sealed * hk * chunks // WANTED_THREADGROUPS, 1), MOST_TILES_PER_PART)
    parts = exact_parts + -(-sealed // per_part)
    query, tiles, flags, blocks = mx.contiguous(query), mx.contiguous(tiles), mx.contiguous(flags), _padded(blocks)
    sizes = mx.array([start, n, window.shape[2], sealed, per_part, hk], dtype=mx.int32)
    partials, stats = _attend_kernel(fmt, ratio, rows)(
        inputs=[query, rotate(query), sink, window, tiles, flags, blocks, sizes, scale],
        grid=(parts * ATTEND_THREADS, hk, chunks),
        threadgroup=(ATTEND_THREADS, 1, 1),
        output_shapes=[(parts, n * h, d), (parts, n * h, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return _combine(partials, stats, exact_parts).reshape(n, h, d)


def _combine(partials: array, stats: array, exact_parts: int) -> array:
    """Outputs of parts `[P, rows, D]` with their maxima and sums `[P, rows, 2]` -> float32 `[rows, D]`."""
    _, rows, d = partials.shape
    (out,) = _combine_kernel(d)(
        inputs=[partials, stats, exact_parts],
        grid=(rows * 32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(rows, d)],
        output_dtypes=[mx.float32],
    )
    result: array = out
    return result


@cache
def _prefill_kernel(fmt: TileFormat, ratio: int) -> Any:
    header, body = compose("prefill", constants(fmt) | {"RATIO": str(ratio)})
    names = ["rows", "rotated_rows", "sink", "window", "tiles", "flags", "blocks", "sizes", "scale"]
    name = f"{_name('prefill', fmt)}_h{ratio}"
    return metal_kernel(name, names, ["partials", "stats"], body, header, ensure_row_contiguous=False)


def _prefill(
    query: array,
    sink: array,
    window: array,
    tiles: array,
    flags: array,
    blocks: array,
    start: int,
    scale: float,
    fmt: TileFormat,
) -> array:
    n, h, d = query.shape
    hk = window.shape[1]
    ratio = h // hk
    row_blocks = -(-n * ratio // PREFILL_ROWS)
    padded = row_blocks * PREFILL_ROWS
    rows = query.astype(mx.float32).reshape(n, hk, ratio, d).swapaxes(0, 1).reshape(hk, n * ratio, d)
    rows = mx.contiguous(mx.pad(rows, [(0, 0), (0, padded - n * ratio), (0, 0)]))
    sealed, slices = len(blocks), max(d // PREFILL_CHANNELS, 1)
    per_part = max(sealed * row_blocks * hk * slices // WANTED_THREADGROUPS, 1)
    parts = 1 + -(-sealed // per_part)
    tiles, flags, blocks = mx.contiguous(tiles), mx.contiguous(flags), _padded(blocks)
    sizes = mx.array([start, n, sealed, per_part], dtype=mx.int32)
    partials, stats = _prefill_kernel(fmt, ratio)(
        inputs=[rows, rotate(rows), sink, window, tiles, flags, blocks, sizes, scale],
        grid=(row_blocks * ATTEND_THREADS, hk * slices, parts),
        threadgroup=(ATTEND_THREADS, 1, 1),
        output_shapes=[(parts, hk * padded, d), (parts, hk * padded, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    out = _combine(partials, stats, 1).reshape(hk, padded, d)[:, : n * ratio]
    return out.reshape(hk, n, ratio, d).swapaxes(0, 1).reshape(n, h, d)
