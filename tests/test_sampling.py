"""Sampling parameters and the random numbers of a request."""

import hashlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarn.errors import UsageError
from kvarn.sampling import SamplingParams, uniform
from kvarn.step import SamplingRow


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("temperature", -0.1, "temperature -0.1 is not between 0"),
        ("temperature", 100.1, "temperature 100.1 is not between 0"),
        ("temperature", math.nan, "temperature nan is not between 0"),
        ("temperature", math.inf, "temperature inf is not between 0"),
        ("top_k", -1, "top_k -1 is negative"),
        ("top_p", 0.0, "top_p 0.0 is not above 0"),
        ("top_p", 1.1, "top_p 1.1 is not above 0"),
        ("top_p", math.nan, "top_p nan is not above 0"),
        ("min_p", -0.1, "min_p -0.1 is not between 0 and 1"),
        ("min_p", 1.5, "min_p 1.5 is not between 0 and 1"),
        ("min_p", math.nan, "min_p nan is not between 0 and 1"),
        ("repetition_penalty", 0.0, "repetition_penalty 0.0 is not between 0.01 and 100"),
        ("repetition_penalty", 101, "repetition_penalty 101 is not between"),
        ("repetition_penalty", math.nan, "repetition_penalty nan is not between"),
        ("presence_penalty", -101, "presence_penalty -101 is not between -100 and 100"),
        ("presence_penalty", math.inf, "presence_penalty inf is not between"),
        ("frequency_penalty", 100.5, "frequency_penalty 100.5 is not between"),
        ("frequency_penalty", math.nan, "frequency_penalty nan is not between"),
        ("logit_bias", {3: 1001.0}, "logit_bias of 1001.0 for token 3"),
        ("logit_bias", {3: 1.0, -1: 0.0}, "logit_bias of 0.0 for token -1"),
        ("logit_bias", {3: math.nan}, "logit_bias of nan for token 3"),
        ("logprobs", -1, "logprobs -1 is negative"),
    ],
)
def test_a_parameter_out_of_range_is_a_usage_error_with_its_value(field: str, value: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_the_ends_of_every_range_are_allowed() -> None:
    SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=0.01, presence_penalty=-100)
    SamplingParams(temperature=100, top_k=10**9, top_p=5e-324, min_p=1, seed=-(10**30), frequency_penalty=100)
    SamplingParams(logit_bias={0: -1000, 10**9: 1000}, repetition_penalty=100)


def test_the_default_is_greedy_and_draws_no_number() -> None:
    assert SamplingParams().row([1, 2], [2, 3]) == SamplingRow()
    assert SamplingParams(temperature=0, seed=7).row([1], [2]).uniform == 0.0


def test_a_row_carries_the_parameters_and_this_tokens_number() -> None:
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, seed=11, logprobs=3)
    want = SamplingRow(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, logprobs=3, uniform=uniform(11, 2, 4))
    assert params.row([9], [1, 2, 3, 4], choice=2) == want
    assert params.row([9], [1, 2, 3]).uniform == uniform(11, 0, 3)


def test_a_row_carries_only_the_history_that_its_penalties_read() -> None:
    prompt, answer = [5, 5, 3], [7, 3, 7]
    assert SamplingParams(repetition_penalty=1.1).row(prompt, answer).seen == (3, 5, 7)
    assert SamplingParams(repetition_penalty=1.1).row(prompt, answer).counts == ()
    for params in (SamplingParams(presence_penalty=0.5), SamplingParams(frequency_penalty=-0.5)):
        assert params.row(prompt, answer).counts == ((3, 1), (7, 2))
        assert params.row(prompt, answer).seen == ()
    assert SamplingParams(logit_bias={9: 1.0, 2: -3.0}).row(prompt, answer).logit_bias == ((2, -3.0), (9, 1.0))


def test_the_random_numbers_are_these_for_ever() -> None:
    """53 bits of sha256 over `seed:choice:index`: the same in every process and on every backend."""
    assert uniform(0, 1, 2) == (int.from_bytes(hashlib.sha256(b"0:1:2").digest()[:8], "little") >> 11) / 2**53
    assert [uniform(0, 0, i) for i in range(3)] == [0.2923366471269865, 0.8959124732848939, 0.8878848436622004]
    assert len({uniform(1, 23, 4), uniform(12, 3, 4), uniform(1, 2, 34)}) == 3


@settings(deadline=None)
@given(st.integers(), st.integers(0, 100), st.integers(0, 10**9))
def test_a_random_number_is_in_the_half_open_unit_interval(seed: int, choice: int, index: int) -> None:
    assert 0 <= uniform(seed, choice, index) < 1


def test_the_random_numbers_of_a_request_are_spread_evenly() -> None:
    for seed in range(3):
        counts = [0] * 10
        for index in range(5000):
            counts[int(uniform(seed, 0, index) * 10)] += 1
        assert sum((n - 500) ** 2 / 500 for n in counts) < 27.9  # chi-square, 9 degrees of freedom, 1 in 1,000
