"""One step on its way through the model: what every layer does with the spans of a plan."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvarn.backends.triton import ops
from kvarn.backends.triton.cpu.choose import choose
from kvarn.backends.triton.model import Attention
from kvarn.backends.triton.pool import Pool
from kvarn.backends.triton.sampling import sample
from kvarn.format import SealStatus
from kvarn.model_plan import Layer, ModelPlan
from kvarn.step import Failure, Span, SpanOutput, StepResult
from kvarn.visibility import completed_tiles, num_sealed


class _Decoding:
    """The spans of one token, flat and on the device, made once for all layers."""

    def __init__(self, step: "Step") -> None:
        g, exact = step.plan.tile_tokens, step.plan.preset is None
        self.spans = {i: span for i, span in enumerate(step.spans) if len(span.tokens) == 1}
        own, pages, blocks = [], [], []
        for row, span in enumerate(self.spans.values()):
            tile, offset = divmod(span.start, g)
            own.append((step.slot(span, tile), offset))
            before = range(tile) if exact else range(min(tile, 1))
            pages += [(row, step.slot(span, t), g) for t in before]
            pages.append((row, own[-1][0], offset + 1))
            blocks += [(row, block) for block in span.blocks[: num_sealed(span.start, g)]]
        alone = len(self.spans) == len(step.spans)  # then a view does, without copies in every layer
        self.rows = slice(None) if alone else step.ids([step.starts[i] for i in self.spans])
        self.own, self.offset = step.ids([x for x, _ in own]), step.ids([x for _, x in own])
        self.pages = ops.Pages(*(step.ids([page[k] for page in pages]) for k in range(3)))
        self.tiles = ops.Tiles(*(step.ids([block[k] for block in blocks]) for k in range(2)))
        self.sealing = [i for i, span in self.spans.items() if span.seal_into]
        self.full = step.ids([step.slot(span, span.start // g) for span in self.spans.values() if span.seal_into])
        self.into = step.ids([span.seal_into[0] for span in self.spans.values() if span.seal_into])


class Step:
    """One step on its way through the model: the layers call `attend`, `finish` reads everything at once."""

    def __init__(self, pool: Pool, plan: ModelPlan, spans: Sequence[Span], device: str) -> None:
        self.pool = pool
        self.plan = plan
        self.spans = spans
        self.device = device
        self.format = plan.tile_format
        self.ops = choose(self.format, device)
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
            self.rows.extend(range(len(self.tokens) - span.num_logits, len(self.tokens)))
            self.blocks.append(self.ids([*span.blocks, *span.seal_into]))
        self.decoding = _Decoding(self)
        self.status: list[tuple[int, int, Tensor]] = []  # (span, layer, status words [tiles, Hk])

    def ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.device)

    def attend(self, call: Attention) -> Tensor:
        """Append, seal, attend: one layer, every span; those of one token together."""
        layer = self.plan.layers[call.layer]
        output = torch.empty_like(call.query)
        plain = call.softcap is None and call.sinks is None and layer.window is None
        together = layer.kind == "sealed" or (self.plan.preset is None and plain)
        if together and self.decoding.spans:
            rows = self.decoding.rows
            output[rows] = self._decode(call, layer).to(output.dtype)
        for i, span in enumerate(self.spans):
            if together and i in self.decoding.spans:
                continue
            part = slice(self.starts[i], self.starts[i] + len(span.tokens))
            fresh = torch.stack([call.key[part], call.value[part]]).transpose(1, 2)  # [2, Hk, N, D]
            window = self._append(layer, span, fresh)
            attend = self._attend_sealed if layer.kind == "sealed" else self._attend_exact
            output[part] = attend(call, layer, i, call.query[part], window).to(output.dtype)
        return output

    def _decode(self, call: Attention, layer: Layer) -> Tensor:
        """The spans of one token: append them all, attend. What they complete is sealed at the end of the step, for a
        query reads its own tile exactly."""
        d = self.decoding
        pool = self.pool.pages(layer.index)
        pool[d.own, :, :, d.offset] = torch.stack([call.key[d.rows], call.value[d.rows]], dim=1)
        row = self.pool.row.get(layer.index)
        tiles, flags = (None, None) if row is None else (self.pool.tiles[row], self.pool.flags[row])
        return self.ops.decode(call.query[d.rows], pool, d.pages, tiles, flags, d.tiles, call.scale, self.format)

    def _seal_decoded(self) -> None:
        """Seal the tiles that the spans of one token completed, all layers at once."""
        d, fmt = self.decoding, self.format
        if not d.sealing or fmt is None:
            return
        keys, values = self.pool.slots[d.full].float().unbind(2)  # [sealing, L, Hk, G, D] each
        tiles, flags, status = self.ops.seal(keys, values, fmt)
        self.pool.tiles[:, d.into], self.pool.flags[:, d.into] = tiles.transpose(0, 1), flags.transpose(0, 1)
        for j, i in enumerate(d.sealing):
            self.status += [(i, layer, status[j, row : row + 1]) for layer, row in self.pool.row.items()]

    def slot(self, span: Span, tile: int) -> int:
        """The slot that holds a tile of this span while it is exact."""
        if self.plan.preset is None:
            return span.slots[tile]
        return span.slots[min(tile, 1)]

    def _append(self, layer: Layer, span: Span, fresh: Tensor) -> Tensor:
        """Write fresh keys and values where they stay exact; returns the window `[2, Hk, W, D]` of ops.attend."""
        g = self.plan.tile_tokens
        first, last = span.start // g, (span.stop - 1) // g
        base = first * g
        begun = self.pool.slot(layer.index, self.slot(span, first))[:, :, : span.start - base]
        if first == last:
            page = self.pool.slot(layer.index, self.slot(span, first))
            page[:, :, span.start - base : span.stop - base] = fresh
            return page[:, :, : span.stop - base]
        window = torch.cat([begun, fresh], dim=2)
        # Under a preset only tile 0 and the last tile stay in slots; the tiles between are sealed from the window.
        for tile in range(first, last + 1) if self.plan.preset is None else {first, last} - set(range(1, last)):
            part = window[:, :, tile * g - base : (tile + 1) * g - base]
            self.pool.slot(layer.index, self.slot(span, tile))[:, :, : part.shape[2]] = part
        return window

    def _complete(self, span: Span, window: Tensor) -> Tensor:
        """The tiles that this span completes, out of its window: `[2, tiles, Hk, G, D]`."""
        g = self.plan.tile_tokens
        base = span.start // g * g
        tiles = completed_tiles(span.start, span.stop, g)
        return torch.stack([window[:, :, t * g - base : (t + 1) * g - base] for t in tiles], dim=1)

    def _attend_sealed(self, call: Attention, layer: Layer, i: int, query: Tensor, window: Tensor) -> Tensor:
        span, row, fmt = self.spans[i], self.pool.row[layer.index], self.format
        assert fmt is not None
        tiles, flags = self.pool.tiles[row], self.pool.flags[row]
        if span.seal_into:
            keys, values = self._complete(span, window).float()
            into = self.blocks[i][len(span.blocks) :]
            tiles[into], flags[into], status = self.ops.seal(keys, values, fmt)
            self.status.append((i, layer.index, status))
        reads = num_sealed(span.stop - 1, fmt.tile_tokens)
        sink = self.pool.slot(layer.index, span.slots[0])
        return self.ops.attend(query, sink, window, tiles, flags, self.blocks[i][:reads], span.start, call.scale, fmt)

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
        self._seal_decoded()
        outputs: list[SpanOutput] = []
        sampled = [i for i, span in enumerate(self.spans) if span.sampling is not None]
        at, rows = 0, {}
        for i, span in enumerate(self.spans):
            rows[i] = slice(at, at + span.num_logits)
            at += span.num_logits
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
