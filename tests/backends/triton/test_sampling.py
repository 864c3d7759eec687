"""Sampling on the device against kvarn.sampling's text, read literally in NumPy."""

import math
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvarn.backends.triton.sampling import sample
from kvarn.sampling import uniform
from kvarn.step import SamplingRow

Floats = NDArray[np.float32]
ALMOST_ONE = 1 - 2**-53  # the largest uniform that a request can draw


def mask(*tokens: int, width: int) -> bytes:
    """A constraint's mask, `width` bytes."""
    return bytes(sum(1 << t % 8 for t in set(tokens) if t // 8 == at) for at in range(width))


def members(allowed: bytes) -> set[int]:
    return {token for token in range(8 * len(allowed)) if allowed[token // 8] >> token % 8 & 1}


def choose(logits: Floats, row: SamplingRow) -> int:
    """One token as kvarn.sampling's docstring says, step by step."""
    logits = logits.astype(np.float64)
    if row.allowed is not None:
        logits[[token for token in range(len(logits)) if token not in members(row.allowed)]] = -np.inf
    for token, bias in row.logit_bias:
        logits[token] += bias
    for token in row.seen:
        logits[token] *= 1 / row.repetition_penalty if logits[token] > 0 else row.repetition_penalty
    for token, count in row.counts:
        logits[token] -= row.presence_penalty + row.frequency_penalty * count
    if row.temperature == 0:
        return int(np.flatnonzero(logits == logits.max())[0])
    scaled = logits / row.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))  # descending, ties by lower id first
    if row.top_k:
        order = order[: row.top_k]
    head, total = [], sum(p[i] for i in order)
    for i in order:  # the smallest head whose probability, among what top-k left, reaches p
        head.append(i)
        if sum(p[j] for j in head) / total >= row.top_p - 1e-15:
            break
    survivors = [i for i in head if p[i] >= row.min_p * p[order[0]]] or order[:1]
    mass, share = sum(p[i] for i in survivors), 0.0
    for i in survivors:
        share += p[i] / mass
        if share > row.uniform:
            return i
    return survivors[-1]


def pick(logits: Floats, *rows: SamplingRow) -> list[int]:
    """The device's tokens for the same logits under several rows."""
    return [one.token for one in sample(torch.from_numpy(np.stack([logits] * len(rows))), rows)]


def some_logits(seed: int, vocab: int = 50) -> Floats:
    return (np.random.default_rng(seed).standard_normal(vocab) * 2).astype(np.float32)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    for ids in ([3, 7], [0, 49], [48, 49], range(50)):
        logits = np.full(50, -1, np.float32)
        logits[list(ids)] = 4
        assert pick(logits, SamplingRow()) == [min(ids)]
        filtered = SamplingRow(temperature=0, top_k=5, top_p=0.1, min_p=0.9, uniform=0.99)
        assert pick(logits, filtered) == [min(ids)]


def test_equal_probabilities_stand_in_the_order_of_their_ids() -> None:
    logits = np.zeros(8, np.float32)
    rows = [SamplingRow(temperature=1, uniform=(i + 0.5) / 8) for i in range(8)]
    assert pick(logits, *rows) == list(range(8))
    rows = [SamplingRow(temperature=1, top_k=3, uniform=(i + 0.5) / 3) for i in range(3)]
    assert pick(logits, *rows) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(4))
def test_every_filter_and_every_combination_is_the_literal_reading(seed: int) -> None:
    logits = some_logits(seed)
    logits[10:13] = logits[5]  # ties
    rows = [
        SamplingRow(temperature=t, top_k=k, top_p=p, min_p=m, uniform=u)
        for t, k, p, m, u in product(
            (0.3, 1.0, 2.5), (0, 1, 5, 50, 99), (1.0, 0.9, 0.5, 0.01), (0.0, 0.1, 1.0), (0.0, 0.31, 0.77, 0.999)
        )
    ]
    assert pick(logits, *rows) == [choose(logits, row) for row in rows]


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    row: dict[str, Any] = {"temperature": 1.0, "top_k": 2, "uniform": 0.99}
    assert pick(logits, SamplingRow(**row, top_p=0.5), SamplingRow(**row, top_p=0.6)) == [0, 1]  # 0.4 of 0.7 is 0.571


def test_min_p_is_a_share_of_the_most_probable_token() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    got = pick(logits, *(SamplingRow(temperature=1, min_p=m, uniform=0.9999) for m in (0.0, 0.2, 0.5, 0.7, 1.0)))
    assert got == [3, 2, 1, 0, 0]


def test_temperature_comes_first() -> None:
    logits = np.log(np.array([0.6, 0.4], np.float32))
    rows = [SamplingRow(temperature=t, top_p=0.65, uniform=0.9999) for t in (1.0, 0.5)]
    assert pick(logits, *rows) == [1, 0]  # at 0.5 the first has 0.69 and reaches top_p alone


@pytest.mark.parametrize("vocab", [1, 2, 50, 4096, 151_936])
def test_the_smallest_and_largest_random_numbers_take_the_ends(vocab: int) -> None:
    logits = some_logits(vocab, vocab)
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    low, high = pick(logits, SamplingRow(temperature=1, uniform=0.0), SamplingRow(temperature=1, uniform=ALMOST_ONE))
    assert low == order[0]
    assert high in order[-2:]  # the last tokens of a large vocabulary weigh less than a rounding of the sum
    capped = SamplingRow(temperature=1, top_k=7, uniform=ALMOST_ONE)
    assert pick(logits, capped) == [order[: min(7, vocab)][-1]]


def test_the_most_probable_token_always_survives() -> None:
    logits = some_logits(3)
    strict = SamplingRow(temperature=1, top_k=1, top_p=5e-324, min_p=1.0, uniform=ALMOST_ONE)
    assert pick(logits, strict) == [int(logits.argmax())]


def test_rows_do_not_influence_each_other() -> None:
    """Greedy and random rows of all kinds: the same tokens and log-probabilities alone and together."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy((rng.standard_normal((12, 300)) * 3).astype(np.float32))
    rows = [
        SamplingRow(temperature=t, top_k=k, top_p=p, min_p=m, uniform=float(rng.random()))
        for t, k, p, m in [
            (0, 0, 1, 0),
            (0.5, 3, 1, 0),
            (1, 0, 0.3, 0),
            (2, 0, 1, 0.4),
            (0, 9, 0.1, 1),
            (9, 100, 0.9, 0),
        ]
        * 2
    ]
    for i, (row, together) in enumerate(zip(rows, sample(logits, rows), strict=True)):
        assert sample(logits[i : i + 1], [row]) == [together]
        assert together.token == choose(logits[i].numpy(), row)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_and_penalties_come_before_everything_else(temperature: float) -> None:
    logits = some_logits(6)
    seen, counts = tuple(range(0, 50, 2)), ((3, 1), (8, 4), (int(logits.argmax()), 2))
    rows = [
        SamplingRow(
            temperature=temperature,
            top_k=20,
            repetition_penalty=r,
            presence_penalty=p,
            frequency_penalty=f,
            seen=seen if r != 1 else (),
            counts=counts,
            logit_bias=bias,
            uniform=u,
        )
        for r, p, f, bias, u in product(
            (1.0, 1.4, 0.6), (0.0, 1.5, -1.5), (0.0, 0.7), ((), ((4, 30.0), (8, -3.0))), (0.1, 0.8)
        )
    ]
    assert pick(logits, *rows) == [choose(logits, row) for row in rows]


def test_log_probabilities_are_the_models_own() -> None:
    """Before bias, penalties, temperature and filters; the most probable tokens come in order."""
    logits = some_logits(9)
    want = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    order = np.argsort(-want)
    rows = [
        SamplingRow(),
        SamplingRow(temperature=3, top_k=4, uniform=0.9, logprobs=3),
        SamplingRow(logit_bias=((7, 500.0),), logprobs=99),
    ]
    tops = []
    for row, one in zip(rows, sample(torch.from_numpy(np.stack([logits] * 3)), rows), strict=True):
        assert one.token == choose(logits, row)
        np.testing.assert_allclose(one.logprob, want[one.token], rtol=1e-5)
        np.testing.assert_allclose([p for _, p in one.top_logprobs], [want[i] for i, _ in one.top_logprobs], rtol=1e-5)
        tops.append([i for i, _ in one.top_logprobs])
    assert tops == [[], list(order[:3]), list(order)]


def test_bfloat16_logits_are_chosen_from_as_they_are() -> None:
    logits = torch.from_numpy(some_logits(4, 2000)).bfloat16()[None]
    row = SamplingRow(temperature=1, top_p=0.9, uniform=0.7)
    assert sample(logits, [row])[0].token == choose(logits[0].float().numpy(), row)


def test_sampling_leaves_the_logits_as_they_were() -> None:
    logits = torch.from_numpy(some_logits(5))[None]
    before = logits.clone()
    sample(logits, [SamplingRow(repetition_penalty=2, seen=(1, 2), logit_bias=((3, 9.0),))])
    assert torch.equal(logits, before)


def test_a_token_that_is_ruled_out_is_never_chosen() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 1.0], np.float32)
    rows = [SamplingRow(temperature=t, uniform=u) for t in (0, 0.5, 100) for u in (0.0, 0.5, ALMOST_ONE)]
    assert set(pick(logits, *rows)) <= {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_comes_before_everything_else(temperature: float) -> None:
    """Its tokens alone are biased, penalized, filtered and drawn from; log-probabilities stay the model's own."""
    logits = some_logits(8)
    order = np.argsort(-logits)
    worst = [int(t) for t in order[-5:]]
    rows = [
        SamplingRow(
            temperature=temperature,
            top_k=k,
            top_p=p,
            min_p=m,
            seen=(worst[0], int(order[0])) if r != 1 else (),
            repetition_penalty=r,
            logit_bias=bias,
            allowed=allowed,
            uniform=u,
            logprobs=2,
        )
        for allowed, k, p, m, r, bias, u in product(
            (mask(*worst, width=7), mask(*worst, width=8), mask(*worst, 60, 300, width=100), None, mask(3, width=1)),
            (0, 2),
            (1.0, 0.6),
            (0.0, 0.4),
            (1.0, 1.5),
            ((), ((int(order[0]), 500.0), (worst[2], -1.0))),
            (0.0, 0.6, ALMOST_ONE),
        )
    ]
    sampled = sample(torch.from_numpy(np.stack([logits] * len(rows))), rows)
    assert [one.token for one in sampled] == [choose(logits, row) for row in rows]
    want = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    for row, one in zip(rows, sampled, strict=True):
        assert row.allowed is None or one.token in members(row.allowed)
        np.testing.assert_allclose(one.logprob, want[one.token], rtol=1e-5)
        assert [token for token, _ in one.top_logprobs] == list(order[:2])


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 31, 32, 33, 257])
def test_the_last_token_of_any_vocabulary_can_be_allowed(vocab: int) -> None:
    logits = some_logits(1, vocab)
    logits[-1] = -50
    row = SamplingRow(allowed=mask(vocab - 1, width=-(-vocab // 32) * 4))
    assert pick(logits, row, SamplingRow()) == [vocab - 1, int(logits.argmax())]


@pytest.mark.parametrize("seed", range(2))
def test_tokens_come_as_often_as_the_distribution_says(seed: int) -> None:
    weights = np.array([0.35, 0.25, 0.2, 0.1, 0.06, 0.04])
    logits, draws = np.log(weights).astype(np.float32), 4000
    rows = [SamplingRow(temperature=1, uniform=uniform(seed, 0, i)) for i in range(draws)]
    counts = Counter(pick(logits, *rows))
    chi = sum((counts[i] - draws * w) ** 2 / (draws * w) for i, w in enumerate(weights))
    assert chi < 20.5  # chi-square, 5 degrees of freedom, 1 in 1,000
    assert math.isclose(sum(counts.values()), draws)
