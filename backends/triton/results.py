"""What a step gives back: tokens sampled on the device, logits, and the faults of the tiles that it sealed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.backends.triton.dispatch import Operations
from kvarn.backends.triton.pool import Pool
from kvarn.backends.triton.sampling import sample
from kvarn.format import TileFormat
from kvarn.step import Failure, Span, SpanOutput
from kvarn.step_layout import failure_of


@dataclass(frozen=True)
class Status:
    """Status words `uint8 [tiles, Hk]` that one span's tiles of one layer left on the device."""

    span: int
    layer: int
    words: Tensor


def outputs(spans: Sequence[Span], rows: Sequence[slice], logits: Tensor) -> tuple[SpanOutput, ...]:
    """Each span's part of the wanted logits `[rows, vocab]`, as logits or as a sampled token; reads them back."""
    sampled = [i for i, span in enumerate(spans) if span.sampling is not None]
    chosen = {}
    if sampled:
        params = [s for span in spans if (s := span.sampling) is not None]
        chosen = dict(zip(sampled, sample(torch.cat([logits[rows[i]] for i in sampled]), params), strict=True))
    results = []
    for i, span in enumerate(spans):
        if i in chosen:
            one = chosen[i]
            results.append(SpanOutput(token=one.token, logprob=one.logprob, top_logprobs=one.top_logprobs))
        elif span.want == "none":
            results.append(SpanOutput())
        else:
            results.append(SpanOutput(logits=logits[rows[i]].float().cpu().numpy()))
    return tuple(results)


def seal_slots(
    pool: Pool, operations: Operations, fmt: TileFormat, sealing: Sequence[tuple[int, int, int]]
) -> list[Status]:
    """Seal full exact slots, all layers at once: (span, slot, block to seal into) each."""
    if not sealing:
        return []
    device = pool.tiles.device
    slots, blocks = (torch.tensor([x[k] for x in sealing], dtype=torch.int64, device=device) for k in (1, 2))
    keys, values = pool.slots[slots].float().unbind(2)  # [sealing, L, Hk, G, D] each
    tiles, flags, status = operations.seal(keys, values, fmt)
    pool.tiles[:, blocks], pool.flags[:, blocks] = tiles.transpose(0, 1), flags.transpose(0, 1)
    return [
        Status(span, layer, status[j, row : row + 1])
        for j, (span, _, _) in enumerate(sealing)
        for layer, row in pool.row.items()
    ]


def failures(status: Sequence[Status]) -> tuple[Failure, ...]:
    """The faults that status words tell; one transfer to the host, more only where there are any."""
    if not status:
        return ()
    worst = torch.stack([x.words.amax() for x in status]).tolist()
    bad = [x for x, word in zip(status, worst, strict=True) if word]
    found = [failure_of(x.span, x.layer, x.words.cpu().numpy()) for x in bad]
    return tuple(x for x in found if x is not None)
