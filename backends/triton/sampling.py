"""Sampling on the device, per row; kvarn.sampling says what the parameters mean and in which order they apply."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvarn.step import SamplingRow


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor]:
    """Choose a token per row of `logits [R, vocab]`: ids `int64 [R]` and their log-probabilities `float32 [R]`.

    The log-probability is that of the model's own distribution, before temperature and filters.
    """
    logits = logits.float()
    greedy = logits.argmax(-1)
    tokens = greedy
    if any(row.temperature > 0 for row in rows):

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

        temperature = column([row.temperature or 1.0 for row in rows])
        p, order = (logits.double() / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
        vocab = logits.shape[-1]
        rank = torch.arange(vocab, device=logits.device)
        kept = rank < column([row.top_k or vocab for row in rows])
        head = torch.where(kept, p, 0.0)
        head = head / head.sum(-1, keepdim=True)
        kept &= head.cumsum(-1) - head < column([row.top_p for row in rows])
        kept &= p >= p[:, :1] * column([row.min_p for row in rows])
        kept[:, 0] = True
        mass = torch.where(kept, p, 0.0).cumsum(-1)
        target = column([row.uniform for row in rows]) * mass[:, -1:]
        chosen = (mass > target).to(torch.uint8).argmax(-1, keepdim=True)
        sampled = order.gather(-1, chosen)[:, 0]
        random = torch.tensor([row.temperature > 0 for row in rows], device=logits.device)
        tokens = torch.where(random, sampled, greedy)
    logprobs = logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    return tokens, logprobs
