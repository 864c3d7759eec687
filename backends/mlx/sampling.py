"""Sampling per row; kvarn.sampling says what the parameters mean and in which order they apply.

Random draws are computed in float64, which MLX has on the CPU device alone: the same tokens as on torch, and with
Apple's unified memory no copy.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx.core import array

from kvarn.step import SamplingRow


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One row's token, its log-probability, and those of the most probable tokens."""

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Tokens and log-probabilities on the device, not computed yet, so that a step is computed in one go."""

    rows: Sequence[SamplingRow]
    tokens: array  # int32 [R]
    logprobs: array  # float32 [R]
    top_tokens: array  # int32 [R, K], K the most that any row asks for
    top_logprobs: array  # float32 [R, K]

    @property
    def arrays(self) -> tuple[array, ...]:
        """What has to be computed before `read` costs nothing."""
        return self.tokens, self.logprobs, self.top_tokens, self.top_logprobs

    def read(self) -> list[Sampled]:
        """One entry per row, on the host."""
        tokens, logprobs, ids, values = (np.array(x).tolist() for x in self.arrays)
        return [
            Sampled(
                token=token,
                logprob=logprob,
                top_logprobs=tuple(zip(ids[i][: row.logprobs], values[i][: row.logprobs], strict=True)),
            )
            for i, (row, token, logprob) in enumerate(zip(self.rows, tokens, logprobs, strict=True))
        ]


def sample(logits: array, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Choose a token per row of `logits [R, vocab]`; one transfer to the host at the end."""
    return choose(logits, rows).read()


def choose(logits: array, rows: Sequence[SamplingRow]) -> Choice:
    """`sample` without the transfer."""
    logits = logits.astype(mx.float32)
    logprobs = logits - _log_sum_exp(logits)
    constrained = _constrained(logits, rows)
    judged = mx.stack([_penalized(constrained[i], row) for i, row in enumerate(rows)])
    tokens = mx.argmax(judged, axis=-1).astype(mx.int32)
    if any(row.temperature > 0 for row in rows):
        random = mx.array([row.temperature > 0 for row in rows])
        tokens = mx.where(random, _draw(judged, rows), tokens)
    count = min(max(row.logprobs for row in rows), logits.shape[-1])
    top = mx.argsort(-logprobs, axis=-1)[:, :count] if count else mx.zeros((len(rows), 0), mx.int32)
    return Choice(
        rows=rows,
        tokens=tokens,
        logprobs=mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0],
        top_tokens=top.astype(mx.int32),
        top_logprobs=mx.take_along_axis(logprobs, top, axis=-1),
    )


def _constrained(logits: array, rows: Sequence[SamplingRow]) -> array:
    """Logits with -inf for the tokens that a row's constraint does not allow; all masks in one array."""
    if all(row.allowed is None for row in rows):
        return logits
    vocab = logits.shape[-1]
    width = -(-vocab // 8)
    everything = b"\xff" * width
    masks = [everything if row.allowed is None else row.allowed[:width].ljust(width, b"\0") for row in rows]
    packed = mx.array(np.frombuffer(b"".join(masks), np.uint8).reshape(len(rows), width, 1))
    allowed = (packed >> mx.arange(8, dtype=mx.uint8)) & 1
    return mx.where(allowed.reshape(len(rows), -1)[:, :vocab] == 1, logits, -mx.inf)


def _log_sum_exp(x: array) -> array:
    """`[R, 1]` of `[R, vocab]`, in two stages: MLX's own on the CPU adds one by one and is off by 2e-4 at 150,000."""
    top = x.max(-1, keepdims=True)
    e = mx.exp(x - top)
    e = mx.pad(e, [(0, 0), (0, -e.shape[-1] % 256)])
    return mx.log(e.reshape(len(e), -1, 256).sum(-1).sum(-1, keepdims=True)) + top


def _penalized(logit: array, row: SamplingRow) -> array:
    """One row's logits `[vocab]` after bias and penalties."""

    def changed(logit: array, tokens: Sequence[int], change: Callable[[array], array]) -> array:
        at = mx.array(list(tokens))
        return mx.put_along_axis(logit, at, change(logit[at]), axis=-1)

    if row.logit_bias:
        bias = mx.array([bias for _, bias in row.logit_bias])
        logit = changed(logit, [token for token, _ in row.logit_bias], lambda old: old + bias)
    if row.seen:
        r = row.repetition_penalty
        logit = changed(logit, row.seen, lambda old: mx.where(old > 0, old / r, old * r))
    if row.counts:
        loss = mx.array([row.presence_penalty + row.frequency_penalty * n for _, n in row.counts])
        logit = changed(logit, [token for token, _ in row.counts], lambda old: old - loss)
    return logit


def _draw(logits: array, rows: Sequence[SamplingRow]) -> array:
    """One token per row by inverse transform over the filtered distribution, in float64."""
    with mx.stream(mx.Device(mx.cpu)):

        def column(value: Callable[[SamplingRow], float]) -> array:
            return mx.array([value(row) for row in rows], dtype=mx.float64)[:, None]

        zero = mx.array(0.0, dtype=mx.float64)
        scaled = logits.astype(mx.float64) / column(lambda row: row.temperature or 1.0)
        # mx.exp and mx.softmax keep only float32's precision in float64; mx.power does not.
        p = mx.power(mx.array(math.e, dtype=mx.float64), scaled - scaled.max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True)
        order = mx.argsort(-p, axis=-1)  # stable on the CPU: ties stand by lower id first
        p = mx.take_along_axis(p, order, axis=-1)
        vocab = logits.shape[-1]
        kept = mx.arange(vocab) < mx.array([row.top_k or vocab for row in rows])[:, None]
        head = mx.where(kept, p, zero)
        head = head / head.sum(-1, keepdims=True)
        kept = kept & (mx.cumsum(head, axis=-1) - head < column(lambda row: row.top_p))
        kept = kept & (p >= p[:, :1] * column(lambda row: row.min_p))
        kept = kept | (mx.arange(vocab) == 0)
        mass = mx.cumsum(mx.where(kept, p, zero), axis=-1)
        target = column(lambda row: row.uniform) * mass[:, -1:]
        first = mx.argmax((mass > target).astype(mx.int32), axis=-1)
        return mx.take_along_axis(order, first[:, None], axis=-1)[:, 0].astype(mx.int32)
