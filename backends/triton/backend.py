"""The torch backend: the contract of kvarn.backend over the pools, the plain operations and a transformers model."""

import resource
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvarn.backend import LoadOptions, MemoryReport, ModelInfo, Record
from kvarn.backends.triton import ops
from kvarn.backends.triton.model import Attention, LoadedModel, available_bytes, load_model, read_config, self_test
from kvarn.backends.triton.pool import Pool
from kvarn.backends.triton.sampling import sample
from kvarn.capacity import pool_size
from kvarn.errors import BackendError
from kvarn.format import Preset, SealStatus
from kvarn.model_plan import Layer, plan_model
from kvarn.step import Failure, Span, SpanOutput, StepPlan, StepResult
from kvarn.visibility import completed_tiles, num_sealed


def load(model_dir: Path, preset: Preset | None, options: LoadOptions) -> "TorchBackend":
    """Load a model folder; the layer plan is made, and can refuse, before any weight is read."""
    plan_model(read_config(model_dir).to_dict(), preset)
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
        )
        self.pool_size = pool_size(plan, model.dtype.itemsize)
        self._pool: Pool | None = None

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
        self._pool = None
        self._pool = Pool(self.info.plan, num_blocks, num_slots, self.model.dtype, self.model.device)
        return self._pool.report()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        step = _Step(self, plan.spans)
        logits = self.model.forward(step.tokens, step.positions, step.rows, step.attend)
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
        why = f"plain torch operations on {self.model.device}; no kernels are built yet"
        return dict.fromkeys(("seal", "unseal", "attend", "attend_exact"), why)


