"""Check and measure the Triton kernels on a CUDA GPU: one command, at most five minutes, a table at the end.

    python tools/bench_cuda.py                everything, on the first GPU
    python tools/bench_cuda.py --interpret    the same functions on tiny shapes in Triton's interpreter; no figures

Wants torch, triton and NumPy, and this repository beside it; nothing else. Leaves with 1 if there is no GPU, or if a
kernel gives something else than the oracle. Times are medians; the cache is flushed before every run. Baselines are
torch's scaled_dot_product_attention in float16, flash where it takes the shape.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

if "--interpret" in sys.argv[1:]:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvarn import reference
from kvarn.backends.triton.kernels import decode, prefill, seal
from kvarn.backends.triton.kernels.prefill_plan import Span, plan
from kvarn.format import HEAD_DIMS, Preset, TileFormat
from kvarn.visibility import num_sealed

INTERPRET = "--interpret" in sys.argv[1:]
TOLERANCE = 2e-3  # of the largest output; the oracle gets the numbers of the model's dtype
PRESETS = ("kvarn_k4v2_g128", "kvarn_k4v4_g128", "kvarn_k3v5_g64", "kvarn_k8v8_g128")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured."""

    fmt: TileFormat
    heads: int
    kv_heads: int
    contexts: tuple[int, ...]  # decode
    batches: tuple[int, ...]
    prompts: tuple[int, ...]  # prefill
    sealed: int  # tiles, of every kv head
    dims: tuple[int, ...]  # correctness
    runs: int


def sizes(interpret: bool) -> Sizes:
    """The sizes of the issue, or tiny ones."""
    if interpret:
        fmt = Preset.parse("kvarn_k4v2_g64").with_head_dim(64)
        return Sizes(
            fmt=fmt, heads=2, kv_heads=1, contexts=(200,), batches=(2,), prompts=(130,), sealed=1, dims=(64,), runs=1
        )
    fmt = Preset.parse("kvarn").with_head_dim(128)
    return Sizes(
        fmt=fmt, heads=32, kv_heads=8, contexts=(4096, 16384, 65536, 131072), batches=(1, 8, 64),
        prompts=(4096, 16384), sealed=1024, dims=HEAD_DIMS, runs=10,
    )  # fmt: skip


class Clock:
    """Medians of the device's time."""

    def __init__(self, device: str, runs: int) -> None:
        self.runs = runs
        self.cuda = device == "cuda"
        self.flush = torch.empty(256 << 20 if self.cuda else 1, dtype=torch.uint8, device=device)

    def __call__(self, run: Callable[[], object]) -> float:
        """Seconds of one run."""
        began = perf_counter()
        run()  # compiles
        if not self.cuda:
            return perf_counter() - began
        events = []
        for _ in range(self.runs):
            self.flush.zero_()
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            first.record()
            run()
            last.record()
            events.append((first, last))
        torch.cuda.synchronize()
        return float(np.median([first.elapsed_time(last) for first, last in events])) / 1e3


def worst(got: Tensor, want: object) -> float:
    """The largest error, relative to the largest output."""
    expected = np.asarray(want)
    return float(np.abs(got.double().cpu().numpy() - expected).max() / np.abs(expected).max())


@dataclass(frozen=True)
class Cache:
    """One layer's pools for sequences of one length: sealed tiles in random blocks, exact pages in random slots."""

    fmt: TileFormat
    pool: Tensor  # [S, 2, Hk, G, D]
    sinks: Tensor  # int32 [B]
    tails: Tensor
    tiles: Tensor
    flags: Tensor
    blocks: Tensor  # int32 [B, T]

    @property
    def row_nbytes(self) -> int:
        """Packed and exact bytes that one row of a decode step reads."""
        exact = 2 * self.pool[0].nbytes
        return exact + self.blocks.shape[1] * self.tiles[0].nbytes


def make_cache(fmt: TileFormat, hk: int, batch: int, length: int, dtype: torch.dtype, device: str) -> Cache:
    """Tiles that are real ones, a few of them many times over, each in memory of its own."""
    g, d = fmt.tile_tokens, fmt.head_dim
    count = num_sealed(length - 1, g)
    few = 1 if INTERPRET else 32
    x = torch.randn((2, few, hk, g, d), device=device)
    tiles, flags, _ = seal.seal(x[0], x[1], fmt)
    total = batch * count + 1
    which = torch.randint(0, few, (total,), device=device)
    return Cache(
        fmt=fmt,
        pool=torch.randn((2 * batch, 2, hk, g, d), device=device).to(dtype),
        sinks=torch.randperm(batch, device=device, dtype=torch.int32),
        tails=torch.randperm(batch, device=device, dtype=torch.int32) + batch,
        tiles=tiles[which],
        flags=flags[which],
        blocks=torch.randperm(total, device=device, dtype=torch.int32)[: batch * count].reshape(batch, count),
    )


