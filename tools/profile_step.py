"""Where the time goes on a CPU, in a prompt and in decode steps of several numbers of rows.

    python tools/profile_step.py demo

Matrix products, attention, sealing, sampling, and the rest: transformers' Python, norms, rotary embeddings, the engine.
One thread, by its own CPU time. Every row has a prompt of its own; decode is the median of its steps.
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
from kvarn.request import Request, RequestParams
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
    kernels.attend = timed("attention", kernels.attend)
    kernels.seal = timed("sealing", kernels.seal)
    results.sample = timed("sampling", results.sample)  # type: ignore[attr-defined]


def start(backend: Backend, rows: int, tokens: int, answer: int) -> tuple[Engine, list[Request]]:
    """An engine with so many random prompts."""
    context = tokens + answer
    one = holding(context, backend.info.plan)
    config = EngineConfig(context=context, max_sequences=rows, blocks=rows * one.blocks, slots=rows * one.slots)
    engine = Engine(backend, config)
    generator = torch.Generator().manual_seed(rows)
    requests = []
    for _ in range(rows):
        prompt = torch.randint(10, backend.info.vocab_size, (tokens,), generator=generator).tolist()
        requests.append(engine.add(RequestParams(prompt=tuple(prompt), max_tokens=answer)))
    return engine, requests


def profile_prompt(backend: Backend, tokens: int) -> list[float]:
    """Milliseconds of reading one prompt, and of its parts."""
    engine, (request,) = start(backend, 1, tokens, 1)
    spent.clear()
    begun = time.thread_time()
    while not request.answer:
        engine.step()
    total = time.thread_time() - begun
    return [total * 1e3, *(spent.get(name, 0.0) * 1e3 for name in names)]


def profile_decode(backend: Backend, rows: int, tokens: int, steps: int) -> list[float]:
    """Milliseconds of a decode step after prompts of `tokens` tokens, and of its parts."""
    engine, requests = start(backend, rows, tokens, steps + 8)
    while any(not request.answer for request in requests):
        engine.step()
    measured: list[list[float]] = []
    for _ in range(steps):
        spent.clear()
        begun = time.thread_time()
        engine.step()
        total = time.thread_time() - begun
        measured.append([total * 1e3, *(spent.get(name, 0.0) * 1e3 for name in names)])
    return [median(column) for column in zip(*measured, strict=True)]


def row(what: str, times: list[float]) -> str:
    """A row of the table."""
    total, *parts = times
    return f"| {what} | " + " | ".join(f"{x:.1f}" for x in (total, *parts, total - sum(parts))) + " |"


@click.command()
@click.argument("model")
@click.option("--rows", default="1,8,16", help="Numbers of rows.", show_default=True)
@click.option("--tokens", default=1500, help="Tokens of the prompts before decode.", show_default=True)
@click.option("--prompt", default=8000, help="Tokens of the prompt that is measured.", show_default=True)
@click.option("--steps", default=9, help="Steps that are measured.", show_default=True)
@click.option("--dtype", default="bfloat16", help="Of the weights.", show_default=True)
def main(model: str, rows: str, tokens: int, prompt: int, steps: int, dtype: str) -> None:
    torch.set_num_threads(1)
    watch()
    options = LoadOptions(dtype=dtype, device="cpu")
    backend = torch_backend.load(resolve(model, progress=progress_bar()), Preset(), options)
    click.echo("| what | ms | " + " | ".join(f"{name} ms" for name in names) + " | rest ms |")
    click.echo("| --- " * (len(names) + 3) + "|")
    for count in (int(x) for x in rows.split(",")):
        click.echo(row(f"decode, {count} rows", profile_decode(backend, count, tokens, steps)))
    click.echo(row(f"a prompt of {prompt}", profile_prompt(backend, prompt)))


if __name__ == "__main__":
    main()
