"""How much each cache changes a model's predictions, in one run: KVarN presets against affine quantized caches.

    python tools/bench_fidelity.py demo TEXT --tokens 8192

Every cache is compared with the exact cache on the same text, teacher-forced, in windows of `--ctx-size` tokens.
The affine rows are what a user would pick instead. Both quantize groups of 64 numbers along head_dim, with a float16
scale and bias a group; they differ in what stays exact:

    mlx-lm        QuantizedKVCache: every token is quantized before it is read, its own included
    transformers  QuantizedCache:   the tokens since the last multiple of 128 stay exact (its residual length)

They are computed here by quantizing and dequantizing keys and values in the attention of the same model, so that
nothing but the cache differs. `--json` prints the rows as one JSON object.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvarn.backend import LoadOptions
from kvarn.backends.triton.backend import TorchBackend, load
from kvarn.backends.triton.model import Attention
from kvarn.engine import Engine, EngineConfig
from kvarn.format import Preset
from kvarn.request import RequestParams
from kvarn.serve.fidelity import Fidelity, Floats, log_softmax
from kvarn.serve.loading import progress_bar
from kvarn.serve.models import resolve
from kvarn.serve.ppl import read_tokens
from kvarn.serve.tokenizer import Tokenizer

GROUP = 64
RESIDUAL = 128


def affine(x: Tensor, bits: int) -> Tensor:
    """Quantize and dequantize `[..., D]` in affine groups of 64: float16 scale and bias, round to nearest."""
    groups = x.float().reshape(*x.shape[:-1], -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-7).half().float()
    low = low.half().float()
    codes = ((groups - low) / scale).round().clamp(0, 2**bits - 1)
    dequantized: Tensor = (codes * scale + low).reshape(x.shape).to(x.dtype)
    return dequantized


def affine_hook(bits: int, residual: int) -> Callable[[Attention], Tensor]:
    """Attention over a whole window whose keys and values went through an affine cache; residual 0 keeps none exact."""

    def hook(call: Attention) -> Tensor:
        n = len(call.query)
        q, k, v = (x.transpose(0, 1)[None] for x in (call.query, call.key, call.value))
        position = torch.arange(n)
        causal = position[:, None] >= position
        own = position[:, None] // residual == position // residual if residual else torch.zeros(n, n, dtype=torch.bool)
        mask = torch.cat([causal & ~own, causal & own], dim=1)
        keys, values = (torch.cat([affine(x, bits), x], dim=2) for x in (k, v))
        out = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=call.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out[0].transpose(0, 1)

    return hook


def engine_logits(engine: Engine, tokens: list[int]) -> Floats:
    """Logits `[N, vocab]` of a whole window through a backend's cache."""
    params = RequestParams(prompt=tuple(tokens), max_tokens=0, return_logits=True)
    return np.concatenate([event.logits for event in engine.stream(params) if event.logits is not None])


@click.command()
@click.argument("model")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--tokens", default=8192, show_default=True, help="Use the first tokens of the file.")
@click.option("--presets", default="k4v2,k4v4,k2v2", show_default=True, help="Widths, tile 128.")
@click.option("-c", "--ctx-size", default=2048, show_default=True, help="Tokens of a window.")
@click.option("--prefill-chunk", default=512, show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(
    model: str, file: Path, tokens: int, presets: str, ctx_size: int, prefill_chunk: int, dtype: str, as_json: bool
) -> None:
    """Print one row per cache: bits a value, perplexity, KL to the exact cache, top-1 agreement."""
    folder = resolve(model, progress=progress_bar())
    backend = load(folder, None, LoadOptions(dtype=dtype))
    assert isinstance(backend, TorchBackend)
    ids = read_tokens(file, Tokenizer(folder).encode, tokens)
    head_dim = backend.info.plan.layers[0].head_dim

    runs: list[tuple[str, float, Callable[[list[int]], Floats]]] = []
    for name in presets.split(","):
        preset = Preset.parse(f"kvarn_{name}_g128")
        engine = Engine(backend.share(preset), EngineConfig(context=ctx_size, prefill_chunk=prefill_chunk))
        bits = preset.with_head_dim(head_dim).bits_per_value
        runs.append((preset.name, bits, partial(engine_logits, engine)))
    for width in (4, 8):
        for who, residual in (("mlx-lm", 0), ("transformers", RESIDUAL)):
            hook = affine_hook(width, residual)

            def forward(part: list[int], hook: Callable[[Attention], Tensor] = hook) -> Floats:
                positions = list(range(len(part)))
                return backend.model.forward(part, positions, positions, hook).float().numpy()

            runs.append((f"affine {width}-bit g64, {who}", width + 32 / GROUP, forward))

    exact = Engine(backend, EngineConfig(context=ctx_size, prefill_chunk=prefill_chunk))
    judged = {name: Fidelity() for name, _, _ in runs}
    baseline = Fidelity()
    seconds = dict.fromkeys(judged, 0.0)
    for low in range(0, len(ids) - 1, ctx_size):
        part = ids[low : low + ctx_size]
        targets = np.array(part[1:], dtype=np.int64)
        against = log_softmax(engine_logits(exact, part))
        baseline.add(0, against, targets, None)
        for name, _, forward_part in runs:
            start = time.perf_counter()
            logits = forward_part(part)
            seconds[name] += time.perf_counter() - start
            judged[name].add(0, logits, targets, against)
        print(f"{low + len(part)} of {len(ids)} tokens", file=sys.stderr)

    rows: list[dict[str, Any]] = [{"cache": "exact", "bits": 32.0 if dtype == "float32" else 16.0}]
    rows[0] |= baseline.summary()
    for name, bits_per_value, _ in runs:
        rows.append({"cache": name, "bits": bits_per_value} | judged[name].summary())
    if as_json:
        print(json.dumps({"model": folder.name, "dtype": dtype, "ctx_size": ctx_size, "rows": rows}))
        return
    print(f"{folder.name}, {dtype}, {rows[0]['tokens']} predicted tokens in windows of {ctx_size}")
    print("| cache | bits a value | perplexity | KL mean | KL median | KL p99 | top-1 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print(f"| exact | {rows[0]['bits']:.0f} | {rows[0]['ppl']:.3f} | | | | |")
    for row in rows[1:]:
        print(
            f"| {row['cache']} | {row['bits']:.2f} | {row['ppl']:.3f} | {row['kl_mean']:.4f} | {row['kl_median']:.4f} "
            f"| {row['kl_p99']:.3f} | {row['top1']:.1%} |"
        )


if __name__ == "__main__":
    main()
