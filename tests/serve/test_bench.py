"""`kvarn bench`: what is measured is what it says, in turns, and what is not measured is said."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_backend import FakeBackend

from kvarn.capacity import holding
from kvarn.engine import Engine, EngineConfig
from kvarn.errors import UsageError
from kvarn.format import Preset
from kvarn.serve.bench import BenchOptions, Cell, measure, measure_all, plan_cells, random_prompts, table
from kvarn.serve.bench_plot import svg
from kvarn.serve.cli import main
from kvarn.step import StepPlan, StepResult

PRESETS = {"exact": None, "kvarn_k4v2_g64": Preset(tile_tokens=64)}
CHUNK = 128


def backends(**options: Any) -> list[FakeBackend]:
    return [FakeBackend(preset, **options) for preset in PRESETS.values()]


def cells(backends: list[FakeBackend], *, chunk: int = CHUNK, **options: Any) -> list[Cell]:
    return plan_cells(backends, BenchOptions(**options), chunk)


@pytest.mark.parametrize("context", [63, 64, 65, 127, 128, 129, 192, 256, 257, 385])
@pytest.mark.parametrize(("batch", "chunk"), [(1, 128), (3, 128), (5, 48), (8, 512)])
def test_a_run_computes_its_prompts_once_and_measures_steps_that_only_decode(
    context: int, batch: int, chunk: int
) -> None:
    ticks = count()
    for backend in backends():
        plan = backend.info.plan
        (cell,) = cells([backend], contexts=(context,), batches=(batch,), tokens=7, chunk=chunk)
        need = cell.held(backend)
        config = EngineConfig(
            context=context, prefill_chunk=chunk, max_sequences=batch, blocks=need.blocks, slots=need.slots
        )
        engine = Engine(backend, config)
        counters = engine.scheduler.counters
        for seed in range(3):
            prompts = random_prompts(cell, backend.info.vocab_size, seed)
            before = counters.cached_tokens
            sample = measure(engine, cell, prompts, clock=lambda: next(ticks))
            assert sample.steps >= 7
            assert sample.decode == batch, "each step took one tick"
            reused = (cell.prompt - 1) // plan.tile_tokens * plan.tile_tokens
            assert counters.cached_tokens - before == batch * reused
        assert counters.preemptions == 0
        least, most = (batch * holding(n, plan).nbytes(backend.pool_size) for n in (cell.prompt + 7, context))
        assert least <= engine.peak_bytes_held <= most


def test_prompts_share_nothing_and_are_the_same_for_every_cache() -> None:
    cell = Cell(context=200, batch=4, answer=10)
    prompts = random_prompts(cell, 97, seed=1)
    assert {len(prompt) for prompt in prompts} == {190}
    assert len({prompt[:8] for prompt in [*prompts, *random_prompts(cell, 97, seed=2)]}) == 8
    assert random_prompts(cell, 97, seed=1) == prompts


def test_caches_take_turns_and_each_is_first_once() -> None:
    ran: list[str] = []

    class Logged(FakeBackend):
        def run(self, plan: StepPlan) -> StepResult:
            if not ran or ran[-1] != self.info.plan.name:
                ran.append(self.info.plan.name)
            return super().run(plan)

    both = [Logged(preset) for preset in PRESETS.values()]
    rows, skipped = measure_all(both, cells(both, contexts=(128,), batches=(1,), repeat=2), 2, CHUNK)
    a, b = PRESETS
    assert ran == [a, b, a, b]  # a b, b a, a b: the neighbours of one name are one entry
    assert skipped == []
    assert [row["cache"] for row in rows] == [a, b]


def test_rows_hold_medians_ratios_and_the_bytes_really_held() -> None:
    both = backends()
    asked = cells(both, contexts=(384, 128), batches=(2, 1), tokens=4)
    assert [(c.context, c.batch) for c in asked] == [(128, 1), (128, 2), (384, 1), (384, 2)], "from small to large"
    rows, _ = measure_all(both, asked, 3, CHUNK)
    assert [(r["context"], r["batch"], r["cache"]) for r in rows] == [
        (c, b, name) for c in (128, 384) for b in (1, 2) for name in PRESETS
    ]
    for row in rows:
        for what in ("prompt_tokens_per_s", "decode_tokens_per_s"):
            assert 0 < row[what]["min"] <= row[what]["median"] <= row[what]["max"]
    exact, sealed = rows[-2:]
    assert exact["kv_bytes_held"] == 2 * 6 * 4 * 64
    assert sealed["kv_bytes_held"] == 2 * (2 * 4 * 64 + 4 * 64)
    assert sealed["kv_bytes_allocated"] == 2 * (3 * 4 * 64 + 6 * 64)
    assert sealed["against_exact"]["kv_bytes"] == sealed["kv_bytes_held"] / exact["kv_bytes_held"] == 0.5
    assert exact["against_exact"] == {"prompt": 1.0, "decode": 1.0, "kv_bytes": 1.0}


def test_what_does_not_fit_is_skipped_by_name_and_the_rest_is_measured() -> None:
    both = backends(available=6000)  # 5400 may be taken; exact needs 7 * 256 * 3, sealed 3 * (3 * 256 + 6 * 64)
    rows, skipped = measure_all(both, cells(both, contexts=(384,), batches=(1, 3), tokens=4), 1, CHUNK)
    assert [(r["batch"], r["cache"]) for r in rows] == [(1, "exact"), (1, "kvarn_k4v2_g64"), (3, "kvarn_k4v2_g64")]
    (one,) = skipped
    assert (one["context"], one["batch"], one["cache"]) == (384, 3, "exact")
    assert "are free for it, beside kvarn_k4v2_g64" in one["reason"]
    assert rows[-1]["against_exact"] is None
    report = {"model": "m", "dtype": "d", "device": "c", "backend": "b", "tokens": 4, "repeat": 1}
    text = table(report | {"rows": rows, "skipped": skipped})
    assert text.splitlines()[-1].startswith("skipped: context 384, batch 3, exact: it needs ")
    assert text.splitlines()[-2].endswith("|  |  |  |")


def test_a_cache_that_fails_on_the_way_is_skipped_with_the_reason() -> None:
    class Small(FakeBackend):
        def run(self, plan: StepPlan) -> StepResult:
            if len(plan.spans) > 1:
                raise MemoryError("out of it")
            return super().run(plan)

    both = [FakeBackend(None), Small(PRESETS["kvarn_k4v2_g64"])]
    rows, skipped = measure_all(both, cells(both, contexts=(128,), batches=(1, 2), tokens=4), 2, CHUNK)
    assert [(r["batch"], r["cache"]) for r in rows] == [(1, "exact"), (1, "kvarn_k4v2_g64"), (2, "exact")]
    assert [(s["batch"], s["cache"]) for s in skipped] == [(2, "kvarn_k4v2_g64")]
    assert "out of it" in skipped[0]["reason"]


def test_contexts_are_those_of_the_model() -> None:
    small, large = backends(max_context=256), backends()
    assert {c.context for c in cells(small, tokens=4)} == {256}
    assert {c.context for c in cells(large, tokens=4)} == {512, 4096}
    with pytest.raises(UsageError, match="257 is beyond the model's context of 256"):
        cells(small, contexts=(128, 257))
    with pytest.raises(UsageError, match=r"--contexts 34 has no room .* 34 tokens of answer; use 35 or more"):
        cells(small, contexts=(34,), batches=(1,), tokens=32)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--contexts", "many"], "--contexts 'many' is not a list of whole numbers"),
        (["--contexts", "0"], "whole numbers of 1 and more"),
        (["--batch", "1,,2"], "--batch '1,,2' is not a list"),
        (["--batch", ""], "at least one of each kind"),
        (["--batch", "2,2"], "--batch names the same value twice"),
        (["--tokens", "0"], "--tokens and --repeat are 1 or more"),
        (["--kv-cache-dtype", "exact,kvarn,kvarn_k4v2_g128"], "--kv-cache-dtype names the same value twice"),
        (["--kv-cache-dtype", "exact,"], "unknown"),
        (["--plot", "figures.png"], "figures.png is no SVG file"),
        (["--plot", "no/such/folder/a.svg"], "the folder of the plot no/such/folder/a.svg does not exist"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(args: list[str], text: str) -> None:
    result = CliRunner().invoke(main, ["bench", "no-such-model", *args])
    assert result.exit_code == 2
    assert text in result.stderr
    assert result.stdout == ""


def report(rows: list[tuple[int, int, str, float]]) -> dict[str, Any]:
    def rate(value: float) -> dict[str, float]:
        return {"median": value, "min": value * 0.9, "max": value * 1.2}

    keys = ("prompt_tokens_per_s", "decode_tokens_per_s")
    return {
        "model": '<script>&"\x1b[31m',
        "dtype": "float32",
        "device": "cpu",
        "backend": "triton",
        "rows": [
            {"context": c, "batch": b, "cache": name, "kv_bytes_held": 2**20, **{key: rate(value) for key in keys}}
            for c, b, name, value in rows
        ],
    }


@pytest.mark.parametrize("contexts", [(512,), (512, 1024, 8192)])
def test_the_plot_has_a_line_per_cache_and_batch_and_names_it(contexts: tuple[int, ...]) -> None:
    values: Iterator[int] = count(3)
    rows = [(c, b, name, next(values) * 7.7) for c in contexts for b in (1, 4) for name in PRESETS]
    drawn = ET.fromstring(svg(report([(*row[:3], float(row[3])) for row in rows])))
    space = "{http://www.w3.org/2000/svg}"
    lines = drawn.findall(f"{space}polyline")
    assert len(lines) == 3 * 2 * 2
    texts = [str(node.text) for node in drawn.findall(f"{space}text")]
    assert {f"{name}, batch {b}" for name in PRESETS for b in (1, 4)} <= set(texts)
    assert {str(c) for c in contexts} <= set(texts)
    assert texts[0].startswith('<script>&"')
    assert "\x1b" not in texts[0]
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in str(line.get("points")).split()]
        assert len(points) == len(contexts)
        assert points == sorted(points), "from short contexts to long ones"
    width, height = map(float, str(drawn.get("viewBox")).split()[2:])
    for node in drawn.findall(f"{space}circle"):
        assert 0 < float(str(node.get("cx"))) < width
        assert 0 < float(str(node.get("cy"))) < height


def test_the_command_measures_a_real_model(demo_dir: Path, tmp_path: Path) -> None:
    plot = tmp_path / "bench.svg"
    options = ["--contexts", "140", "--batch", "1", "--tokens", "2", "--repeat", "1", "--dtype", "float32"]
    result = CliRunner().invoke(main, ["bench", str(demo_dir), *options, "--json", "--plot", str(plot)])
    assert result.exit_code == 0, result.stderr
    got = json.loads(result.stdout)
    assert [row["cache"] for row in got["rows"]] == ["exact", "kvarn_k4v2_g128"]
    assert [row["kv_bytes_held"] for row in got["rows"]] == [2 * 30 * 2 * 3 * 128 * 64 * 4] * 2
    assert (got["model"], got["dtype"], got["device"]) == (demo_dir.name, "float32", "cpu")
    assert set(got["route"]) == {"exact", "kvarn_k4v2_g128"}
    assert got["skipped"] == []
    assert ET.parse(plot).getroot().tag.endswith("svg")
    assert all(line.startswith("kvarn: ") for line in result.stderr.splitlines())
