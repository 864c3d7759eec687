"""Throughput and latency of many requests at once, against transformers' own generate, in one run.

    python tools/bench_engine.py demo

For each number of concurrent requests: N prompts arrive together, each gets `--answer` tokens (greedy, no early
end). Rows: the engine with KVarN's cache, the engine with the exact cache, transformers' `generate` on a static
batch (all prompts of one length, so that it needs no padding) and its continuous batching where this build runs it.
tokens/s counts generated tokens over the whole time; the inter-token latency is over the steps that only decode.
"""

import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch

from kvarn.backend import LoadOptions
from kvarn.backends.triton.backend import TorchBackend, load
from kvarn.capacity import holding
from kvarn.engine import Engine, EngineConfig
from kvarn.format import Preset
from kvarn.request import RequestParams
from kvarn.serve.loading import progress_bar
from kvarn.serve.models import resolve


def prompts(count: int, length: int, vocab: int) -> list[tuple[int, ...]]:
    """Prompts that share nothing, so that no prefix is reused."""
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(10, vocab, (length,), generator=generator).tolist()) for _ in range(count)]


def run_engine(backend: TorchBackend, count: int, length: int, answer: int) -> dict[str, Any]:
    """All prompts through one engine."""
    plan = backend.info.plan
    context = length + answer
    one = holding(context, plan)
    config = EngineConfig(
        context=context, max_sequences=count, blocks=count * one.blocks, slots=count * one.slots, prefill_chunk=512
    )
    engine = Engine(backend, config)
    for prompt in prompts(count, length, backend.info.vocab_size):
        engine.add(RequestParams(prompt=prompt, max_tokens=answer))
    steps: list[float] = []
    tokens = 0
    start = time.perf_counter()
    while engine.scheduler.has_work:
        before, computed = time.perf_counter(), engine.scheduler.counters.computed_tokens
        events = engine.step()
        if len(events) == count == engine.scheduler.counters.computed_tokens - computed:
            steps.append(time.perf_counter() - before)
        tokens += sum(event.token is not None for event in events)
    seconds = time.perf_counter() - start
    held = engine.peak_bytes_held / (count * context)
    return row(f"kvarn engine, {plan.name}", count, tokens, seconds, steps, held)


def run_generate(backend: TorchBackend, count: int, length: int, answer: int) -> dict[str, Any]:
    """All prompts through transformers' generate, one static batch."""
    module = backend.model.module
    module.set_attn_implementation("sdpa")
    ids = torch.tensor(prompts(count, length, backend.info.vocab_size))
    options = {"do_sample": False, "min_new_tokens": answer, "max_new_tokens": answer, "pad_token_id": 0}
    stamps: list[float] = []

    class Clock:
        def put(self, value: Any) -> None:
            stamps.append(time.perf_counter())

        def end(self) -> None:
            pass

    start = time.perf_counter()
    with torch.inference_mode():
        module.generate(ids, attention_mask=torch.ones_like(ids), streamer=Clock() if count == 1 else None, **options)
    seconds = time.perf_counter() - start
    module.set_attn_implementation("kvarn")
    steps = [after - before for before, after in pairwise(stamps[1:])]
    return row("transformers generate, static batch", count, count * answer, seconds, steps, exact_bytes(backend))


def run_continuous(backend: TorchBackend, count: int, length: int, answer: int) -> dict[str, Any]:
    """All prompts through transformers' continuous batching."""
    from transformers import GenerationConfig

    module = backend.model.module
    options = GenerationConfig(do_sample=False, max_new_tokens=answer, eos_token_id=-1, pad_token_id=0)
    inputs = [list(prompt) for prompt in prompts(count, length, backend.info.vocab_size)]
    module.set_attn_implementation("paged|eager")
    try:
        start = time.perf_counter()
        results = module.generate_batch(inputs=inputs, generation_config=options, progress_bar=False)
        seconds = time.perf_counter() - start
    finally:
        module.set_attn_implementation("kvarn")
    tokens = sum(len(result.generated_tokens) for result in results.values())
    if tokens != count * answer:
        raise RuntimeError(f"it generated {tokens} of {count * answer} tokens")
    return row("transformers continuous batching", count, tokens, seconds, [], exact_bytes(backend))


def exact_bytes(backend: TorchBackend) -> float:
    """Bytes of a token's keys and values in the model's dtype."""
    return float(backend.info.exact_bytes_per_token)


def row(name: str, count: int, tokens: int, seconds: float, steps: list[float], held: float) -> dict[str, Any]:
    """One line of the table."""
    steps = sorted(steps)
    return {
        "what": name,
        "requests": count,
        "tokens_per_s": tokens / seconds,
        "itl_p50_ms": statistics.median(steps) * 1e3 if steps else None,
        "itl_p99_ms": steps[int(len(steps) * 0.99)] * 1e3 if steps else None,
        "kv_bytes_per_token": held,
    }


@click.command()
@click.argument("model")
@click.option("--requests", default="1,4,16", show_default=True)
@click.option("--prompt", "length", default=300, show_default=True, help="Tokens of a prompt.")
@click.option("--answer", default=64, show_default=True, help="Tokens of an answer.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(model: str, requests: str, length: int, answer: int, dtype: str, as_json: bool) -> None:
    """Print one row per way of serving and number of requests."""
    folder: Path = resolve(model, progress=progress_bar())
    exact = load(folder, None, LoadOptions(dtype=dtype))
    sealed = exact.share(Preset())
    rows: list[dict[str, Any]] = []
    for count in map(int, requests.split(",")):
        for way, backend in ((run_engine, sealed), (run_engine, exact), (run_generate, exact), (run_continuous, exact)):
            try:
                rows.append(way(backend, count, length, answer))
            except Exception as error:  # a way that this build does not run is said, not hidden
                text = (str(error) or type(error).__name__).splitlines()[0]
                rows.append({"what": f"continuous batching does not run here: {text}", "requests": count})
            print(f"{count} requests: {rows[-1]['what']}", file=sys.stderr)
    if as_json:
        print(json.dumps({"model": folder.name, "dtype": exact.info.dtype, "rows": rows}))
        return
    print(f"{folder.name}, {exact.info.dtype} on {exact.info.device}, prompts of {length}, answers of {answer} tokens")
    print("| requests | what | tokens/s | against one | inter-token p50 ms | p99 ms | KV bytes a token |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    single = {r["what"]: r["tokens_per_s"] for r in rows if r["requests"] == 1 and "tokens_per_s" in r}
    for r in rows:
        if "tokens_per_s" not in r:
            print(f"| {r['requests']} | {r['what']} | | | | | |")
            continue
        ratio = f"{r['tokens_per_s'] / single[r['what']]:.1f}" if r["what"] in single else ""
        p50, p99 = (f"{r[k]:.0f}" if r[k] is not None else "" for k in ("itl_p50_ms", "itl_p99_ms"))
        print(
            f"| {r['requests']} | {r['what']} | {r['tokens_per_s']:.1f} | {ratio} | {p50} | {p99} "
            f"| {r['kv_bytes_per_token']:.0f} |"
        )


if __name__ == "__main__":
    main()
