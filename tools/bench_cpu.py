"""The CPU kernels against torch and transformers, in one run: decode attention alone, and the demo model end to end.

    python tools/bench_cpu.py demo

First table: attention of one token over a context, 8 kv heads with one query head each (D=128), or the demo model's 3
with 3 each (D=64): kvarn_k4v2_g128 by our kernel, torch's scaled_dot_product_attention in three dtypes, and what
transformers' quantized cache does in every step (4-bit groups of 64: unpack and dequantize all of it, then attend in
float32). Second table: prefill and decode of the model, KVarN's engine against transformers with its own cache, and
decode with its quantized cache (QuantizedCache over optimum-quanto: 4 bits, groups of 64, the last 128 tokens exact).
transformers runs the same module as the engine, with its packed weights.

One thread is timed by the CPU time of that thread, so other programs disturb it little; several threads by the clock.
Every figure is the best of its repetitions but for end-to-end prefill, which runs once. Compare within a run only.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import click
import torch
import torch.nn.functional as F
from transformers import QuantizedCache
from transformers.utils import is_optimum_quanto_available

from kvarn.backend import LoadOptions
from kvarn.backends.triton import ops
from kvarn.backends.triton.backend import TorchBackend, load
from kvarn.backends.triton.cpu import kernels
from kvarn.capacity import holding
from kvarn.engine import Engine, EngineConfig
from kvarn.format import Preset, TileFormat
from kvarn.request import RequestParams
from kvarn.serve.loading import progress_bar
from kvarn.serve.models import resolve

GROUP = 64  # of transformers' quantized cache
SHAPES = ((64, 3, 3), (128, 8, 1))  # head_dim, kv heads, query heads per kv head


def clock() -> float:
    """Seconds: of this thread's CPU where it works alone, else of the wall."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def best(run: Callable[[], Any], seconds: float = 0.4) -> float:
    """The shortest of several runs, in milliseconds."""
    run()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < seconds and len(times) < 50):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times) * 1e3


