"""`kvarn ppl`: teacher-forced perplexity of a text, and how far a cache's predictions are from another cache's."""

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

from kvarn.backend import Backend
from kvarn.capacity import plan_context
from kvarn.engine import Engine, EngineConfig
from kvarn.errors import UsageError
from kvarn.format import Preset
from kvarn.request import RequestParams
from kvarn.serve.fidelity import Fidelity, Floats, log_softmax
from kvarn.serve.loading import ModelOptions, load, say, size


def ppl(model: ModelOptions, file: Path, *, against: str | None, max_tokens: int | None, as_json: bool) -> None:
    """Score a text file in windows of the context size, and print the figures."""
    other = None if against in (None, "exact") else Preset.parse(against or "")
    loaded = load(model)
    tokens = read_tokens(file, loaded.tokenizer.encode, max_tokens)
    caches = [loaded.backend] + ([loaded.backend.share(other)] if against else [])
    fidelity = score(caches, tokens, model)
    plan, info = loaded.backend.info.plan, loaded.backend.info
    fmt = plan.tile_format
    report = fidelity.summary() | {
        "bits_per_value": fmt.bits_per_value if fmt else (32.0 if info.dtype == "float32" else 16.0),
        "kv_cache_dtype": plan.name,
        "against": against,
        "dtype": info.dtype,
        "prefill_chunk": model.prefill_chunk,
    }
    click.echo(json.dumps(report) if as_json else _table(report))


def read_tokens(file: Path, encode: Any, max_tokens: int | None) -> list[int]:
    """The file's token ids, cut to `max_tokens`; UsageError when it cannot be read or is too short."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    tokens: list[int] = encode(text)
    if len(tokens) < 2:
        raise UsageError(f"{file} has {len(tokens)} tokens; at least 2 are needed to predict one")
    return tokens[:max_tokens]


def score(caches: list[Backend], tokens: list[int], model: ModelOptions) -> Fidelity:
    """Run every window through each cache in step, chunk by chunk; the first cache is judged, a second is the judge."""
    window = min(model.ctx_size or min(caches[0].info.plan.max_context, 2048), len(tokens))
    available = caches[0].available_bytes() // len(caches)
    engines = []
    for cache in caches:
        capacity = plan_context(cache.info, cache.pool_size, available, window)
        say(f"cache {cache.info.plan.name}: {size(capacity.kv_bytes)} for windows of {window} tokens")
        engines.append(Engine(cache, EngineConfig(context=window, prefill_chunk=model.prefill_chunk)))
    fidelity = Fidelity()
    for low in range(0, len(tokens) - 1, window):
        part = tokens[low : low + window]
        streams = [
            engine.stream(RequestParams(prompt=tuple(part), max_tokens=0, return_logits=True)) for engine in engines
        ]
        start = 0
        for events in zip(*streams, strict=True):
            logits: list[Floats] = [event.logits for event in events if event.logits is not None]
            stop = start + len(logits[0])
            targets = np.array(part[start + 1 : stop + 1], dtype=np.int64)
            if len(targets):
                fidelity.add(start, logits[0], targets, log_softmax(logits[1]) if len(logits) > 1 else None)
            start = stop
        say(f"{low + len(part)} of {len(tokens)} tokens")
    return fidelity


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['kv_cache_dtype']}: {report['bits_per_value']:.2f} bits a value, {report['tokens']} predicted "
        f"tokens, perplexity {report['ppl']:.4f}"
    ]
    if report["against"]:
        lines.append(
            f"against {report['against']}: KL mean {report['kl_mean']:.5f}, median {report['kl_median']:.5f}, "
            f"p99 {report['kl_p99']:.5f} nats; top-1 agreement {report['top1']:.2%}"
        )
    for bucket in report["buckets"]:
        kl = f"  KL mean {bucket['kl_mean']:.5f}" if "kl_mean" in bucket else ""
        lines.append(f"  positions {bucket['from']:>6} to {bucket['to']:>6}: perplexity {bucket['ppl']:8.3f}{kl}")
    return "\n".join(lines)
