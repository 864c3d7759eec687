"""One step on its way through the model: what every layer does with the spans of a plan."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvarn.backends.triton import ops
from kvarn.backends.triton.decoder import decode_row, table_width
from kvarn.backends.triton.dispatch import Operations
from kvarn.backends.triton.model import Attention
from kvarn.backends.triton.pool import Pool
from kvarn.backends.triton.results import Status, failures, outputs, seal_slots
from kvarn.model_plan import Layer, ModelPlan
from kvarn.step import Span, StepResult
from kvarn.step_layout import lay_out, slot_of, tiles_in_slots
from kvarn.visibility import completed_tiles, num_sealed

if TYPE_CHECKING:  # they import triton, which a machine without CUDA may lack
    from kvarn.backends.triton.kernels.operations import Prefill
    from kvarn.backends.triton.kernels.rows import Rows


class _Decoding:
    """The spans of one token, flat and on the device, made once for all layers."""

    def __init__(self, step: "Step") -> None:
        g, exact = step.plan.tile_tokens, step.exact
        self.spans = {i: span for i, span in enumerate(step.spans) if len(span.tokens) == 1}
        own, pages, blocks = [], [], []
        for row, span in enumerate(self.spans.values()):
            tile, offset = divmod(span.start, g)
            own.append((slot_of(span, tile, exact=exact), offset))
            before = range(tile) if exact else range(min(tile, 1))
            pages += [(row, slot_of(span, t, exact=exact), g) for t in before]
            pages.append((row, own[-1][0], offset + 1))
            blocks += [(row, block) for block in span.blocks[: num_sealed(span.start, g)]]
        alone = len(self.spans) == len(step.spans)  # then a view does, without copies in every layer
        self.rows = slice(None) if alone else step.ids([step.layout.starts[i] for i in self.spans])
        self.own, self.offset = step.ids([x for x, _ in own]), step.ids([x for _, x in own])
        self.pages = ops.Pages(*(step.ids([page[k] for page in pages]) for k in range(3)))
        self.tiles = ops.Tiles(*(step.ids([block[k] for block in blocks]) for k in range(2)))
        self.sealing = [
            (i, slot_of(span, span.start // g, exact=exact), span.seal_into[0])
            for i, span in self.spans.items()
            if span.seal_into
        ]
        self.table = step.table(list(self.spans.values()))


class Step:
    """One step on its way through the model: the layers call `attend`, `finish` reads everything at once."""

    def __init__(self, pool: Pool, plan: ModelPlan, spans: Sequence[Span], device: str, operations: Operations) -> None:
        self.pool = pool
        self.plan = plan
        self.spans = spans
        self.device = device
        self.format = plan.tile_format
        self.ops = operations
        self.exact = plan.preset is None
        self.layout = lay_out(spans)
        self.blocks = [self.ids([*span.blocks, *span.seal_into]) for span in spans]
        self.decoding = _Decoding(self)
        self.chunks = [(i, span) for i, span in enumerate(spans) if len(span.tokens) > 1]
        self.prefill = self._plan_prefill()
        self.status: list[Status] = []

    def ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.device)

    def attend(self, call: Attention) -> Tensor:
        """Append, seal, attend: one layer, every span; those of one token together."""
        layer = self.plan.layers[call.layer]
        output = torch.empty_like(call.query)
        plain = call.softcap is None and call.sinks is None and layer.window is None
        together = layer.kind == "sealed" or (self.exact and plain)
        if together and self.decoding.spans:
            rows = self.decoding.rows
            output[rows] = self._decode(call, layer).to(output.dtype)
        if self.prefill is not None and layer.kind == "sealed":
            self._prefill(call, layer, output)
            return output
        for i, span in enumerate(self.spans):
            if together and i in self.decoding.spans:
                continue
            part = slice(self.layout.starts[i], self.layout.starts[i] + len(span.tokens))
            fresh = torch.stack([call.key[part], call.value[part]]).transpose(1, 2)  # [2, Hk, N, D]
            window = self._append(layer, span, fresh)
            attend = self._attend_sealed if layer.kind == "sealed" else self._attend_exact
            output[part] = attend(call, layer, i, call.query[part], window).to(output.dtype)
        return output

    def table(self, spans: Sequence[Span]) -> "Rows | None":
        """Spans of one token as the Triton kernels read them; None where others run."""
        if not self.ops.triton or not spans:
            return None
        from kvarn.backends.triton.kernels.rows import Rows

        fmt, plan = self.format, self.plan
        assert fmt is not None
        table = Rows(
            len(spans),
            width=table_width(plan),
            spare=self.pool.spare,
            heads=plan.num_heads,
            kv_heads=plan.sealed[0].num_kv_heads,
            fmt=fmt,
            device=self.device,
        )
        table.fill([decode_row(span, fmt.tile_tokens) for span in spans])
        return table

    def _decode(self, call: Attention, layer: Layer) -> Tensor:
        """The spans of one token: append them all, attend. What they complete is sealed at the end of the step, for a
        query reads its own tile exactly."""
        d = self.decoding
        pool = self.pool.pages(layer.index)
        row = self.pool.row.get(layer.index)
        tiles, flags = (None, None) if row is None else (self.pool.tiles[row], self.pool.flags[row])
        query, key, value = call.query[d.rows], call.key[d.rows], call.value[d.rows]
        if d.table is not None and tiles is not None and flags is not None:
            return d.table.attend(query, key, value, pool, tiles, flags, call.scale)
        pool[d.own, :, :, d.offset] = torch.stack([key, value], dim=1)
        return self.ops.decode(query, pool, d.pages, tiles, flags, d.tiles, call.scale, self.format)

    def _plan_prefill(self) -> "Prefill | None":
        """The spans of several tokens, for the Triton kernels; None where others run."""
        fmt, plan = self.format, self.plan
        if not self.ops.triton or fmt is None or not self.chunks:
            return None
        from kvarn.backends.triton.kernels.operations import plan_prefill

        return plan_prefill(
            [(span.start, len(span.tokens), span.slots[0]) for _, span in self.chunks],
            [[*span.blocks, *span.seal_into] for _, span in self.chunks],
            heads=plan.num_heads,
            kv_heads=plan.sealed[0].num_kv_heads,
            fmt=fmt,
            dtype=self.pool.slots.dtype,
            device=self.device,
        )

    def _prefill(self, call: Attention, layer: Layer, output: Tensor) -> None:
        """The spans of several tokens in one sealed layer: append and seal each, attend all in one launch."""
        assert self.prefill is not None
        row = self.pool.row[layer.index]
        tiles, flags = self.pool.tiles[row], self.pool.flags[row]
        parts = [slice(self.layout.starts[i], self.layout.starts[i] + len(span.tokens)) for i, span in self.chunks]
        windows = []
        for part, (i, span) in zip(parts, self.chunks, strict=True):
            fresh = torch.stack([call.key[part], call.value[part]]).transpose(1, 2)  # [2, Hk, N, D]
            windows.append(self._append(layer, span, fresh))
            self._seal_completed(layer, i, windows[-1])
        alone = len(parts) == 1
        query = call.query[parts[0]] if alone else torch.cat([call.query[part] for part in parts])
        pool = self.pool.pages(layer.index)
        attended = self.prefill.attend(query, windows, pool, tiles, flags, call.scale)
        at = 0
        for part in parts:
            output[part] = attended[at : at + part.stop - part.start]
            at += part.stop - part.start

    def _append(self, layer: Layer, span: Span, fresh: Tensor) -> Tensor:
        """Write fresh keys and values where they stay exact; returns the window `[2, Hk, W, D]` of ops.attend."""
        g = self.plan.tile_tokens
        first, last = span.start // g, (span.stop - 1) // g
        base = first * g
        page = self.pool.slot(layer.index, slot_of(span, first, exact=self.exact))
        if first == last:
            page[:, :, span.start - base : span.stop - base] = fresh
            return page[:, :, : span.stop - base]
        window = torch.cat([page[:, :, : span.start - base], fresh], dim=2)
        for tile in tiles_in_slots(first, last, exact=self.exact):
            part = window[:, :, tile * g - base : (tile + 1) * g - base]
            self.pool.slot(layer.index, slot_of(span, tile, exact=self.exact))[:, :, : part.shape[2]] = part
        return window

    def _complete(self, span: Span, window: Tensor) -> Tensor:
        """The tiles that this span completes, out of its window: `[2, tiles, Hk, G, D]`."""
        g = self.plan.tile_tokens
        base = span.start // g * g
        tiles = completed_tiles(span.start, span.stop, g)
        return torch.stack([window[:, :, t * g - base : (t + 1) * g - base] for t in tiles], dim=1)

    def _seal_completed(self, layer: Layer, i: int, window: Tensor) -> None:
        """Seal the tiles that span i completes, out of its window."""
        span, row = self.spans[i], self.pool.row[layer.index]
        if not span.seal_into:
            return
        keys, values = self._complete(span, window).float()
        into = self.blocks[i][len(span.blocks) :]
        self.pool.tiles[row][into], self.pool.flags[row][into], status = self.ops.seal(keys, values, self.format)
        self.status.append(Status(i, layer.index, status))

    def _attend_sealed(self, call: Attention, layer: Layer, i: int, query: Tensor, window: Tensor) -> Tensor:
        span, row, fmt = self.spans[i], self.pool.row[layer.index], self.format
        assert fmt is not None
        tiles, flags = self.pool.tiles[row], self.pool.flags[row]
        self._seal_completed(layer, i, window)
        reads = num_sealed(span.stop - 1, fmt.tile_tokens)
        sink = self.pool.slot(layer.index, span.slots[0])
        return self.ops.attend(query, sink, window, tiles, flags, self.blocks[i][:reads], span.start, call.scale, fmt)

    def _attend_exact(self, call: Attention, layer: Layer, i: int, query: Tensor, window: Tensor) -> Tensor:
        span = self.spans[i]
        first = span.start // self.plan.tile_tokens
        if self.exact:
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
        """Seal what decode completed, sample, and read tokens, logits and status words back."""
        if self.format is not None:
            self.status += seal_slots(self.pool, self.ops, self.format, self.decoding.sealing)
        return StepResult(outputs=outputs(self.spans, self.layout.logits, logits), failures=failures(self.status))
