"""How far one cache's answers are from another's: perplexity, KL divergence, top-1 agreement, by position."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

BUCKETS = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def log_softmax(logits: Floats) -> Floats:
    """Row-wise, float32 `[N, vocab]`."""
    shifted = logits - logits.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)
    result: Floats = shifted - np.log(total).astype(np.float32)
    return result


@dataclass
class Fidelity:
    """Collects, per predicted token, its position, its loss and (against other logits) KL and top-1 agreement."""

    positions: list[NDArray[np.int64]] = field(default_factory=list)
    losses: list[Floats] = field(default_factory=list)
    divergences: list[Floats] = field(default_factory=list)
    agreements: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(self, start: int, logits: Floats, targets: NDArray[np.int64], against: Floats | None) -> None:
        """Logits `[N, vocab]` of positions start ..., the tokens that really followed `[n <= N]`, and log-probabilities
        of the other cache `[N, vocab]` (from `log_softmax`)."""
        n = len(targets)
        mine = log_softmax(logits[:n])
        self.positions.append(np.arange(start, start + n))
        self.losses.append(-mine[np.arange(n), targets])
        if against is not None:
            other = against[:n]
            kl = (np.exp(other) * (other - mine)).sum(-1, dtype=np.float64)
            self.divergences.append(np.maximum(kl, 0).astype(np.float32))
            self.agreements.append(mine.argmax(-1) == other.argmax(-1))

    def summary(self) -> dict[str, Any]:
        """The figures over everything that was added; KL in nats, buckets by position in the sequence."""
        position, loss = np.concatenate(self.positions), np.concatenate(self.losses)
        out: dict[str, Any] = {"tokens": len(loss), "ppl": float(np.exp(loss.mean(dtype=np.float64)))}
        buckets: list[dict[str, Any]] = []
        kl = np.concatenate(self.divergences) if self.divergences else None
        if kl is not None:
            out |= {
                "kl_mean": float(kl.mean(dtype=np.float64)),
                "kl_median": float(np.median(kl)),
                "kl_p99": float(np.quantile(kl, 0.99)),
                "top1": float(np.concatenate(self.agreements).mean()),
            }
        for low, high in pairwise(BUCKETS):
            inside = (position >= low) & (position < high)
            if inside.any():
                bucket: dict[str, Any] = {
                    "from": low,
                    "to": min(high, int(position.max()) + 1),
                    "tokens": int(inside.sum()),
                }
                bucket["ppl"] = float(np.exp(loss[inside].mean(dtype=np.float64)))
                if kl is not None:
                    bucket["kl_mean"] = float(kl[inside].mean(dtype=np.float64))
                buckets.append(bucket)
        return out | {"buckets": buckets}
