"""The torch backend: the contract of kvarn.backend over the pools, the plain operations and a transformers model."""

import resource
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvarn.backend import LoadOptions, MemoryReport, ModelInfo, Record
from kvarn.backends.triton import ops
from kvarn.backends.triton.decoder import Decoder, capturer, usable
from kvarn.backends.triton.dispatch import Operations, choose
from kvarn.backends.triton.model import Attention, LoadedModel, available_bytes, load_model, read_config, self_test
from kvarn.backends.triton.pool import Pool
from kvarn.backends.triton.step import Step
from kvarn.capacity import pool_size
from kvarn.errors import BackendError
from kvarn.format import Preset
from kvarn.model_plan import plan_model
from kvarn.rope_scaling import describe
from kvarn.step import StepPlan, StepResult


def load(model_dir: Path, preset: Preset | None, options: LoadOptions) -> "TorchBackend":
    """Load a model folder; the layer plan is made, and can refuse, before any weight is read."""
    plan_model(read_config(model_dir, options.rope_scaling).to_dict(), preset)
    model = load_model(model_dir, options)
    backend = TorchBackend(model, preset)
    self_test(model, backend.info.plan, _attend_own)
    return backend


def _attend_own(call: Attention) -> Tensor:
    """Exact attention of a call over its own tokens alone, from position 0."""
    return ops.attend_exact(
        call.query,
        call.key,
        call.value,
        0,
        call.scale,
        window=call.window,
        softcap=call.softcap,
        sinks=call.sinks,
    )


class TorchBackend:
    """One model with its two pools; see kvarn.backend.Backend for what each method promises."""

    def __init__(self, model: LoadedModel, preset: Preset | None) -> None:
        plan = plan_model(model.config, preset)
        self.model = model
        self.info = ModelInfo(
            plan=plan,
            vocab_size=model.vocab_size,
            dtype=str(model.dtype).removeprefix("torch."),
            device=model.device,
            weight_bytes=model.weight_bytes,
            eos_token_ids=model.eos_token_ids,
            rope=describe(model.config),
        )
        self.pool_size = pool_size(plan, model.dtype.itemsize)
        self._pool: Pool | None = None
        self._decoder: Decoder | None = None

    @property
    def pool(self) -> Pool:
        """The tensors; BackendError before `allocate`."""
        if self._pool is None:
            raise BackendError("the pools are not allocated yet; call allocate first")
        return self._pool

    def share(self, preset: Preset | None) -> "TorchBackend":
        return TorchBackend(self.model, preset)

    def available_bytes(self) -> int:
        return available_bytes(self.model.device)

    def peak_bytes(self) -> int:
        if self.model.device.startswith("cuda"):
            return torch.cuda.max_memory_allocated(self.model.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def allocate(self, num_blocks: int, num_slots: int) -> MemoryReport:
        self._pool = self._decoder = None
        plan, device = self.info.plan, self.model.device
        operations = self._operations()  # builds its kernels now rather than in a step
        self._pool = Pool(plan, num_blocks, num_slots, self.model.dtype, device, spare=operations.triton)
        if usable(plan, operations) is None:
            capture = capturer(device) if device.startswith("cuda") else None
            self._decoder = Decoder(self.model, plan, self._pool, operations, capture)
        return self._pool.report()

    def _operations(self) -> Operations:
        plan = self.info.plan
        kv_heads = plan.sealed[0].num_kv_heads if plan.sealed else None
        return choose(
            plan.tile_format, self.model.device, heads=plan.num_heads, kv_heads=kv_heads, dtype=self.model.dtype
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        pool, decoder = self.pool, self._decoder
        if decoder is not None and decoder.takes(plan.spans):
            return decoder.run(plan.spans)
        step = Step(pool, self.info.plan, plan.spans, self.model.device, self._operations())
        layout = step.layout
        logits = self.model.forward(layout.tokens, layout.positions, layout.rows, step.attend)
        return step.finish(logits)

    def export_block(self, block: int) -> Record:
        pool = self.pool
        return Record(
            dtype=self.info.dtype,
            tiles=_host(pool.tiles[:, block]),
            flags=_host(pool.flags[:, block]),
            exact={index: _host_bytes(pages[block]) for index, pages in pool.exact_blocks.items()},
        )

    def export_sink(self, slot: int) -> Record:
        exact = {layer.index: _host_bytes(self.pool.slot(layer.index, slot)) for layer in self.info.plan.layers}
        return Record(dtype=self.info.dtype, tiles=None, flags=None, exact=exact)

    def adopt_block(self, record: Record, block: int) -> None:
        record.check(info=self.info, sink=False)
        assert record.tiles is not None
        assert record.flags is not None
        self.pool.tiles[:, block] = torch.tensor(record.tiles, device=self.model.device)
        self.pool.flags[:, block] = torch.tensor(record.flags, device=self.model.device)
        for index, page in record.exact.items():
            _set_bytes(self.pool.exact_blocks[index][block], page)

    def adopt_sink(self, record: Record, slot: int) -> None:
        record.check(info=self.info, sink=True)
        for index, page in record.exact.items():
            _set_bytes(self.pool.slot(index, slot), page)

    def copy_exact(self, source: int, target: int) -> None:
        for layer in self.info.plan.layers:
            self.pool.slot(layer.index, target).copy_(self.pool.slot(layer.index, source))

    def route(self) -> Mapping[str, str]:
        plain = f"plain torch operations on {self.model.device}"
        operations = self._operations()
        sealed = self.info.plan.preset is not None
        route = dict.fromkeys(("seal", "decode", "attend") if sealed else ("decode",), operations.why)
        route |= dict.fromkeys(("unseal", "attend_exact") if sealed else ("attend_exact",), plain)
        if self.model.device.startswith("cuda"):
            why_not = usable(self.info.plan, operations)
            graphs = "not before allocate" if self._decoder is None else self._decoder.graphs
            route["graphs"] = graphs if why_not is None else f"none: {why_not}"
        return route


def _host(x: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return x.cpu().numpy().copy()


def _host_bytes(x: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return _host(x.contiguous().view(torch.uint8))


def _set_bytes(page: Tensor, raw: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    page.copy_(torch.tensor(raw).view(page.dtype))
