"""From the options of a command to an engine: resolve, load, plan the memory, and say so on standard error."""

import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from kvarn import backend as backends
from kvarn import rope_scaling
from kvarn.backend import Backend, LoadOptions
from kvarn.capacity import Capacity, plan_context
from kvarn.checkpoint import check_files
from kvarn.engine import Engine, EngineConfig
from kvarn.folders import cache_folder
from kvarn.format import Preset
from kvarn.identity import weights_identity
from kvarn.serve.literal import one_line
from kvarn.serve.models import resolve
from kvarn.serve.tokenizer import Tokenizer
from kvarn.tier import NO_TIER, Tier


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
    adapter: Path | None = None
    rope_scaling: str | None = None

    @property
    def rope(self) -> dict[str, Any] | None:
        """The RoPE override that was asked for."""
        return None if self.rope_scaling is None else rope_scaling.parse(self.rope_scaling)

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
    weights: Callable[[], str]  # waits for the content hash of the weights, see kvarn.identity


def say(text: str) -> None:
    """One line for the user, on standard error; names in it cannot steer the terminal."""
    click.echo(f"kvarn: {one_line(text)}", err=True)


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


def load(options: ModelOptions, *, identify: bool = False) -> Loaded:
    """Resolve and load; every refusal comes before the weights where it can.

    identify: the content hash of the weights will be asked for, so it is computed meanwhile.
    """
    preset, rope = options.preset, options.rope
    name = backends.choose(options.backend, apple_silicon=apple_silicon())
    model_dir = resolve(options.model, progress=progress_bar())
    start = time.perf_counter()
    hashing = ThreadPoolExecutor(1) if identify else None  # beside the loading, which reads the same bytes
    weights = hashing.submit(hash_weights, model_dir).result if hashing else partial(hash_weights, model_dir)
    if hashing:
        hashing.shutdown(wait=False)
    tokenizer = Tokenizer(model_dir)
    asked = LoadOptions(dtype=options.dtype, device=options.device, adapter=options.adapter, rope_scaling=rope)
    backend = backends.load(name, model_dir, preset, asked)
    info = backend.info
    say(
        f"{model_dir.name} on {info.device} ({name}), {info.dtype} weights, "
        f"cache {info.plan.name}: {info.plan.describe()}"
        + (f"; adapter {options.adapter.name}" if options.adapter else "")
        + (f"; RoPE {options.rope_scaling}" if options.rope_scaling else "")
    )
    if name == "mlx" and info.device == "cpu":
        say("MLX on a CPU is slow and only for testing; --backend triton is faster here")
    return Loaded(
        model_dir=model_dir,
        backend_name=name,
        backend=backend,
        tokenizer=tokenizer,
        load_seconds=time.perf_counter() - start,
        weights=weights,
    )


def hash_weights(model_dir: Path) -> str:
    """The content hash of a model folder's weights, remembered in the cache folder."""
    return weights_identity(check_files(model_dir), cache_folder() / "weights.json")


def start_engine(loaded: Loaded, options: ModelOptions, tier: Tier = NO_TIER) -> tuple[Engine, Capacity]:
    """Plan the context, say what it takes, and allocate it."""
    backend = loaded.backend
    capacity = plan_context(backend.info, backend.pool_size, backend.available_bytes(), options.ctx_size)
    say(
        f"memory: weights {size(backend.info.weight_bytes)}, KV {size(capacity.kv_bytes)} "
        f"for {capacity.context} tokens ({capacity.limit}; exact would take {size(capacity.exact_bytes)}), "
        f"{size(capacity.available_bytes)} free: fits"
    )
    config = EngineConfig(context=capacity.context, prefill_chunk=options.prefill_chunk)
    return Engine(backend, config, tier=tier), capacity