def check_seal(fmt: TileFormat, device: str) -> tuple[str, bool]:
    """Bytes and flags of random tiles against the oracle's."""
    rng = np.random.default_rng(fmt.head_dim + fmt.key_bits)
    shape = (2 if INTERPRET else 6, fmt.tile_tokens, fmt.head_dim)
    keys, values = (rng.standard_normal((2, *shape), np.float32) * np.float32(1.7)).astype(np.float32)
    keys[-1] += 5 * rng.standard_normal(fmt.head_dim).astype(np.float32)  # biases: the plain candidate
    got, flags, status = seal.seal(torch.from_numpy(keys).to(device), torch.from_numpy(values).to(device), fmt)
    wrong = int(status.any())
    for i in range(len(keys)):
        tile, flag = reference.seal(keys[i], values[i], fmt)
        wrong += bool((got[i].cpu().numpy() != tile).any() or int(flags[i]) != flag)
    return f"seal     {fmt.name} D={fmt.head_dim}: {len(keys) - wrong} of {len(keys)} tiles equal", wrong == 0


def check_attention(fmt: TileFormat, dtype: torch.dtype, device: str) -> list[tuple[str, bool]]:
    """Decode and prefill of one short sequence against the oracle."""
    torch.manual_seed(fmt.head_dim)
    g, d, hk, ratio = fmt.tile_tokens, fmt.head_dim, 2, 3
    n = 4 if INTERPRET else 40
    length = 3 * g + 5
    start = length - n
    x = torch.randn((2, length, hk, d)).to(dtype).to(device)
    query = (torch.randn((n, ratio * hk, d)) * 2).to(dtype).to(device)
    whole = x[:, g : 3 * g].reshape(2, 2, g, hk, d).transpose(2, 3).float()  # tiles 1 and 2
    sealed, sealed_flags, _ = seal.seal(whole[0], whole[1], fmt)
    tiles = torch.full((5, hk, fmt.tile_nbytes), 0xFF, dtype=torch.uint8, device=device)
    flags = torch.full((5, hk), 0xFF, dtype=torch.uint8, device=device)
    blocks = torch.tensor([[4, 1]], dtype=torch.int32, device=device)
    tiles[blocks[0].long()], flags[blocks[0].long()] = sealed, sealed_flags
    pool = torch.full((3, 2, hk, g, d), torch.nan, dtype=dtype, device=device)
    pool[2], pool[0, :, :, :5] = x[:, :g].transpose(1, 2), x[:, 3 * g :].transpose(1, 2)
    scale = d**-0.5
    queries, keys, values = (y.float().cpu().numpy() for y in (query, x[0], x[1]))
    table = blocks[0].tolist()
    read, read_flags = tiles.cpu().numpy()[table], flags.cpu().numpy()[table]
    want = reference.attend(queries, keys, values, read, read_flags, start, scale, fmt)
    window = x[:, start // g * g :].transpose(1, 2)
    got = [
        ("prefill", prefill.attend(query, pool[2], window, tiles, flags, blocks[0], start, scale, fmt), want),
        ("decode ", run_decode(query[-1:], pool, (2, 0, length), tiles, flags, blocks, fmt), want[-1:]),
    ]
    lines = []
    for what, output, expected in got:
        error = worst(output, expected)
        lines.append((f"{what}  {fmt.name} D={d} {str(dtype)[6:]}: error {error:.1e}", error <= TOLERANCE))
    return lines


def run_decode(
    query: Tensor,
    pool: Tensor,
    row: tuple[int, int, int],
    tiles: Tensor,
    flags: Tensor,
    blocks: Tensor,
    fmt: TileFormat,
) -> Tensor:
    """One row: sink slot, tail slot, length."""
    h, d = query.shape[1:]
    hk = tiles.shape[1]
    pages = decode.Pages(*(torch.tensor([x], dtype=torch.int32, device=query.device) for x in row))
    split = decode.decode_plan(blocks.shape[1], fmt.tile_tokens, hk)
    scratch = split.scratch(1, h, d, query.device)
    output = torch.empty((1, h, d), dtype=torch.float32, device=query.device)
    return decode.decode(query, pool, pages, tiles, flags, blocks, d**-0.5, fmt, split, scratch, output)


def correctness(size: Sizes, device: str) -> bool:
    """Every preset, head_dim and dtype; prints a line for each, returns whether all are right."""
    right = True
    for d in size.dims:
        for name in PRESETS[:1] if INTERPRET else PRESETS:
            fmt = Preset.parse(name.replace("g128", "g64") if INTERPRET else name).with_head_dim(d)
            lines = [check_seal(fmt, device)]
            for dtype in (torch.float16,) if INTERPRET else (torch.float16, torch.bfloat16):
                lines += check_attention(fmt, dtype, device)
            for line, good in lines:
                print(f"  {'ok   ' if good else 'WRONG'} {line}", flush=True)
                right &= good
    return right


def time_seal(size: Sizes, clock: Clock, device: str, count: int) -> tuple[float, int]:
    """Seconds and bytes moved of sealing `count` tiles of every kv head of one layer, straight into the pool."""
    fmt, hk = size.fmt, size.kv_heads
    keys, values = torch.randn((2, count, hk, fmt.tile_tokens, fmt.head_dim), device=device).half()
    tiles = torch.empty((count, hk, fmt.tile_nbytes), dtype=torch.uint8, device=device)
    flags, status = torch.empty((2, count, hk), dtype=torch.uint8, device=device)
    blocks = torch.randperm(count, device=device, dtype=torch.int32)
    seconds = clock(lambda: seal.seal_into(keys, values, tiles, flags, status, blocks, fmt))
    return seconds, keys.nbytes + values.nbytes + tiles.nbytes


def bench_seal(size: Sizes, clock: Clock, device: str) -> list[str]:
    """Sealing of many tiles at once."""
    seconds, moved = time_seal(size, clock, device, size.sealed)
    tokens = size.sealed * size.fmt.tile_tokens
    return [
        f"seal      {tokens:>7} tokens                {seconds * 1e3:9.3f} ms   {tokens / seconds / 1e6:5.1f} Mtoken/s"
        f"   {moved / seconds / 1e9:.0f} GB/s"
    ]


def flash(query: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    """SDPA `[B, H, N, D]`; the flash kernel where it takes the shape, else what torch picks."""
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True)
    except RuntimeError:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True)


