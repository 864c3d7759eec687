"""Decode attention on a Mac: KVarN's Metal kernels against mlx-lm's fp16 and 4- and 8-bit affine caches, in one run.

    python tools/bench_metal.py

One layer, one token: H query heads over Hk kv heads of head_dim D, random keys and values, contexts of 4k to 64k
tokens. Times are the median over `--repeats` of `--layers` calls in one evaluation, per call, so that the launch
overhead is that of a model's step. Bytes are what the cache of one layer holds. Without Metal it says so and measures
nothing; `--rehearse` runs every row once on the CPU at 512 tokens, with plain operations in place of the kernels.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import click
import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from kvarn.backends.mlx import ops
from kvarn.backends.mlx.kernels import kernels
from kvarn.format import Preset

CONTEXTS = (4096, 16384, 32768, 65536)
AFFINE_GROUP = 64
Call = Callable[[mx.array], mx.array]


def fp16(keys: mx.array, values: mx.array, scale: float) -> tuple[Call, int]:
    """mx.fast attention over keys and values `[1, Hk, T, D]`: the call and its cache's bytes."""
    return (
        lambda query: mx.fast.scaled_dot_product_attention(query, keys, values, scale=scale),
        keys.nbytes + values.nbytes,
    )


def affine(keys: mx.array, values: mx.array, scale: float, bits: int) -> tuple[Call, int]:
    """mlx-lm's attention over its own quantized cache."""
    k, v = (mx.quantize(x, group_size=AFFINE_GROUP, bits=bits) for x in (keys, values))

    def call(query: mx.array) -> mx.array:
        # It scales the query in place: give it one of its own.
        out: mx.array = quantized_scaled_dot_product_attention(query + 0, k, v, scale, None, AFFINE_GROUP, bits)
        return out

    return call, sum(x.nbytes for x in (*k, *v))


def sealed(keys: mx.array, values: mx.array, scale: float, preset: Preset, operations: Any) -> tuple[Call, int]:
    """Ours: sink and last tile exact, the rest sealed."""
    fmt, tokens = preset.with_head_dim(keys.shape[-1]), keys.shape[2]
    g = fmt.tile_tokens
    both = mx.concatenate([keys, values])  # [2, Hk, T, D]
    tiles, flags = [], []
    for first in range(g, tokens - g, g):
        part = both[:, :, first : first + g].astype(mx.float32)
        tile, flag, _ = operations.seal(part[0], part[1], fmt)
        mx.eval(tile, flag)
        tiles.append(tile)
        flags.append(flag)
    pool, marks, blocks = mx.stack(tiles), mx.stack(flags), mx.arange(len(tiles), dtype=mx.int32)
    sink, window = mx.contiguous(both[:, :, :g]), mx.contiguous(both[:, :, tokens - g :])
    mx.eval(pool, marks, blocks, sink, window)

    def call(query: mx.array) -> mx.array:
        rows = query[0].swapaxes(0, 1)  # [1, H, D]
        out: mx.array = operations.attend(rows, sink, window, pool, marks, blocks, tokens - 1, scale, fmt)
        return out.astype(query.dtype).swapaxes(0, 1)[None]

    return call, pool.nbytes + marks.nbytes + sink.nbytes + window.nbytes


def measure(call: Call, query: mx.array, layers: int, repeats: int) -> float:
    """Seconds of one call: every call waits for the one before it, as layers do."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        x = query
        for _ in range(layers):
            x = query + 1e-6 * call(x)
        mx.eval(x)
        times.append((time.perf_counter() - begin) / layers)
    return statistics.median(times[1:])  # the first one compiles


def rows(
    tokens: int, heads: int, kv_heads: int, d: int, operations: Any, layers: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """One row per cache at one context."""
    keys, values = (mx.random.normal((1, kv_heads, tokens, d)).astype(mx.float16) for _ in range(2))
    query = mx.random.normal((1, heads, 1, d)).astype(mx.float16)
    mx.eval(keys, values, query)
    scale = d**-0.5
    caches: list[tuple[str, Callable[[], tuple[Call, int]]]] = [
        ("mlx-lm fp16", lambda: fp16(keys, values, scale)),
        ("mlx-lm affine 8-bit g64", lambda: affine(keys, values, scale, 8)),
        ("mlx-lm affine 4-bit g64", lambda: affine(keys, values, scale, 4)),
    ]
    for key_bits, value_bits in ((4, 2), (4, 4)):
        preset = Preset(key_bits=key_bits, value_bits=value_bits)
        caches.append((preset.name, lambda preset=preset: sealed(keys, values, scale, preset, operations)))  # type: ignore[misc]
    baseline = 0.0
    for name, build in caches:
        call, nbytes = build()
        seconds = measure(call, query, layers, repeats)
        baseline = baseline or seconds
        row = {"tokens": tokens, "cache": name, "ms": seconds * 1e3, "speed": baseline / seconds, "bytes": nbytes}
        yield row | {"gb_per_s": nbytes / seconds / 1e9}


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option("--heads", default=32, show_default=True)
@click.option("--kv-heads", default=8, show_default=True)
@click.option("--head-dim", default=128, show_default=True)
@click.option("--layers", default=32, show_default=True, help="Calls in one evaluation.")
@click.option("--repeats", default=10, show_default=True)
@click.option("--rehearse", is_flag=True, help="Check this script on the CPU; its times mean nothing.")
@click.option("--json", "as_json", is_flag=True)
def main(heads: int, kv_heads: int, head_dim: int, layers: int, repeats: int, rehearse: bool, as_json: bool) -> None:
    if not rehearse and not kernels.available():
        click.echo("skipped: decode attention at 4k, 16k, 32k and 64k (no Metal on this machine; run it on a Mac)")
        return
    operations: Any = kernels if kernels.available() else ops
    contexts, layers, repeats = ((512,), 1, 1) if rehearse else (CONTEXTS, layers, repeats)
    if not as_json:
        where = mx.device_info().get("device_name", "Metal") if kernels.available() else "cpu, a rehearsal"
        click.echo(f"{where}: {heads} heads over {kv_heads}, head_dim {head_dim}, MLX {metadata.version('mlx')}\n")
        click.echo("| tokens | cache | ms a layer | against fp16 | bytes a layer | GB/s |\n" + "| --- " * 6 + "|")
    for tokens in contexts:
        for row in rows(tokens, heads, kv_heads, head_dim, operations, layers, repeats):
            if as_json:
                click.echo(json.dumps(row))
            else:
                cells = [row["tokens"], row["cache"], f"{row['ms']:.3f}", f"{row['speed']:.2f}", row["bytes"]]
                click.echo("| " + " | ".join(map(str, [*cells, f"{row['gb_per_s']:.0f}"])) + " |")


if __name__ == "__main__":
    main()