def _host(x: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return x.cpu().numpy().copy()


def _host_bytes(x: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return _host(x.contiguous().view(torch.uint8))


def _set_bytes(page: Tensor, raw: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    page.copy_(torch.tensor(raw).view(page.dtype))


class _Step:
    """One step on its way through the model: the layers call `attend`, `finish` reads everything at once."""

    def __init__(self, backend: TorchBackend, spans: Sequence[Span]) -> None:
        self.pool = backend.pool
        self.plan = backend.info.plan
        self.spans = spans
        self.device = backend.model.device
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.rows: list[int] = []  # token indices whose logits are wanted
        self.starts: list[int] = []  # of each span within the step
        self.blocks: list[Tensor] = []
        for span in spans:
            at = len(self.tokens)
            self.starts.append(at)
            self.tokens.extend(span.tokens)
            self.positions.extend(range(span.start, span.stop))
            wanted = {"none": 0, "last": 1, "all": len(span.tokens)}[span.want]
            self.rows.extend(range(len(self.tokens) - wanted, len(self.tokens)))
            self.blocks.append(torch.tensor([*span.blocks, *span.seal_into], dtype=torch.int64, device=self.device))
        self.status: list[tuple[int, int, Tensor]] = []  # (span, layer, status words [tiles, Hk])

    def attend(self, call: Attention) -> Tensor:
        """Append, seal, attend: one layer, every span."""
        layer = self.plan.layers[call.layer]
        outputs = []
        for i, span in enumerate(self.spans):
            part = slice(self.starts[i], self.starts[i] + len(span.tokens))
            fresh = torch.stack([call.key[part], call.value[part]]).transpose(1, 2)  # [2, Hk, N, D]
            window = self._append(layer, span, fresh)
            attend = self._attend_sealed if layer.kind == "sealed" else self._attend_exact
            outputs.append(attend(call, layer, i, call.query[part], window))
        return torch.cat(outputs).to(call.query.dtype)

    def _slot(self, span: Span, tile: int) -> int:
        """The slot that holds a tile of this span while it is exact."""
        if self.plan.preset is None:
            return span.slots[tile]
        return span.slots[min(tile, 1)]

    def _append(self, layer: Layer, span: Span, fresh: Tensor) -> Tensor:
        """Write fresh keys and values where they stay exact; returns the window `[2, Hk, W, D]` of ops.attend."""
        g = self.plan.tile_tokens
        first, last = span.start // g, (span.stop - 1) // g
        base = first * g
        begun = self.pool.slot(layer.index, self._slot(span, first))[:, :, : span.start - base]
        if first == last:
            page = self.pool.slot(layer.index, self._slot(span, first))
            page[:, :, span.start - base : span.stop - base] = fresh
            return page[:, :, : span.stop - base]
        window = torch.cat([begun, fresh], dim=2)
        # Under a preset only tile 0 and the last tile stay in slots; the tiles between are sealed from the window.
        for tile in range(first, last + 1) if self.plan.preset is None else {first, last} - set(range(1, last)):
            part = window[:, :, tile * g - base : (tile + 1) * g - base]
            self.pool.slot(layer.index, self._slot(span, tile))[:, :, : part.shape[2]] = part
        return window

    def _complete(self, span: Span, window: Tensor) -> Tensor:
        """The tiles that this span completes, out of its window: `[2, tiles, Hk, G, D]`."""
        g = self.plan.tile_tokens
        base = span.start // g * g
        tiles = completed_tiles(span.start, span.stop, g)
        return torch.stack([window[:, :, t * g - base : (t + 1) * g - base] for t in tiles], dim=1)

    def _attend_sealed(self, call: Attention, layer: Layer, i: int, query: Tensor, window: Tensor) -> Tensor:
        span, row, fmt = self.spans[i], self.pool.row[layer.index], self.plan.tile_format
        assert fmt is not None
        tiles, flags = self.pool.tiles[row], self.pool.flags[row]
        if span.seal_into:
            keys, values = self._complete(span, window).float()
            into = self.blocks[i][len(span.blocks) :]
            tiles[into], flags[into], status = ops.seal(keys, values, fmt)
            self.status.append((i, layer.index, status))
        reads = num_sealed(span.stop - 1, fmt.tile_tokens)
        sink = self.pool.slot(layer.index, span.slots[0])
        return ops.attend(query, sink, window, tiles, flags, self.blocks[i][:reads], span.start, call.scale, fmt)

    def _attend_exact(self, call: Attention, layer: Layer, i: int, query: Tensor, window: Tensor) -> Tensor:
        span = self.spans[i]
        first = span.start // self.plan.tile_tokens
        if self.plan.preset is None:
            pages = [self.pool.slot(layer.index, slot) for slot in span.slots[:first]]
        else:
            kept = self.pool.exact_blocks[layer.index]
            if span.seal_into:
                kept[self.blocks[i][len(span.blocks) :]] = self._complete(span, window).transpose(0, 1)
            pages = [self.pool.slot(layer.index, span.slots[0])] if first > 0 else []
            pages += [kept[block] for block in span.blocks[: max(first - 1, 0)]]
        keys, values = torch.cat([*pages, window], dim=2).transpose(1, 2)  # [T, Hk, D] each
        return ops.attend_exact(
            query,
            keys,
            values,
            span.start,
            call.scale,
            window=layer.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    def finish(self, logits: Tensor) -> StepResult:
        """Sample, and read tokens, logits and status words back in one go."""
        outputs: list[SpanOutput] = []
        sampled = [i for i, span in enumerate(self.spans) if span.sampling is not None]
        at, rows = 0, {}
        for i, span in enumerate(self.spans):
            wanted = {"none": 0, "last": 1, "all": len(span.tokens)}[span.want]
            rows[i] = slice(at, at + wanted)
            at += wanted
        chosen = {}
        if sampled:
            params = [s for span in self.spans if (s := span.sampling) is not None]
            chosen = dict(zip(sampled, sample(torch.cat([logits[rows[i]] for i in sampled]), params), strict=True))
        for i, span in enumerate(self.spans):
            if i in chosen:
                one = chosen[i]
                outputs.append(SpanOutput(token=one.token, logprob=one.logprob, top_logprobs=one.top_logprobs))
            elif span.want == "none":
                outputs.append(SpanOutput())
            else:
                outputs.append(SpanOutput(logits=logits[rows[i]].float().cpu().numpy()))
        return StepResult(outputs=tuple(outputs), failures=self._failures())

    def _failures(self) -> tuple[Failure, ...]:
        if not self.status:
            return ()
        worst = torch.stack([status.amax() for _, _, status in self.status]).tolist()
        failures = []
        for (i, layer, status), bad in zip(self.status, worst, strict=True):
            if bad:
                head = int(status.amax(0).argmax())
                reason = SealStatus(int(status[:, head].amax())).reason
                failures.append(Failure(span=i, layer=layer, kv_head=head, reason=reason))
        return tuple(failures)