def bench_decode(size: Sizes, clock: Clock, device: str, bandwidth: float) -> list[str]:
    """Decode over contexts and batches, against float16; each with its share of the memory's bandwidth."""
    fmt, h, hk, d = size.fmt, size.heads, size.kv_heads, size.fmt.head_dim
    lines = []
    for length in size.contexts:
        for batch in size.batches:
            query = torch.randn((batch, h, d), device=device).half()
            cache = make_cache(fmt, hk, batch, length, torch.float16, device)
            lengths = torch.full_like(cache.sinks, length)
            seconds = clock(decoding(query, cache, lengths, torch.empty((batch, h, d), device=device)))
            share = batch * cache.row_nbytes / seconds / bandwidth
            del cache
            keys, values = torch.randn((2, batch, hk, length, d), device=device, dtype=torch.float16)
            exact = clock(partial(flash, query[:, :, None], keys, values, causal=False))
            exact_share = (keys.nbytes + values.nbytes) / exact / bandwidth
            del keys, values
            lines.append(
                f"decode    {length:>7} tokens x batch {batch:<3}      {seconds * 1e3:9.3f} ms   {share:5.0%} bandwidth"
                f"   {versus(exact, seconds)}   {exact_share:5.0%} bandwidth"
            )
    return lines


def decoding(query: Tensor, cache: Cache, lengths: Tensor, output: Tensor) -> Callable[[], object]:
    """A decode step over fixed buffers, with scratch memory of its own, poisoned."""
    b, h, d = query.shape
    split = decode.decode_plan(cache.blocks.shape[1], cache.fmt.tile_tokens, cache.tiles.shape[1])
    scratch = split.scratch(b, h, d, query.device)
    for x in (scratch.folded, scratch.peaks, scratch.stats, scratch.parts):
        x.fill_(torch.nan)
    pages = decode.Pages(cache.sinks, cache.tails, lengths)
    pools = (cache.tiles, cache.flags, cache.blocks)
    return partial(decode.decode, query, cache.pool, pages, *pools, d**-0.5, cache.fmt, split, scratch, output)


