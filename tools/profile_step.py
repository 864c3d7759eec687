"""Where a decode step on a CPU goes: matrix products, attention, sampling, and the rest, for several numbers of rows.

    python tools/profile_step.py demo

One thread, by its own CPU time. Every row has a prompt of its own; medians over the steps. The rest is transformers'
Python, norms, rotary embeddings, and the engine.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import click
import torch
import torch.nn.functional as F

from kvarn.backend import Backend, LoadOptions
from kvarn.backends.triton import backend as torch_backend
from kvarn.backends.triton import results
from kvarn.backends.triton.cpu import kernels
from kvarn.backends.triton.cpu.linear import PackedLinear
from kvarn.capacity import holding
from kvarn.engine import Engine, EngineConfig
from kvarn.format import Preset
from kvarn.request import RequestParams
from kvarn.serve.loading import progress_bar
from kvarn.serve.models import resolve

names = ("matrix products", "attention", "sealing", "sampling")
spent: dict[str, float] = {}


def timed(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, whose time is added to what `name` has spent."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return run(*args, **kwargs)
        finally:
            spent[name] = spent.get(name, 0.0) + time.thread_time() - start

    return wrapped


def watch() -> None:
    """Put clocks around the parts of a step, before a backend takes hold of them."""
    F.linear = timed("matrix products", F.linear)
    PackedLinear.forward = timed("matrix products", PackedLinear.forward)  # type: ignore[method-assign]
    kernels.decode = timed("attention", kernels.decode)
    kernels.seal = timed("sealing", kernels.seal)
    results.sample = timed("sampling", results.sample)  # type: ignore[attr-defined]


def profile(backend: Backend, rows: int, tokens: int, steps: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of a decode step of `rows` rows after prompts of `tokens` tokens, and of its parts."""
    context = tokens + steps + 8
    one = holding(context, backend.info.plan)
    config = EngineConfig(context=context, max_sequences=rows, blocks=rows * one.blocks, slots=rows * one.slots)
    engine = Engine(backend, config)
    generator = torch.Generator().manual_seed(rows)
    requests = []
    for _ in range(rows):
        prompt = torch.randint(10, backend.info.vocab_size, (tokens,), generator=generator).tolist()
        requests.append(engine.add(RequestParams(prompt=tuple(prompt), max_tokens=context - tokens)))
    while any(not request.answer for request in requests):
        engine.step()
    totals: list[float] = []
    parts: list[dict[str, float]] = []
    for _ in range(steps):
        spent.clear()
        start = time.thread_time()
        engine.step()
        totals.append((time.thread_time() - start) * 1e3)
        parts.append(dict(spent))
    return median(totals), {name: median(part.get(name, 0.0) for part in parts) * 1e3 for name in names}


@click.command()
@click.argument("model")
@click.option("--rows", default="1,8,16", help="Numbers of rows.", show_default=True)
@click.option("--tokens", default=1500, help="Tokens of every prompt.", show_default=True)
@click.option("--steps", default=9, help="Steps that are measured.", show_default=True)
@click.option("--dtype", default="bfloat16", help="Of the weights.", show_default=True)
def main(model: str, rows: str, tokens: int, steps: int, dtype: str) -> None:
    torch.set_num_threads(1)
    watch()
    options = LoadOptions(dtype=dtype, device="cpu")
    backend = torch_backend.load(resolve(model, progress=progress_bar()), Preset(), options)
    click.echo("| rows | step ms | " + " | ".join(f"{name} ms" for name in names) + " | rest ms |")
    click.echo("| --- " * (len(names) + 3) + "|")
    for count in (int(x) for x in rows.split(",")):
        total, parts = profile(backend, count, tokens, steps)
        cells = [parts.get(name, 0.0) for name in names]
        click.echo(f"| {count} | {total:.1f} | " + " | ".join(f"{x:.1f}" for x in (*cells, total - sum(cells))) + " |")


if __name__ == "__main__":
    main()
