"""pass@k against counting every choice of k samples, and intervals against what they promise."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.algorithms.pass_at_k import ks_of, mean_with_interval, measure, pass_at_k


@pytest.mark.parametrize("num_samples", range(1, 9))
def test_it_is_the_share_of_all_choices_of_k_samples_that_hold_a_right_one(num_samples: int) -> None:
    for num_passed in range(num_samples + 1):
        right = [True] * num_passed + [False] * (num_samples - num_passed)
        for k in range(1, num_samples + 1):
            expected = np.mean([any(choice) for choice in combinations(right, k)])
            assert pass_at_k(num_samples, num_passed, k) == pytest.approx(expected, abs=1e-12)


def test_it_is_unbiased_where_one_minus_the_power_is_not() -> None:
    """The mean over all that 6 samples can come to is 1 - (1 - p)^k, exactly."""
    n, k, p = 6, 3, 0.2
    outcomes = np.array(np.meshgrid(*[[0, 1]] * n)).reshape(n, -1).sum(axis=0)
    chances = p**outcomes * (1 - p) ** (n - outcomes)
    estimates = np.array([pass_at_k(n, int(c), k) for c in outcomes])
    assert (chances * estimates).sum() == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert (chances * (1 - (1 - outcomes / n) ** k)).sum() < 1 - (1 - p) ** k - 0.03


def test_many_samples_do_not_overflow() -> None:
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5, abs=1e-9)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_it_is_a_chance_that_grows_with_k_and_with_right_samples(case: tuple[int, int, int]) -> None:
    n, c, k = case
    here = pass_at_k(n, c, k)
    assert 0.0 <= here <= 1.0
    assert k == n or pass_at_k(n, c, k + 1) >= here - 1e-12
    assert c == n or pass_at_k(n, c + 1, k) >= here - 1e-12
    assert (c == 0) == (here < 1e-12)


@pytest.mark.parametrize(("samples", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_powers_of_two_and_all_samples_are_told(samples: int, ks: list[int]) -> None:
    assert ks_of(samples) == ks


def test_the_interval_is_the_normal_one_where_that_is_right() -> None:
    """Many prompts of one sample each: mean +- 1.96 standard errors."""
    values = np.random.default_rng(3).exponential(size=2000)
    mean, low, high = mean_with_interval(values, np.ones(2000))
    error = values.std() / np.sqrt(2000)
    assert mean == pytest.approx(values.mean())
    assert (mean - low, high - mean) == (pytest.approx(1.96 * error, rel=0.1), pytest.approx(1.96 * error, rel=0.1))


def test_the_samples_of_one_prompt_count_as_one_observation() -> None:
    """To ask each prompt four times and get the same each time makes nobody surer."""
    values = np.random.default_rng(4).random(50)
    once, four = mean_with_interval(values, np.ones(50)), mean_with_interval(4 * values, np.full(50, 4))
    assert four == pytest.approx(once)


def test_95_of_100_intervals_hold_the_truth() -> None:
    random, held = np.random.default_rng(5), 0
    for _ in range(200):
        _, low, high = mean_with_interval(random.binomial(1, 0.4, size=80), np.ones(80))
        held += low <= 0.4 <= high
    assert 180 <= held <= 198


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 5)), min_size=1, max_size=30), st.integers(0, 9))
def test_the_mean_is_of_all_values_inside_its_interval_and_the_same_again(
    prompts: list[tuple[float, int]], seed: int
) -> None:
    totals, counts = [value * count for value, count in prompts], [count for _, count in prompts]
    if not sum(counts):
        return
    mean, low, high = mean_with_interval(totals, counts, seed=seed)
    assert mean == pytest.approx(sum(totals) / sum(counts), abs=1e-9)
    values = [value for value, count in prompts if count]
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    assert mean_with_interval(totals, counts, seed=seed) == (mean, low, high)


def test_a_prompt_that_lost_samples_counts_where_it_still_has_enough() -> None:
    found = measure([[1.0, 0.0, 0.5, 2.0], [0.0, 1.0], []], 4, 1.0)
    assert found["reward_mean"] == pytest.approx(4.5 / 6)
    assert found["pass_at_1"] == pytest.approx(0.5)  # 2 of 4, 1 of 2; the third has no sample at all
    assert found["pass_at_2"] == pytest.approx((5 / 6 + 1) / 2)
    assert found["pass_at_4"] == 1.0  # of the first prompt alone
    assert found["pass_at_1_low"] <= 0.5 <= found["pass_at_1_high"]
    assert "pass_at_4" not in measure([[1.0, 0.0]], 4, 1.0)
