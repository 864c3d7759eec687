"""Time to the first token of a long prompt: cold, warm in memory, and warm from disk after a restart.

    python tools/bench_prefix.py demo --lengths 1024,4096,8000

Every reading after a restart comes from a process of its own, which loads the model anew; loading is not counted in the
time to the first token. The parts of a warm start are timed one by one.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from kvarn import backend as backends
from kvarn.backend import LoadOptions
from kvarn.disk_tier import DiskTier
from kvarn.engine import Engine, EngineConfig
from kvarn.format import Preset
from kvarn.record import parse
from kvarn.request import RequestParams
from kvarn.serve.caching import fingerprint
from kvarn.serve.loading import Loaded, ModelOptions, hash_weights
from kvarn.serve.models import resolve
from kvarn.serve.tokenizer import Tokenizer
from kvarn.store_disk import DiskStore


def prompt(tokenizer: Tokenizer, length: int) -> tuple[int, ...]:
    """The first tokens of this project's own documentation."""
    text = "\n".join(path.read_text() for path in sorted((Path(__file__).resolve().parents[1] / "docs").glob("*.md")))
    ids = tokenizer.encode(text)
    if len(ids) < length:
        raise click.UsageError(f"the documentation has {len(ids)} tokens; use --lengths of {len(ids)} at most")
    return tuple(ids[:length])


def first_token(engine: Engine, tokens: tuple[int, ...]) -> tuple[float, int, int]:
    """Seconds to the first token, how many tokens were reused, and the token itself."""
    start = time.perf_counter()
    [event] = [e for e in engine.stream(RequestParams(prompt=tokens, max_tokens=1)) if e.token is not None]
    assert event.token is not None
    return time.perf_counter() - start, event.request.num_cached_tokens, event.token


def one_process(model: str, folder: Path, length: int, dtype: str, cache: str, again: bool) -> dict[str, Any]:
    """What one process measures: the prompt once, and once more if asked."""
    model_dir = resolve(model, progress=lambda *_: None)
    preset = None if cache == "exact" else Preset.parse(cache)
    backend = backends.load("triton", model_dir, preset, LoadOptions(dtype=dtype))
    loaded = Loaded(
        model_dir=model_dir,
        backend_name="triton",
        backend=backend,
        tokenizer=Tokenizer(model_dir),
        load_seconds=0.0,
        weights=partial(hash_weights, model_dir),
    )
    found = fingerprint(loaded, ModelOptions(model=model, kv_cache_dtype=cache))
    store = DiskStore(folder, 20 << 30, fingerprint=found.root())
    engine = Engine(backend, EngineConfig(context=length + 8), tier=DiskTier(store, backend, found))
    list(engine.stream(RequestParams(prompt=tuple(range(1000, 1033)), max_tokens=2)))  # the first step is slower
    tokens = prompt(loaded.tokenizer, length)
    seconds, cached, token = first_token(engine, tokens)
    report: dict[str, Any] = {"seconds": seconds, "cached": cached, "token": token}
    if again:
        report["memory_seconds"], report["memory_cached"], _ = first_token(engine, tokens)
    engine.close()
    return report


def parts(folder: Path, model: str, dtype: str, cache: str) -> dict[str, float]:
    """Milliseconds a block for each part of restoring: read, verify, adopt."""
    model_dir = resolve(model, progress=lambda *_: None)
    backend = backends.load("triton", model_dir, Preset.parse(cache), LoadOptions(dtype=dtype))
    backend.allocate(1, 1)
    files = sorted(folder.rglob("*.safetensors"))
    start = time.perf_counter()
    raw = [file.read_bytes() for file in files]
    read = time.perf_counter()
    records = [record for _, record in map(parse, raw)]
    parsed = time.perf_counter()
    for record in records:
        if record.tiles is None:
            backend.adopt_sink(record, 0)
        else:
            backend.adopt_block(record, 0)
    adopted = time.perf_counter()
    each = 1e3 / len(files)
    return {"read": (read - start) * each, "verify": (parsed - read) * each, "adopt": (adopted - parsed) * each}


def child(*args: object) -> dict[str, Any]:
    """Run `one_process` in a process of its own."""
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ  # as the command line sets it
    command = [sys.executable, __file__, *map(str, args)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if run.returncode:
        raise RuntimeError(run.stderr)
    report: dict[str, Any] = json.loads(run.stdout)
    return report


@click.command()
@click.argument("model")
@click.option("--lengths", default="1024,4096,8000", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True)
@click.option("--child", "as_child", nargs=4, hidden=True)
def main(model: str, lengths: str, dtype: str, as_json: bool, as_child: tuple[str, str, str, str] | None) -> None:
    """Print one row per length, and where the time of a warm start goes."""
    if as_child:
        where, count, cache, again = as_child
        print(json.dumps(one_process(model, Path(where), int(count), dtype, cache, again == "again")))
        return
    rows: list[dict[str, Any]] = []
    for length in map(int, lengths.split(",")):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            run = ("--child", folder, length, "kvarn_k4v2_g128")
            cold = child(model, "--dtype", dtype, *run, "again")
            warm = child(model, "--dtype", dtype, *run, "once")
            disk = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
            tokens = warm["cached"]
            row: dict[str, Any] = {"length": length, "cold_s": cold["seconds"], "memory_s": cold["memory_seconds"]}
            row |= {"restart_s": warm["seconds"], "cached": tokens, "disk_bytes_per_token": disk / tokens}
            row["same_token"] = warm["token"] == cold["token"]
            row["ms_a_block"] = parts(folder, model, dtype, "kvarn_k4v2_g128")
        with tempfile.TemporaryDirectory() as name:
            exact = child(model, "--dtype", dtype, "--child", name, min(length, 1024), "exact", "once")
            files = list(Path(name).rglob("*.safetensors"))
            row["exact_disk_bytes_per_token"] = sum(file.stat().st_size for file in files) / len(files) / 128
            assert exact["cached"] == 0
        rows.append(row)
        print(f"{length} tokens: done", file=sys.stderr)
    if as_json:
        print(json.dumps(rows))
        return
    print("| tokens | cold s | in memory s | after restart s | cold / restart | same token | bytes a token | exact |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        times = [f"{row[name]:.2f}" for name in ("cold_s", "memory_s", "restart_s")]
        ratio, same = f"{row['cold_s'] / row['restart_s']:.0f}", "yes" if row["same_token"] else "no"
        sizes = [f"{row[name]:.0f}" for name in ("disk_bytes_per_token", "exact_disk_bytes_per_token")]
        print("| " + " | ".join([str(row["length"]), *times, ratio, same, *sizes]) + " |")
    last = rows[-1]
    each = ", ".join(f"{name} {ms:.2f} ms" for name, ms in last["ms_a_block"].items())
    print(
        f"\nA block of 128 tokens takes: {each}; {last['length'] - last['cached']} tokens were computed all the same."
    )


if __name__ == "__main__":
    main()
