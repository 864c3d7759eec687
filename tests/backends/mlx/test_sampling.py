"""Sampling on the device: the tokens that the torch backend takes from the same logits and rows."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvarn.backends.mlx.sampling import sample
from kvarn.backends.triton.sampling import sample as torch_sample
from kvarn.step import SamplingRow

Floats = NDArray[np.float32]
ALMOST_ONE = 1 - 2**-53  # the largest uniform that a request can draw


def assert_chosen_alike(logits: Floats, rows: list[SamplingRow]) -> None:
    """Tokens and the order of the most probable ones by the id, log-probabilities within rounding."""
    got, want = sample(mx.array(logits), rows), torch_sample(torch.from_numpy(logits), rows)
    assert [x.token for x in got] == [x.token for x in want]
    np.testing.assert_allclose([x.logprob for x in got], [x.logprob for x in want], rtol=1e-5, atol=1e-6)
    for x, y in zip(got, want, strict=True):
        assert [token for token, _ in x.top_logprobs] == [token for token, _ in y.top_logprobs]
        np.testing.assert_allclose([p for _, p in x.top_logprobs], [p for _, p in y.top_logprobs], rtol=1e-5, atol=1e-6)


def some_logits(seed: int, *shape: int) -> Floats:
    return (np.random.default_rng(seed).standard_normal(shape) * 3).astype(np.float32)


def bits(allowed: bytes) -> list[int]:
    """A constraint's mask, a number a token."""
    return [byte >> at & 1 for byte in allowed for at in range(8)]


def pick(logits: Floats, *rows: SamplingRow) -> list[int]:
    return [one.token for one in sample(mx.array(np.stack([logits] * len(rows))), rows)]


@pytest.mark.parametrize("vocab", [1, 2, 50, 4096, 49_152, 151_936])
def test_random_rows_take_the_tokens_that_torch_takes(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    count = 60 if vocab < 5000 else 8
    rows = [
        SamplingRow(
            temperature=float(rng.choice([0, 0.3, 1, 2.5])),
            top_k=int(rng.choice([0, 1, 5, 1000])),
            top_p=float(rng.choice([1, 0.9, 0.3])),
            min_p=float(rng.choice([0, 0.05, 1])),
            uniform=float(rng.random()),
            logprobs=int(rng.integers(0, 6)),
        )
        for _ in range(count)
    ]
    assert_chosen_alike(some_logits(vocab, count, vocab), rows)


def test_every_filter_and_every_combination_is_torchs() -> None:
    logits = some_logits(1, 50)
    logits[10:13] = logits[5]  # ties
    rows = [
        SamplingRow(temperature=t, top_k=k, top_p=p, min_p=m, uniform=u)
        for t, k, p, m, u in product(
            (0.3, 1.0, 2.5), (0, 1, 5, 99), (1.0, 0.9, 0.5, 0.01), (0.0, 0.1, 1.0), (0.0, 0.31, 0.77, ALMOST_ONE)
        )
    ]
    assert_chosen_alike(np.stack([logits] * len(rows)), rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_and_penalties_are_torchs(temperature: float) -> None:
    logits = some_logits(6, 50)
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
            logprobs=4,
        )
        for r, p, f, bias, u in product(
            (1.0, 1.4, 0.6), (0.0, 1.5, -1.5), (0.0, 0.7), ((), ((4, 30.0), (8, -3.0))), (0.1, 0.8)
        )
    ]
    assert_chosen_alike(np.stack([logits] * len(rows)), rows)


def test_ties_stand_in_the_order_of_their_ids() -> None:
    assert pick(np.zeros(50, np.float32), SamplingRow()) == [0]
    flat = np.zeros(8, np.float32)
    assert pick(flat, *(SamplingRow(temperature=1, uniform=(i + 0.5) / 8) for i in range(8))) == list(range(8))
    assert pick(flat, *(SamplingRow(temperature=1, top_k=3, uniform=(i + 0.5) / 3) for i in range(3))) == [0, 1, 2]
    wide = np.zeros(30_000, np.float32)
    assert pick(wide, *(SamplingRow(temperature=1, top_k=5, uniform=(i + 0.5) / 5) for i in range(5))) == [*range(5)]


def test_a_token_that_is_ruled_out_is_never_chosen() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 1.0], np.float32)
    rows = [SamplingRow(temperature=t, uniform=u) for t in (0, 0.5, 100) for u in (0.0, 0.5, ALMOST_ONE)]
    assert set(pick(logits, *rows)) <= {1, 3}


def test_a_constraint_is_torchs() -> None:
    rng = np.random.default_rng(2)
    for vocab in (1, 7, 8, 9, 33, 257):
        width = -(-vocab // 32) * 4
        rows = [
            SamplingRow(
                temperature=float(rng.choice([0, 1, 3])),
                top_k=int(rng.choice([0, 2])),
                top_p=float(rng.choice([1, 0.5])),
                logit_bias=((0, 50.0),),
                uniform=float(rng.random()),
                logprobs=int(rng.integers(0, 3)),
                allowed=allowed,
            )
            for allowed in (None, b"\1", rng.bytes(width)[:-1] + b"\1", b"\xff" * (width + 4), bytes(4) + b"\1" * width)
        ]
        rows = [row for row in rows if row.allowed is None or any(bits(row.allowed)[:vocab])]
        logits = some_logits(vocab, len(rows), vocab)
        assert_chosen_alike(logits, rows)
        for row, one in zip(rows, sample(mx.array(logits), rows), strict=True):
            assert row.allowed is None or bits(row.allowed)[one.token]


def test_rows_do_not_influence_each_other_and_logits_stay_as_they_were() -> None:
    logits = mx.array(some_logits(3, 6, 300))
    before = np.array(logits)
    rows = [
        SamplingRow(),
        SamplingRow(temperature=1, top_k=3, uniform=0.5),
        SamplingRow(repetition_penalty=2, seen=(1, 2), logit_bias=((3, 99.0),), logprobs=5),
        SamplingRow(temperature=2, top_p=0.3, uniform=0.9),
        SamplingRow(temperature=9, min_p=0.2, uniform=0.1, counts=((7, 3),), frequency_penalty=1),
        SamplingRow(logprobs=300),
    ]
    for i, (row, together) in enumerate(zip(rows, sample(logits, rows), strict=True)):
        assert sample(logits[i : i + 1], [row]) == [together]
    np.testing.assert_array_equal(np.array(logits), before)


def test_bfloat16_logits_are_chosen_from_as_they_are() -> None:
    logits = mx.array(some_logits(4, 2000)).astype(mx.bfloat16)[None]
    rounded = np.array(logits.astype(mx.float32))
    row = SamplingRow(temperature=1, top_p=0.9, uniform=0.7)
    assert sample(logits, [row])[0].token == torch_sample(torch.from_numpy(rounded), [row])[0].token