def bench_prefill(size: Sizes, clock: Clock, device: str) -> list[str]:
    """A whole prompt as one chunk, a verify step at its end, both against float16, and sealing beside them."""
    fmt, h, hk, d = size.fmt, size.heads, size.kv_heads, size.fmt.head_dim
    lines = []
    for length in size.prompts:
        cache = make_cache(fmt, hk, 1, length, torch.float16, device)
        query = torch.randn((length, h, d), device=device).half()
        keys, values = torch.randn((2, length, hk, d), device=device, dtype=torch.float16)
        slots = {"sink": int(cache.sinks), "tail": int(cache.tails)}
        for what, n in (("prefill", length), ("verify ", 8)):
            start = length - n
            span = Span(query_at=0, num_tokens=n, start=start, key_at=0, key_start=start, **slots)
            work = plan([span], h // hk, fmt, torch.float16, device)
            scratch = prefill.prefill_scratch(work, h, device)
            output = torch.empty((n, h, d), dtype=torch.float16, device=device)
            arguments = (
                query[start:],
                keys[start:],
                values[start:],
                cache.pool,
                cache.tiles,
                cache.flags,
                cache.blocks,
            )
            seconds = clock(partial(prefill.prefill, *arguments, work, d**-0.5, scratch, output))
            q, k, v = (x.transpose(0, 1)[None] for x in (query[start:], keys, values))
            exact = clock(partial(flash, q, k, v, causal=n == length))
            flops = 4 * h * d * (n * start + n * (n + 1) / 2)
            rate = flops / seconds / 1e12
            lines.append(
                f"{what}   {n:>7} tokens at {start:<7}     {seconds * 1e3:9.3f} ms   {rate:5.0f} TFLOPS"
                f"      {versus(exact, seconds)}"
            )
        sealing, _ = time_seal(size, clock, device, max(cache.blocks.shape[1], 1))
        lines.append(f"sealing   the tiles of {length:<7}         {sealing * 1e3:9.3f} ms")
    return lines


def versus(exact: float, seconds: float) -> str:
    """The float16 time and how many times faster ours is."""
    return f"float16 {exact * 1e3:9.3f} ms   {exact / seconds:5.2f} x"


def check_graph(size: Sizes, clock: Clock, device: str) -> tuple[list[str], bool]:
    """Decode captured as a CUDA graph over fixed buffers, replayed at other lengths across tile edges: the bits of a
    direct run with buffers of its own. Without CUDA there is no graph, and two direct runs are compared."""
    h, d, g = size.heads, size.fmt.head_dim, size.fmt.tile_tokens
    batch, most = min(8, max(size.batches)), min(16384, max(size.contexts))
    cache = make_cache(size.fmt, size.kv_heads, batch, most, torch.float16, device)
    query = torch.randn((batch, h, d), device=device).half()
    lengths = torch.full_like(cache.sinks, most)
    fixed, direct = (torch.empty((batch, h, d), device=device) for _ in range(2))
    replay = captured = decoding(query, cache, lengths, fixed)
    run = decoding(query, cache, lengths, direct)
    captured()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured()
        replay = graph.replay
    equal = True
    for base in (g, most) if INTERPRET else (1, g - 1, g, g + 1, 2 * g, 3 * g - 1, most):
        lengths.copy_(torch.clamp(base + torch.arange(batch, device=device), max=most))
        query.normal_()
        fixed.fill_(torch.nan)
        replay()
        run()
        equal &= torch.equal(fixed, direct) and bool(fixed.isfinite().all())
    lengths.fill_(most)
    graphed, plain = clock(replay), clock(run)
    line = f"graph     {most:>7} tokens x batch {batch:<3}      {graphed * 1e3:9.3f} ms   direct {plain * 1e3:9.3f} ms"
    return [f"{line}   {'equal to the bit' if equal else 'NOT EQUAL'}"], equal


def peak_bandwidth(clock: Clock, device: str) -> tuple[float, str]:
    """Bytes a second: the device's own figure where torch knows it, else what a copy reaches."""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        rate, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
        if rate and width:
            return 2 * rate * 1e3 * width / 8, "by its clock"
    source = torch.empty(1 << (30 if device == "cuda" else 10), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock(lambda: target.copy_(source)), "as a copy reaches it"


def main() -> int:
    """Run everything; the exit code."""
    parser = argparse.ArgumentParser(description="Check and measure the Triton kernels on a CUDA GPU.")
    parser.add_argument("--interpret", action="store_true", help="tiny shapes in Triton's interpreter, no GPU")
    parser.parse_args()
    if not (INTERPRET or torch.cuda.is_available()):
        print(
            f"bench_cuda: torch {torch.__version__} sees no CUDA device; run it on a machine with one, "
            "or with --interpret to try the code",
            file=sys.stderr,
        )
        return 1
    device = "cpu" if INTERPRET else "cuda"
    began = perf_counter()
    size = sizes(INTERPRET)
    name = "Triton's interpreter" if INTERPRET else torch.cuda.get_device_name(0)
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, {size.fmt.name}, D={size.fmt.head_dim}")
    right = correctness(size, device)
    clock = Clock(device, size.runs)
    bandwidth, how = peak_bandwidth(clock, device)
    lines = bench_seal(size, clock, device)
    lines += bench_prefill(size, clock, device)
    graph, equal = check_graph(size, clock, device)
    lines += bench_decode(size, clock, device, bandwidth)
    print(f"\n{name}: {size.heads} query heads, {size.kv_heads} kv heads, bandwidth {bandwidth / 1e9:.0f} GB/s {how}")
    print("\n".join(lines + graph))
    print(f"{perf_counter() - began:.0f} s; {'all right' if right and equal else 'WRONG RESULTS, see above'}")
    return 0 if right and equal else 1


if __name__ == "__main__":
    sys.exit(main())
