"""Perplexity and KL are what their formulas say."""

import numpy as np
import pytest

from kvarn.serve.fidelity import Fidelity, log_softmax


def logits(seed: int, n: int = 300, vocab: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, vocab)).astype(np.float32) * 3


def test_the_figures_equal_a_float64_computation() -> None:
    mine, other = logits(1), logits(2)
    targets = np.arange(299) % 50
    fidelity = Fidelity()
    for low, high in ((0, 100), (100, 300)):
        fidelity.add(low, mine[low:high], targets[low : high if high < 300 else 299], log_softmax(other[low:high]))
    got = fidelity.summary()
    p, q = (np.exp(x.astype(np.float64))[:299] for x in (other, mine))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    kl = (p * np.log(p / q)).sum(-1)
    assert got["tokens"] == 299
    assert got["ppl"] == pytest.approx(np.exp(-np.log(q[np.arange(299), targets]).mean()), rel=1e-5)
    assert got["kl_mean"] == pytest.approx(kl.mean(), rel=1e-4)
    assert got["kl_median"] == pytest.approx(np.median(kl), rel=1e-4)
    assert got["kl_p99"] == pytest.approx(np.quantile(kl, 0.99), rel=1e-4)
    assert got["top1"] == (p.argmax(-1) == q.argmax(-1)).mean()
    assert [(b["from"], b["to"], b["tokens"]) for b in got["buckets"]] == [
        (0, 128, 128),
        (128, 256, 128),
        (256, 299, 43),
    ]
    assert got["buckets"][1]["kl_mean"] == pytest.approx(kl[128:256].mean(), rel=1e-4)


def test_the_same_logits_diverge_by_nothing_and_agree_everywhere() -> None:
    fidelity = Fidelity()
    fidelity.add(0, logits(1), np.zeros(300, np.int64), log_softmax(logits(1)))
    got = fidelity.summary()
    assert got["kl_mean"] == 0
    assert got["top1"] == 1
