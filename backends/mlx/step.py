"""One step of the MLX backend: append, seal and attend, layer by layer, then sample and read back."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx.core import array

from kvarn.backends.mlx import ops
from kvarn.backends.mlx.model import Attention
from kvarn.backends.mlx.pool import Pool
from kvarn.backends.mlx.sampling import choose
from kvarn.format import SealStatus
from kvarn.model_plan import Layer, ModelPlan
from kvarn.step import Failure, Span, SpanOutput, StepResult
from kvarn.visibility import completed_tiles, num_sealed


class Step:
    """One step on its way through the model: the layers call `attend`, `finish` computes and reads everything at once.

    `first` is the index, within the whole plan, of the first of these spans.
    """

    def __init__(self, pool: Pool, plan: ModelPlan, spans: Sequence[Span], first: int) -> None:
        self.pool, self.plan = pool, plan
        self.spans = spans
        self.first = first
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.rows: list[int] = []  # token indices whose logits are wanted
        self.starts: list[int] = []  # of each span within the step
        self.blocks: list[array] = []
        for span in spans:
            self.starts.append(len(self.tokens))
            self.tokens.extend(span.tokens)
            self.positions.extend(range(span.start, span.stop))
            self.rows.extend(range(len(self.tokens) - span.num_logits, len(self.tokens)))
            self.blocks.append(mx.array([*span.blocks, *span.seal_into], dtype=mx.int32))
        self.status: list[tuple[int, int, array]] = []  # (span, layer, status words [tiles, Hk])

    def attend(self, call: Attention) -> array:
        """Append, seal, attend: one layer, every span. All are written before any reads (see pool.py)."""
        layer = self.plan.layers[call.layer]
        windows, queries = [], []
        for at, span in zip(self.starts, self.spans, strict=True):
            part = slice(at, at + len(span.tokens))
            fresh = mx.stack([call.key[part], call.value[part]]).swapaxes(1, 2)  # [2, Hk, N, D]
            windows.append(self._append(layer, span, fresh))
            queries.append(call.query[part])
        if layer.kind == "sealed":
            self._seal(layer, windows)
        attend = self._attend_sealed if layer.kind == "sealed" else self._attend_exact
        outputs = [attend(call, layer, i, query, windows[i]) for i, query in enumerate(queries)]
        return mx.concatenate([x.astype(call.query.dtype) for x in outputs])

    def _slot(self, span: Span, tile: int) -> int:
        """The slot that holds a tile of this span while it is exact."""
        if self.plan.preset is None:
            return span.slots[tile]
        return span.slots[min(tile, 1)]

    def _append(self, layer: Layer, span: Span, fresh: array) -> array:
        """Write fresh keys and values where they stay exact; returns the window `[2, Hk, W, D]` of ops.attend."""
        g = self.plan.tile_tokens
        first, last = span.start // g, (span.stop - 1) // g
        base = first * g
        slot = self._slot(span, first)
        if first == last:
            self.pool.write_slot(layer.index, slot, span.start - base, fresh)
            return self.pool.slot(layer.index, slot)[:, :, : span.stop - base]
        begun = self.pool.slot(layer.index, slot)[:, :, : span.start - base]
        window = mx.concatenate([begun, fresh.astype(begun.dtype)], axis=2)
        # Under a preset only tile 0 and the last tile stay in slots; the tiles between are sealed from the window.
        for tile in range(first, last + 1) if self.plan.preset is None else {first, last} - set(range(1, last)):
            part = window[:, :, tile * g - base : (tile + 1) * g - base]
            self.pool.write_slot(layer.index, self._slot(span, tile), 0, part)
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
        tiles, flags, status = ops.seal(keys, values, fmt)
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
        return ops.attend(query, sink, window, tiles, flags, self.blocks[i][:reads], span.start, call.scale, fmt)

    def _attend_exact(self, call: Attention, layer: Layer, i: int, query: array, window: array) -> array:
        span = self.spans[i]
        first = span.start // self.plan.tile_tokens
        if self.plan.preset is None:
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
        at, rows = 0, []
        for span in self.spans:
            rows.append(logits[at : at + span.num_logits])
            at += span.num_logits
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
            if bad.item():
                words = np.array(status)
                head = int(words.max(0).argmax())
                reason = SealStatus(int(words[:, head].max())).reason
                failures.append(Failure(span=self.first + i, layer=layer, kv_head=head, reason=reason))
        return tuple(failures)
