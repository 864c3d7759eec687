"""`kvarn estimate`: what a model takes, what fits this machine's memory, and which limit binds; nothing is loaded."""

import json
import re
from pathlib import Path
from typing import Any

import click
import psutil

from kvarn import rope_scaling
from kvarn.backend import ModelInfo
from kvarn.capacity import holding, plan_serving, pool_size
from kvarn.checkpoint import check_files, weight_bytes
from kvarn.errors import CapacityError, ModelError, UsageError
from kvarn.format import Preset
from kvarn.model_plan import plan_model
from kvarn.serve.loading import progress_bar, size
from kvarn.serve.models import resolve

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str) -> int:
    """`24GiB`, `512m`, `1.5 G` or a plain number -> bytes; UsageError otherwise."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None:
        raise UsageError(f"{text!r} is not a size; write bytes, or a number with K, M, G or T, like 24GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def estimate(
    model: str,
    preset: Preset | None,
    *,
    memory: int | None,
    context: int | None,
    max_sequences: int,
    dtype: str,
    rope: dict[str, Any] | None,
    as_json: bool,
) -> None:
    """Print the sizes for one model under one cache dtype, beside the exact cache."""
    folder = resolve(model, progress=progress_bar())
    report = estimate_folder(
        folder,
        preset,
        memory=psutil.virtual_memory().available if memory is None else memory,
        context=context,
        max_sequences=max_sequences,
        dtype=dtype,
        rope=rope,
    )
    click.echo(json.dumps(report) if as_json else _lines(report))


def estimate_folder(
    folder: Path,
    preset: Preset | None,
    *,
    memory: int,
    context: int | None,
    max_sequences: int,
    dtype: str,
    rope: dict[str, Any] | None,
) -> dict[str, Any]:
    """The figures: weights, bytes per token, and the pools for `preset` and for `exact`. rope: an override."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {error}") from error
    if rope is not None:
        config = rope_scaling.apply(config, rope)
    dtype = _dtype(dtype, config)
    itemsize = 4 if dtype == "float32" else 2
    weights = weight_bytes(check_files(folder), itemsize)
    report: dict[str, Any] = {"model": folder.name, "dtype": dtype, "weight_bytes": weights, "memory_bytes": memory}
    caches = []
    for wanted in [preset, None] if preset else [None]:
        plan = plan_model(config, wanted)
        info = ModelInfo(plan=plan, vocab_size=0, dtype=dtype, device="", weight_bytes=weights, eos_token_ids=())
        sizes = pool_size(plan, itemsize)
        cache: dict[str, Any] = {
            "kv_cache_dtype": plan.name,
            "layers": plan.describe(),
            "bytes_per_token": sizes.block_bytes / plan.tile_tokens if wanted else info.exact_bytes_per_token,
            "bytes_model_context": holding(plan.max_context, plan).nbytes(sizes),
            "model_context": plan.max_context,
        }
        try:
            fits = plan_serving(info, sizes, memory - weights, context=context, max_sequences=max_sequences)
        except CapacityError as error:
            cache |= {"fits": False, "reason": str(error)}
        else:
            cache |= {
                "fits": True,
                "context": fits.context,
                "limit": fits.limit,
                "kv_bytes": fits.kv_bytes,
                "tokens": fits.tokens,
                "sequences": fits.sequences,
            }
        caches.append(cache)
    return report | {"caches": caches}


def _dtype(name: str, config: dict[str, Any]) -> str:
    known = ("float32", "float16", "bfloat16")
    if name == "auto":
        text = config.get("text_config") or config
        name = str(text.get("dtype") or text.get("torch_dtype") or "float32")
        return name if name in known else "float32"
    if name not in known:
        raise UsageError(f"unknown dtype {name!r}; use auto, {', '.join(known)}")
    return name


def _lines(report: dict[str, Any]) -> str:
    memory = report["memory_bytes"]
    lines = [
        f"{report['model']}: weights {size(report['weight_bytes'])} in {report['dtype']}, of {size(memory)} of memory"
    ]
    for cache in report["caches"]:
        lines.append(f"{cache['kv_cache_dtype']}: {cache['layers']}")
        lines.append(
            f"  {cache['bytes_per_token'] / 1024:.1f} KiB a token, {size(cache['bytes_model_context'])} for the "
            f"model's context of {cache['model_context']} tokens"
        )
        if cache["fits"]:
            lines.append(
                f"  fits: a context of {cache['context']} tokens (limit: {cache['limit']}), "
                f"{cache['sequences']} such at once, {cache['tokens']} tokens in {size(cache['kv_bytes'])} of KV cache"
            )
        else:
            lines.append(f"  does not fit: {cache['reason']}")
    return "\n".join(lines)
