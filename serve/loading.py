"""From the options of a command to an engine: resolve, load, plan the memory, and say so on standard error."""

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvarn import backend as backends
from kvarn.backend import Backend, LoadOptions
from kvarn.capacity import Capacity, plan_context
from kvarn.engine import Engine, EngineConfig
from kvarn.format import Preset
from kvarn.serve.models import resolve
from kvarn.serve.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options that run, ppl and their like share, as the command line gives them."""

    model: str
    backend: str = "auto"
    kv_cache_dtype: str = "kvarn"
    ctx_size: int | None = None
    prefill_chunk: int = 512
    dtype: str = "auto"
    device: str = "auto"

    @property
    def preset(self) -> Preset | None:
        """The preset that was asked for; None is `exact`."""
        return None if self.kv_cache_dtype == "exact" else Preset.parse(self.kv_cache_dtype)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready to answer."""

    model_dir: Path
    backend_name: str
    backend: Backend
    tokenizer: Tokenizer
    load_seconds: float


def say(text: str) -> None:
    """One line for the user, on standard error."""
    click.echo(f"kvarn: {text}", err=True)


def size(nbytes: float) -> str:
    """Bytes for people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def progress_bar() -> Callable[[str, int, int], None]:
    """A progress callback that draws one bar per stage on standard error, and nothing where that is no terminal."""
    bars: dict[str, tuple[Any, int]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            if stage not in bars:
                bars[stage] = (None, 0)
                say(f"{stage} ...")
            return
        if stage not in bars:
            bars[stage] = (click.progressbar(length=max(total, 1), label=stage, file=sys.stderr), 0)
        bar, before = bars[stage]
        bar.update(done - before)
        bars[stage] = (bar, done)
        if done >= total:
            bar.render_finish()

    return progress


def apple_silicon() -> bool:
    """Whether this is a Mac with Apple's own processor, where MLX is the better backend."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def load(options: ModelOptions) -> Loaded:
    """Resolve and load; every refusal comes before the weights where it can."""
    preset = options.preset
    name = backends.choose(options.backend, apple_silicon=apple_silicon())
    model_dir = resolve(options.model, progress=progress_bar())
    start = time.perf_counter()
    tokenizer = Tokenizer(model_dir)
    backend = backends.load(name, model_dir, preset, LoadOptions(dtype=options.dtype, device=options.device))
    info = backend.info
    say(
        f"{model_dir.name} on {info.device} ({name}), {info.dtype} weights, "
        f"cache {info.plan.name}: {info.plan.describe()}"
    )
    if name == "mlx" and info.device == "cpu":
        say("MLX on a CPU is slow and only for testing; --backend triton is faster here")
    return Loaded(
        model_dir=model_dir,
        backend_name=name,
        backend=backend,
        tokenizer=tokenizer,
        load_seconds=time.perf_counter() - start,
    )


def start_engine(loaded: Loaded, options: ModelOptions) -> tuple[Engine, Capacity]:
    """Plan the context, say what it takes, and allocate it."""
    backend = loaded.backend
    capacity = plan_context(backend.info, backend.pool_size, backend.available_bytes(), options.ctx_size)
    say(
        f"memory: weights {size(backend.info.weight_bytes)}, KV {size(capacity.kv_bytes)} "
        f"for {capacity.context} tokens ({capacity.limit}; exact would take {size(capacity.exact_bytes)}), "
        f"{size(capacity.available_bytes)} free: fits"
    )
    return Engine(backend, EngineConfig(context=capacity.context, prefill_chunk=options.prefill_chunk)), capacity
