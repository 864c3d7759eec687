"""`kvarn bench`: how fast prompts are read and answers come, by context and batch, one cache dtype beside another."""

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from kvarn.backend import Backend
from kvarn.capacity import MEMORY_FRACTION, Holding, holding
from kvarn.engine import Engine, EngineConfig
from kvarn.errors import BackendError, CapacityError, UsageError
from kvarn.format import Preset
from kvarn.request import Event, RequestParams
from kvarn.serve.bench_plot import svg
from kvarn.serve.literal import one_line
from kvarn.serve.loading import ModelOptions, load, say, size

CONTEXTS = (512, 4096)  # unless others are asked for: those of them that the model has
Prompts = list[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure; checked when built (UsageError).

    contexts: tokens of a sequence at its end, prompt and answer; empty: CONTEXTS. batches: sequences at once. tokens:
    decode steps that are measured. caches: names of cache dtypes. repeat: measured runs of each, after one that is not.
    plot: the file of a plot.
    """

    caches: tuple[str, ...] = ("exact", "kvarn")
    contexts: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1, 4)
    tokens: int = 32
    repeat: int = 3
    plot: Path | None = None

    def __post_init__(self) -> None:
        for what, values in (
            ("--kv-cache-dtype", self.presets),
            ("--contexts", self.contexts),
            ("--batch", self.batches),
        ):
            if len(set(values)) < len(values):
                raise UsageError(f"{what} names the same value twice; name each once")
        if not self.caches or not self.batches or min(self.batches) < 1 or min(self.contexts, default=1) < 1:
            raise UsageError("contexts and batches are whole numbers of 1 and more, at least one of each kind")
        if self.tokens < 1 or self.repeat < 1:
            raise UsageError("--tokens and --repeat are 1 or more")
        if self.plot is not None and self.plot.suffix != ".svg":
            raise UsageError(f"the plot {self.plot} is no SVG file; give it a name like bench.svg")
        if self.plot is not None and not self.plot.absolute().parent.is_dir():
            raise UsageError(f"the folder of the plot {self.plot} does not exist; make it first")

    @property
    def presets(self) -> tuple[Preset | None, ...]:
        """The caches; None is `exact`."""
        return tuple(None if name == "exact" else Preset.parse(name) for name in self.caches)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One size to measure. A prompt leaves room for `answer` tokens: the measured ones and those that come before every
    sequence decodes."""

    context: int
    batch: int
    answer: int

    @property
    def prompt(self) -> int:
        """Tokens of each prompt."""
        return self.context - self.answer

    def held(self, backend: Backend) -> Holding:
        """Blocks and slots for it, and one more a sequence: a tile computed again stands beside its old self."""
        one = holding(self.context, backend.info.plan)
        more = 1 if backend.info.plan.preset else 0
        return Holding(blocks=self.batch * (one.blocks + more), slots=self.batch * (one.slots + 1))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of a cell, in tokens a second of all its sequences together; `steps`: of decoding, that were measured."""

    prompt: float
    decode: float
    steps: int


def bench(model: ModelOptions, options: BenchOptions, *, as_json: bool) -> None:
    """Measure and print a table, or one JSON object; write the plot."""
    loaded = load(model)
    first = loaded.backend
    backends = [first, *(first.share(preset) for preset in options.presets[1:])]
    cells = plan_cells(backends, options, model.prefill_chunk)
    head = {
        "model": loaded.model_dir.name,
        "backend": loaded.backend_name,
        "device": first.info.device,
        "dtype": first.info.dtype,
        "prefill_chunk": model.prefill_chunk,
        "tokens": options.tokens,
        "repeat": options.repeat,
    }
    rows, skipped = measure_all(backends, cells, options.repeat, model.prefill_chunk)
    route = {backend.info.plan.name: dict(backend.route()) for backend in backends}
    if not rows:
        raise CapacityError(f"nothing was measured: {skipped[0]['reason']}")
    report = head | {"route": route, "rows": rows, "skipped": skipped}
    click.echo(json.dumps(report) if as_json else table(report))
    if options.plot is not None:
        try:
            options.plot.write_text(svg(report), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"the plot {options.plot} cannot be written: {error.strerror}") from error
        say(f"plot: {options.plot}")


def plan_cells(backends: Sequence[Backend], options: BenchOptions, prefill_chunk: int) -> list[Cell]:
    """The cells from small to large; UsageError for a context that the model does not have, or that is too short."""
    model = min(backend.info.plan.max_context for backend in backends)
    tile = max(backend.info.plan.tile_tokens for backend in backends)
    contexts = options.contexts or tuple(c for c in CONTEXTS if c <= model) or (model,)
    if max(contexts) > model:
        raise UsageError(f"--contexts {max(contexts)} is beyond the model's context of {model}; use {model} or less")
    cells = []
    for context, batch in itertools.product(contexts, options.batches):
        # Before all decode, each sequence computes up to a tile of its prompt again, which takes so many steps.
        lead = math.ceil(batch * tile / prefill_chunk) + 1
        cell = Cell(context=context, batch=batch, answer=options.tokens + lead)
        if cell.prompt < 1:
            raise UsageError(
                f"--contexts {context} has no room for a prompt beside {cell.answer} tokens of answer; "
                f"use {cell.answer + 1} or more, or fewer --tokens"
            )
        cells.append(cell)
    return sorted(cells, key=lambda cell: (cell.context * cell.batch, cell.context))


def measure_all(
    backends: Sequence[Backend], cells: Sequence[Cell], repeat: int, prefill_chunk: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every cell with every cache: what was measured, and what was not, with the reason."""
    budget = int(min(backend.available_bytes() for backend in backends) * MEMORY_FRACTION)
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for cell in cells:

        def skip(backend: Backend, reason: str, cell: Cell = cell) -> None:
            name = backend.info.plan.name
            skipped.append({"context": cell.context, "batch": cell.batch, "cache": name, "reason": reason})
            say(f"skipped: context {cell.context}, batch {cell.batch}, {name}: {reason}")

        engines = start_engines(backends, cell, budget, prefill_chunk, skip)
        samples: dict[str, list[Sample]] = {name: [] for name in engines}
        for run in range(repeat + 1):
            prompts = random_prompts(cell, backends[0].info.vocab_size, seed=run)
            # In turns, each time another one first: what drifts meets all of them.
            for name in _turns([*engines], run):
                try:
                    sample = measure(engines[name], cell, prompts)
                except (BackendError, CapacityError) as error:
                    skip(engines.pop(name).backend, str(error))
                    continue
                if run:  # the first one warms up
                    samples[name].append(sample)
            if engines:
                done = f"run {run} of {repeat}" if run else "warmed up"
                say(f"context {cell.context}, batch {cell.batch}: {done}")
        rows += [row(cell, engine, samples[name]) for name, engine in engines.items()]
    order = [backend.info.plan.name for backend in backends]
    rows.sort(key=lambda r: (r["context"], r["batch"], order.index(r["cache"])))
    _compare(rows)
    return rows, skipped


def _turns(names: list[str], run: int) -> list[str]:
    at = run % max(len(names), 1)
    return names[at:] + names[:at]


def start_engines(
    backends: Sequence[Backend],
    cell: Cell,
    budget: int,
    prefill_chunk: int,
    skip: Callable[[Backend, str], None],
) -> dict[str, Engine]:
    """An engine of each cache that fits beside the others, the smaller ones first; in the order of `backends`."""
    needs = {b.info.plan.name: cell.held(b).nbytes(b.pool_size) for b in backends}
    fitting: dict[str, Engine] = {}
    for backend in sorted(backends, key=lambda b: needs[b.info.plan.name]):
        name = backend.info.plan.name
        taken = sum(needs[other] for other in fitting)
        if needs[name] > budget - taken:
            beside = f", beside {', '.join(fitting)}" if fitting else ""
            skip(backend, f"it needs {size(needs[name])} of KV cache, {size(budget - taken)} are free for it{beside}")
            continue
        held = cell.held(backend)
        config = EngineConfig(
            context=cell.context,
            prefill_chunk=prefill_chunk,
            max_sequences=cell.batch,
            blocks=held.blocks,
            slots=held.slots,
        )
        try:
            fitting[name] = Engine(backend, config)
        except CapacityError as error:
            skip(backend, str(error))
    return {b.info.plan.name: fitting[b.info.plan.name] for b in backends if b.info.plan.name in fitting}


def random_prompts(cell: Cell, vocab_size: int, seed: int) -> Prompts:
    """Prompts that share nothing, so that no prefix is reused."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (cell.batch, cell.prompt))
    return [tuple(prompt) for prompt in tokens.tolist()]


def measure(engine: Engine, cell: Cell, prompts: Prompts, clock: Callable[[], float] = time.perf_counter) -> Sample:
    """One run: all prompts at once up to their first tokens; then again, from the prefix cache, for the answers.

    Only steps in which every sequence decodes and nothing else happens count for the answers.
    """
    for prompt in prompts:
        engine.add(RequestParams(prompt=prompt, max_tokens=1))
    start = clock()
    while engine.scheduler.has_work:
        _step(engine)
    prompt_seconds = clock() - start
    for prompt in prompts:
        engine.add(RequestParams(prompt=prompt, max_tokens=cell.answer))
    seconds, steps = 0.0, 0
    counters = engine.scheduler.counters
    while engine.scheduler.has_work:
        before, computed = clock(), counters.computed_tokens
        events = _step(engine)
        if len(events) == cell.batch == counters.computed_tokens - computed:
            seconds += clock() - before
            steps += 1
    assert steps, "the answers are long enough for some steps of decoding alone"
    return Sample(prompt=cell.batch * cell.prompt / prompt_seconds, decode=cell.batch * steps / seconds, steps=steps)


def _step(engine: Engine) -> list[Event]:
    events = engine.step()
    for event in events:
        if event.error is not None:
            raise event.error
    return events


def row(cell: Cell, engine: Engine, samples: Sequence[Sample]) -> dict[str, Any]:
    """One line of the table: medians with the slowest and the fastest run, and the bytes that were really held."""
    line: dict[str, Any] = {"context": cell.context, "batch": cell.batch, "cache": engine.backend.info.plan.name}
    for what in ("prompt", "decode"):
        rates = [asdict(sample)[what] for sample in samples]
        line[f"{what}_tokens_per_s"] = {
            "median": statistics.median(rates),
            "min": min(rates),
            "max": max(rates),
        }
    line["kv_bytes_held"] = engine.peak_bytes_held
    line["kv_bytes_allocated"] = engine.memory.blocks + engine.memory.slots
    return line


def _compare(rows: list[dict[str, Any]]) -> None:
    """Add each row's ratios to the exact cache of the same size; None where that was not measured."""
    exact = {(r["context"], r["batch"]): r for r in rows if r["cache"] == "exact"}
    for line in rows:
        base = exact.get((line["context"], line["batch"]))
        line["against_exact"] = (
            None
            if base is None
            else {
                **{
                    what: line[f"{what}_tokens_per_s"]["median"] / base[f"{what}_tokens_per_s"]["median"]
                    for what in ("prompt", "decode")
                },
                "kv_bytes": line["kv_bytes_held"] / base["kv_bytes_held"],
            }
        )


def table(report: dict[str, Any]) -> str:
    """The figures for people, as Markdown."""
    model = one_line(report["model"])
    lines = [
        f"{model}, {report['dtype']} on {report['device']} ({report['backend']}): {report['tokens']} decode steps, "
        f"median (slowest to fastest) of {report['repeat']}; ratios are to the exact cache",
        "",
        "| context | batch | cache | prompt tokens/s | decode tokens/s | KV held | prompt | decode | KV |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for line in report["rows"]:
        prompt, decode = (_rate(line[f"{what}_tokens_per_s"]) for what in ("prompt", "decode"))
        ratios = line["against_exact"] or dict.fromkeys(("prompt", "decode", "kv_bytes"))
        against = " | ".join("" if ratio is None else f"{ratio:.2f}" for ratio in ratios.values())
        lines.append(
            f"| {line['context']} | {line['batch']} | {line['cache']} | {prompt} | {decode} "
            f"| {size(line['kv_bytes_held'])} | {against} |"
        )
    lines += [
        f"skipped: context {s['context']}, batch {s['batch']}, {s['cache']}: {s['reason']}" for s in report["skipped"]
    ]
    return "\n".join(lines)


def _rate(rate: dict[str, float]) -> str:
    return f"{rate['median']:.1f} ({rate['min']:.1f} to {rate['max']:.1f})"
