"""The MLX backend: the contract of kvarn.backend over the pools, the plain operations and an mlx-lm model."""

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.core import array
from numpy.typing import NDArray

from kvarn.backend import LoadOptions, MemoryReport, ModelInfo, Record
from kvarn.backends.mlx import ops
from kvarn.backends.mlx.choose import choose
from kvarn.backends.mlx.model import Attention, LoadedModel, available_bytes, load_model, read_config
from kvarn.backends.mlx.pool import Pool
from kvarn.backends.mlx.self_test import self_test
from kvarn.backends.mlx.step import Step
from kvarn.capacity import pool_size
from kvarn.errors import BackendError
from kvarn.format import Preset
from kvarn.model_plan import plan_model
from kvarn.rope_scaling import describe
from kvarn.step import Failure, SpanOutput, StepPlan, StepResult


def load(model_dir: Path, preset: Preset | None, options: LoadOptions) -> "MlxBackend":
    """Load a model folder; the layer plan is made, and can refuse, before any weight is read."""
    plan = plan_model(read_config(model_dir, options.rope_scaling), preset)
    model = load_model(model_dir, options)
    with mx.stream(_device(model)):
        return MlxBackend(self_test(model, plan, _attend_own), preset)


def _device(model: LoadedModel) -> mx.Device:
    return mx.Device(mx.gpu if model.device == "gpu" else mx.cpu)


def _attend_own(call: Attention, window: int | None) -> array:
    """Exact attention of a call over its own tokens alone, its queries being the last of them."""
    start = len(call.key) - len(call.query)
    return ops.attend_exact(call.query, call.key, call.value, start, call.scale, window=window)


class MlxBackend:
    """One model with its two pools; see kvarn.backend.Backend for what each method promises."""

    def __init__(self, model: LoadedModel, preset: Preset | None) -> None:
        plan = plan_model(model.config, preset)
        self.model = model
        self.info = ModelInfo(
            plan=plan,
            vocab_size=model.vocab_size,
            dtype=str(model.dtype).removeprefix("mlx.core."),
            device=model.device,
            weight_bytes=model.weight_bytes,
            eos_token_ids=model.eos_token_ids,
            rope=describe(model.config),
        )
        self.pool_size = pool_size(plan, model.dtype.size)
        self._pool: Pool | None = None
        with mx.stream(_device(model)):
            self.operations = choose(plan, model.dtype)

    @property
    def pool(self) -> Pool:
        """The arrays; BackendError before `allocate`."""
        if self._pool is None:
            raise BackendError("the pools are not allocated yet; call allocate first")
        return self._pool

    def share(self, preset: Preset | None) -> "MlxBackend":
        return MlxBackend(self.model, preset)

    def available_bytes(self) -> int:
        return available_bytes(self.model.device)

    def peak_bytes(self) -> int:
        return mx.get_peak_memory()

    def allocate(self, num_blocks: int, num_slots: int) -> MemoryReport:
        self._pool = None
        with mx.stream(_device(self.model)):
            self._pool = Pool(
                self.info.plan, num_blocks, num_slots, self.model.dtype, self.model.device, self.available_bytes()
            )
        return self._pool.report()

    def run(self, plan: StepPlan) -> StepResult:
        together = self.model.batched or len(plan.spans) == 1
        outputs: list[SpanOutput] = []
        failures: list[Failure] = []
        with mx.stream(_device(self.model)):
            for group in [plan.spans] if together else [(span,) for span in plan.spans]:
                step = Step(self.pool, self.info.plan, self.operations, group, first=len(outputs))
                layout = step.layout
                logits = self.model.forward(layout.tokens, layout.positions, layout.rows, step.attend)
                result = step.finish(logits)
                outputs += result.outputs
                failures += result.failures
        return StepResult(outputs=tuple(outputs), failures=tuple(failures))

    def export_block(self, block: int) -> Record:
        pool = self.pool
        sealed = bool(pool.row)
        return Record(
            dtype=self.info.dtype,
            tiles=np.stack([np.array(tiles[block]) for tiles in pool.tiles]) if sealed else None,
            flags=np.stack([np.array(flags[block]) for flags in pool.flags]) if sealed else None,
            exact={index: _host_bytes(pages[block]) for index, pages in pool.exact_blocks.items()},
        )

    def export_sink(self, slot: int) -> Record:
        exact = {layer.index: _host_bytes(self.pool.slot(layer.index, slot)) for layer in self.info.plan.layers}
        return Record(dtype=self.info.dtype, tiles=None, flags=None, exact=exact)

    def adopt_block(self, record: Record, block: int) -> None:
        record.check(info=self.info, sink=False)
        assert record.tiles is not None
        assert record.flags is not None
        with mx.stream(_device(self.model)):
            for layer, row in self.pool.row.items():
                tiles, flags = mx.array(record.tiles[row : row + 1]), mx.array(record.flags[row : row + 1])
                self.pool.write_tiles(layer, mx.array([block]), tiles, flags)
            for index, raw in record.exact.items():
                self.pool.write_block(index, block, mx.array(raw).view(self.model.dtype))
            self.pool.flush()

    def adopt_sink(self, record: Record, slot: int) -> None:
        record.check(info=self.info, sink=True)
        with mx.stream(_device(self.model)):
            for index, raw in record.exact.items():
                self.pool.write_slot(index, slot, 0, mx.array(raw).view(self.model.dtype))
            self.pool.flush()

    def copy_exact(self, source: int, target: int) -> None:
        with mx.stream(_device(self.model)):
            for layer in self.info.plan.layers:
                self.pool.write_slot(layer.index, target, 0, self.pool.slot(layer.index, source))
            self.pool.flush()

    def route(self) -> Mapping[str, str]:
        plain = f"plain MLX operations on the {self.model.device}"
        several = (
            "sequences of one step run together, a row per token"
            if self.model.batched
            else "sequences of one step run one after another: this model takes no positions per row"
        )
        routes = {"attend_exact": plain, "step": several}
        if self.info.plan.preset is not None:
            routes |= dict.fromkeys(("seal", "attend"), self.operations.why) | {"unseal": plain}
        return routes


def _host_bytes(x: array) -> NDArray[np.uint8]:
    return np.array(mx.contiguous(x).view(mx.uint8))
