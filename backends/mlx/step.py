"""One step of the MLX backend: append, seal and attend, layer by layer, then sample and read back."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx.core import array

from kvarn.backends.mlx import ops
from kvarn.backends.mlx.choose import Operations
from kvarn.backends.mlx.model import Attention
from kvarn.backends.mlx.pool import Pool
from kvarn.backends.mlx.sampling import choose
from kvarn.model_plan import Layer, ModelPlan
from kvarn.step import Failure, Span, SpanOutput, StepResult
from kvarn.step_layout import failure_of, lay_out, slot_of, tiles_in_slots
from kvarn.visibility import completed_tiles, num_sealed


class Step:
    """One step on its way through the model: the layers call `attend`, `finish` computes and reads everything at once.

    operations: what seals and attends in sealed layers. `first` is the index, within the whole plan, of the first of
    these spans.
    """

    def __init__(self, pool: Pool, plan: ModelPlan, operations: Operations, spans: Sequence[Span], first: int) -> None:
        self.pool, self.plan, self.operations = pool, plan, operations
        self.exact = plan.preset is None
        self.spans = spans
        self.first = first
        self.layout = lay_out(spans)
        self.blocks = [mx.array([*span.blocks, *span.seal_into], dtype=mx.int32) for span in spans]
        self.status: list[tuple[int, int, array]] = []  # (span, layer, status words [tiles, Hk])

    def attend(self, call: Attention) -> array:
        """Append, seal, attend: one layer, every span. All are written before any reads (see pool.py)."""
        layer = self.plan.layers[call.layer]
        windows, queries = [], []
        for at, span in zip(self.layout.starts, self.spans, strict=True):
            part = slice(at, at + len(span.tokens))
            fresh = mx.stack([call.key[part], call.value[part]]).swapaxes(1, 2)  # [2, Hk, N, D]
            windows.append(self._append(layer, span, fresh))
            queries.append(call.query[part])
        if layer.kind == "sealed":
            self._seal(layer, windows)
        attend = self._attend_sealed if layer.kind == "sealed" else self._attend_exact
        outputs = [attend(call, layer, i, query, windows[i]) for i, query in enumerate(queries)]
        return mx.concatenate([x.astype(call.query.dtype) for x in outputs])

    def _append(self, layer: Layer, span: Span, fresh: array) -> array:
        """Write fresh keys and values where they stay exact; returns the window `[2, Hk, W, D]` of ops.attend."""
        g = self.plan.tile_tokens
        first, last = span.start // g, (span.stop - 1) // g
        base = first * g
        slot = slot_of(span, first, exact=self.exact)
        if first == last:
            self.pool.write_slot(layer.index, slot, span.start - base, fresh)
            return self.pool.slot(layer.index, slot)[:, :, : span.stop - base]
        begun = self.pool.slot(layer.index, slot)[:, :, : span.start - base]
        window = mx.concatenate([begun, fresh.astype(begun.dtype)], axis=2)
        for tile in tiles_in_slots(first, last, exact=self.exact):
            part = window[:, :, tile * g - base : (tile + 1) * g - base]
            self.pool.write_slot(layer.index, slot_of(span, tile, exact=self.exact), 0, part)
        return window

    def _complete(self, span: Span, window: array) -> list[array]:
        """The tiles that this span completes, out of its window: `[2, Hk, G, D]` each."""
        g = self.plan.tile_tokens
        base = span.start // g * g
        return [window[:, :, t * g - base : (t + 1) * g - base] for t in completed_tiles(span.start, span.stop, g)]

    def _seal(self, layer: Layer, windows: Sequence[array]) -> None:
        """Seal the tiles that the spans complete, each by itself, and write them in one go."""
        fmt = self.plan.tile_format
        assert fmt is not None
        done = [tile for span, window in zip(self.spans, windows, strict=True) for tile in self._complete(span, window)]
        if not done:
            return
        keys, values = mx.stack(done, axis=1).astype(mx.float32)  # [tiles, Hk, G, D] each
        tiles, flags, status = self.operations.seal(keys, values, fmt)
        into = mx.array([block for span in self.spans for block in span.seal_into], dtype=mx.int32)
        self.pool.write_tiles(layer.index, into, tiles, flags)
        at = 0
        for i, span in enumerate(self.spans):
            if span.seal_into:
                self.status.append((i, layer.index, status[at : at + len(span.seal_into)]))
                at += len(span.seal_into)

    def _attend_sealed(self, call: Attention, layer: Layer, i: int, query: array, window: array) -> array:
        span, row, fmt = self.spans[i], self.pool.row[layer.index], self.plan.tile_format
        assert fmt is not None
        tiles, flags = self.pool.tiles[row], self.pool.flags[row]
        reads = num_sealed(span.stop - 1, fmt.tile_tokens)
        sink = self.pool.slot(layer.index, span.slots[0])
        blocks = self.blocks[i][:reads]
        return self.operations.attend(query, sink, window, tiles, flags, blocks, span.start, call.scale, fmt)

    def _attend_exact(self, call: Attention, layer: Layer, i: int, query: array, window: array) -> array:
        span = self.spans[i]
        first = span.start // self.plan.tile_tokens
        if self.exact:
            pages = [self.pool.slot(layer.index, slot) for slot in span.slots[:first]]
        else:
            for block, page in zip(span.seal_into, self._complete(span, window), strict=True):
                self.pool.write_block(layer.index, block, page)
            kept = self.pool.exact_blocks[layer.index]
            pages = [self.pool.slot(layer.index, span.slots[0])] if first > 0 else []
            pages += [kept[block] for block in span.blocks[: max(first - 1, 0)]]
        keys, values = mx.concatenate([*pages, window], axis=2).swapaxes(1, 2)  # [T, Hk, D] each
        return ops.attend_exact(query, keys, values, span.start, call.scale, window=layer.window)

    def finish(self, logits: array) -> StepResult:
        """Sample, compute every write, and read tokens, logits and status words back in one go."""
        rows = [logits[part] for part in self.layout.logits]
        sampled = [i for i, span in enumerate(self.spans) if span.sampling is not None]
        returned = {
            i: rows[i].astype(mx.float32)
            for i, span in enumerate(self.spans)
            if span.sampling is None and span.want != "none"
        }
        worst = [status.max() for _, _, status in self.status]
        params = [s for span in self.spans if (s := span.sampling) is not None]
        choice = choose(mx.concatenate([rows[i] for i in sampled]), params) if sampled else None
        self.pool.flush(*(choice.arrays if choice else ()), *returned.values(), *worst)
        chosen = dict(zip(sampled, choice.read() if choice else [], strict=True))
        outputs = []
        for i in range(len(self.spans)):
            if i in chosen:
                one = chosen[i]
                outputs.append(SpanOutput(token=one.token, logprob=one.logprob, top_logprobs=one.top_logprobs))
            else:
                outputs.append(SpanOutput(logits=np.array(returned[i]) if i in returned else None))
        return StepResult(outputs=tuple(outputs), failures=self._failures(worst))

    def _failures(self, worst: Sequence[array]) -> tuple[Failure, ...]:
        failures = []
        for (i, layer, status), bad in zip(self.status, worst, strict=True):
            if bad.item() and (failure := failure_of(self.first + i, layer, np.array(status))):
                failures.append(failure)
        return tuple(failures)
