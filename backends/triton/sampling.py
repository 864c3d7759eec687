"""Sampling on the device, per row; kvarn.sampling says what the parameters mean and in which order they apply."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvarn.step import SamplingRow


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One row's token, its log-probability, and those of the most probable tokens."""

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Choose a token per row of `logits [R, vocab]`; one transfer to the host at the end."""
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    judged = _penalized(_constrained(logits, rows), rows)
    tokens = judged.argmax(-1)
    if any(row.temperature > 0 for row in rows):
        random = torch.tensor([row.temperature > 0 for row in rows], device=logits.device)
        tokens = torch.where(random, _draw(judged, rows), tokens)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
    count = max(row.logprobs for row in rows)
    top = logprobs.topk(min(count, logits.shape[-1])) if count else None
    values, ids = (top.values.tolist(), top.indices.tolist()) if top else ([[]] * len(rows), [[]] * len(rows))
    return [
        Sampled(
            token=token,
            logprob=logprob,
            top_logprobs=tuple(zip(ids[i][: rows[i].logprobs], values[i][: rows[i].logprobs], strict=True)),
        )
        for i, (token, logprob) in enumerate(zip(tokens.tolist(), chosen.tolist(), strict=True))
    ]


def _constrained(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Logits with -inf for the tokens that a row's constraint does not allow; all masks go to the device at once."""
    at = [i for i, row in enumerate(rows) if row.allowed is not None]
    if not at:
        return logits
    vocab = logits.shape[-1]
    width = -(-vocab // 8)
    masks = b"".join((rows[i].allowed or b"")[:width].ljust(width, b"\0") for i in at)
    packed = torch.from_numpy(np.frombuffer(masks, np.uint8).reshape(len(at), width, 1).copy()).to(logits.device)
    allowed = (packed >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1).bool()
    index = torch.tensor(at, device=logits.device)
    constrained = logits[index].masked_fill(~allowed.reshape(len(at), -1)[:, :vocab], -torch.inf)
    return logits.index_copy(0, index, constrained)


def _penalized(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Logits after bias and penalties; the rows that ask for none are left as they are."""
    logits = logits.clone()

    def ids(tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=logits.device)

    def floats(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)

    for logit, row in zip(logits, rows, strict=True):
        if row.logit_bias:
            at = ids([token for token, _ in row.logit_bias])
            logit[at] += floats([bias for _, bias in row.logit_bias])
        if row.seen:
            at, r = ids(row.seen), row.repetition_penalty
            old = logit[at]
            logit[at] = torch.where(old > 0, old / r, old * r)
        if row.counts:
            at = ids([token for token, _ in row.counts])
            logit[at] -= floats([row.presence_penalty + row.frequency_penalty * n for _, n in row.counts])
    return logits


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """One token per row by inverse transform over the filtered distribution, in float64."""

    def column(value: Callable[[SamplingRow], float]) -> Tensor:
        return torch.tensor([value(row) for row in rows], dtype=torch.float64, device=logits.device)[:, None]

    temperature = column(lambda row: row.temperature or 1.0)
    p, order = (logits.double() / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    kept = torch.arange(vocab, device=logits.device) < column(lambda row: row.top_k or vocab)
    head = torch.where(kept, p, 0.0)
    head = head / head.sum(-1, keepdim=True)
    kept &= head.cumsum(-1) - head < column(lambda row: row.top_p)
    kept &= p >= p[:, :1] * column(lambda row: row.min_p)
    kept[:, 0] = True
    mass = torch.where(kept, p, 0.0).cumsum(-1)
    target = column(lambda row: row.uniform) * mass[:, -1:]
    chosen = (mass > target).to(torch.uint8).argmax(-1, keepdim=True)
    return order.gather(-1, chosen)[:, 0]