def random_tiles(fmt: TileFormat, count: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles of random codes; constants of 0.1. Sealing them would take longer than what is measured."""
    tiles = torch.randint(0, 256, (count, heads, fmt.tile_nbytes), dtype=torch.uint8)
    for name, field in fmt.fields.items():
        if not name.endswith("codes"):
            constants = torch.full((count, heads, field.nbytes // 2), 0.1, dtype=torch.float16)
            tiles[..., field.offset : field.offset + field.nbytes] = constants.view(torch.uint8)
    return tiles, torch.ones(count, heads, dtype=torch.uint8)


def our_decode(context: int, d: int, hk: int, per: int) -> float:
    fmt = Preset().with_head_dim(d)
    g = fmt.tile_tokens
    count = context // g - 2
    tiles, flags = random_tiles(fmt, count, hk)
    pool, query = torch.randn(2, 2, hk, g, d), torch.randn(1, hk * per, d)
    pages = ops.Pages(torch.zeros(2, dtype=torch.int64), torch.arange(2), torch.full((2,), g))
    blocks = ops.Tiles(torch.zeros(count, dtype=torch.int64), torch.arange(count))
    return best(lambda: kernels.decode(query, pool, pages, tiles, flags, blocks, d**-0.5, fmt))


def sdpa(context: int, d: int, hk: int, per: int, dtype: torch.dtype) -> float:
    query = torch.randn(1, hk * per, 1, d).to(dtype)
    keys, values = torch.randn(2, 1, hk, context, d).to(dtype)
    return best(lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=per > 1))


def quantized_cache(context: int, d: int, hk: int, per: int) -> float:
    query = torch.randn(1, hk * per, 1, d)
    packed = torch.randint(0, 256, (2, hk, context, d // GROUP, GROUP // 2), dtype=torch.uint8)
    scale, zero = torch.randn(2, 2, hk, context, d // GROUP, 1)

    def run() -> torch.Tensor:
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        keys, values = (codes * scale + zero).flatten(-2)[:, None]
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=per > 1)

    return best(run)


def kernel_rows(contexts: list[int]) -> Iterator[list[str]]:
    """The first table: milliseconds, and in how many times ours each other takes."""
    for d, hk, per in SHAPES:
        for context in contexts:
            ours = our_decode(context, d, hk, per)
            others = [sdpa(context, d, hk, per, x) for x in (torch.float32, torch.bfloat16, torch.float16)]
            others.append(quantized_cache(context, d, hk, per))
            head = [str(torch.get_num_threads()), str(d), f"{hk * per}/{hk}", str(context), f"{ours:.2f}"]
            yield head + [f"{x:.2f} ({x / ours:.1f}x)" for x in others]


@dataclass(frozen=True)
class Run:
    """One way end to end: seconds of prefill, milliseconds of a decode step."""

    prefill: float
    decode: float


def run_engine(backend: TorchBackend, prompt: tuple[int, ...], answer: int) -> Run:
    context = len(prompt) + answer
    one = holding(context, backend.info.plan)
    config = EngineConfig(context=context, max_sequences=1, blocks=one.blocks, slots=one.slots, prefill_chunk=512)
    engine = Engine(backend, config)
    engine.add(RequestParams(prompt=prompt, max_tokens=answer))
    stamps = [clock()]
    while engine.scheduler.has_work:
        if any(event.token is not None for event in engine.step()):
            stamps.append(clock())
    return _run(stamps)


def run_transformers(module: Any, prompt: tuple[int, ...], answer: int, past: Any = None) -> Run:
    stamps = [clock()]
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(answer):
            output = module(tokens, cache=past, use_cache=True, logits_to_keep=1)
            past, tokens = output.past_key_values, output.logits[:, -1:].argmax(-1)
            stamps.append(clock())
    return _run(stamps)


def _run(stamps: list[float]) -> Run:
    steps = [b - a for a, b in pairwise(stamps[1:])]
    return Run(prefill=stamps[1] - stamps[0], decode=min(steps) * 1e3)


def model_rows(model: str, dtype: str, contexts: list[int], answer: int) -> Iterator[list[str]]:
    """The second table: KVarN's engine, and in how many times its time transformers does the same."""
    backend = load(resolve(model, progress=progress_bar()), Preset(), LoadOptions(dtype=dtype, device="cpu"))
    assert isinstance(backend, TorchBackend)
    module = backend.model.module
    generator = torch.Generator().manual_seed(0)
    for context in contexts:
        prompt = tuple(torch.randint(10, backend.info.vocab_size, (context,), generator=generator).tolist())
        implementation = module.config._attn_implementation
        ours = run_engine(backend, prompt, answer)
        module.set_attn_implementation("sdpa")
        theirs = run_transformers(module, prompt, answer)
        cache = QuantizedCache("quanto", module.config, nbits=4, q_group_size=GROUP)
        quantized = run_transformers(module, prompt, answer, cache)
        module.set_attn_implementation(implementation)
        yield [
            *(str(torch.get_num_threads()), dtype, str(context)),
            *(f"{ours.prefill:.2f}", f"{theirs.prefill:.2f} ({theirs.prefill / ours.prefill:.2f}x)"),
            *(f"{ours.decode:.1f}", f"{theirs.decode:.1f} ({theirs.decode / ours.decode:.2f}x)"),
            f"{quantized.decode:.1f} ({quantized.decode / ours.decode:.2f}x)",
        ]


def table(head: list[str], rows: Iterator[list[str]]) -> None:
    """A table in Markdown, line by line as it comes."""
    click.echo("| " + " | ".join(head) + " |")
    click.echo("|" + " --- |" * len(head))
    for row in rows:
        click.echo("| " + " | ".join(row) + " |")
    click.echo()


@click.command()
@click.argument("model")
@click.option("--contexts", default="1024,4096,16384,65536", help="Contexts of the first table; empty: no table.")
@click.option("--model-contexts", default="1024,4096,8000", help="Contexts of the second table; empty: no table.")
@click.option("--dtype", "dtypes", multiple=True, default=("float32", "bfloat16"), help="Of the weights, second table.")
@click.option("--threads", default=f"1,{torch.get_num_threads()}", help="Numbers of threads.")
@click.option("--answer", default=9, help="Tokens that are generated, second table.")
def main(model: str, contexts: str, model_contexts: str, dtypes: tuple[str, ...], threads: str, answer: int) -> None:
    """Print both tables."""
    if model_contexts and not is_optimum_quanto_available():
        raise click.ClickException("transformers' quantized cache wants optimum-quanto; pip install optimum-quanto")

    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",") if x]

    head = ["threads", "D", "heads", "context", "kvarn ms", "SDPA float32", "bfloat16", "float16", "quantized cache"]
    if contexts:
        for count in dict.fromkeys(numbers(threads)):
            torch.set_num_threads(count)
            table(head, kernel_rows(numbers(contexts)))
    head = ["threads", "weights", "context", "prefill s", "transformers", "decode ms", "transformers", "quantized"]
    if model_contexts:
        for count in dict.fromkeys(numbers(threads)):
            torch.set_num_threads(count)
            for dtype in dtypes:
                table(head, model_rows(model, dtype, numbers(model_contexts), answer))


if __name__ == "__main__":
    main()
