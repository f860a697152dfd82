"""How good answers are, from several samples of each prompt, and how sure that is.

n samples of a prompt, c of them right  ->  pass@k: the chance that one of k samples is right, for k <= n
the prompts drawn again, many times     ->  an interval around the mean over prompts
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

LEVEL = 0.95
"""How often the interval of a new sample of prompts is to hold the true value."""
RESAMPLES = 2000
BLOCK = 1 << 20
"""Drawn prompts in memory at once."""


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The chance that of ``k`` samples, drawn without putting back, at least one is right: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), as a product of ratios that cannot overflow. The
    simpler 1 - (1 - c / n)^k is too low wherever some samples are right.
    """
    assert 1 <= k <= num_samples and 0 <= num_passed <= num_samples, (num_samples, num_passed, k)
    wrong = num_samples - num_passed
    if wrong < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(wrong + 1, num_samples + 1)))


def ks_of(num_samples: int) -> list[int]:
    """For which k to tell pass@k: the powers of two, and the number of samples."""
    powers = (1 << exponent for exponent in range(num_samples.bit_length()))
    return sorted({*powers, num_samples})


def mean_with_interval(totals: ArrayLike, counts: ArrayLike, *, seed: int = 0) -> tuple[float, float, float]:
    """The mean of all values of all prompts, with the low and high end of its interval.

    A percentile bootstrap (Efron 1979) over prompts, since the samples of one prompt are not independent of each other.
    It knows nothing of prompts unlike those that it was given: where all have the same mean it has no width.

    Args:
        totals: [P], the sum of each prompt's values.
        counts: [P], how many those are; a prompt without any is left out.
        seed: of the drawing: the same numbers give the same interval.
    """
    all_counts = np.asarray(counts, dtype=np.float64)
    sums, sizes = np.asarray(totals, dtype=np.float64)[all_counts > 0], all_counts[all_counts > 0]
    assert sizes.size, "nothing to take a mean of"
    random = np.random.default_rng(seed)
    block = max(1, BLOCK // sizes.size)
    means: list[float] = []
    for begin in range(0, RESAMPLES, block):
        picked = random.integers(sizes.size, size=(min(block, RESAMPLES - begin), sizes.size))
        means.extend((sums[picked].sum(axis=1) / sizes[picked].sum(axis=1)).tolist())
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(sums.sum() / sizes.sum()), float(low), float(high)


def measure(rewards: Sequence[ArrayLike], num_samples: int, pass_reward: float, *, seed: int = 0) -> dict[str, float]:
    """``reward_mean``, and ``pass_at_<k>`` for each k, each also with ``_low`` and ``_high``.

    Args:
        rewards: for each prompt those of its samples, fewer than ``num_samples`` where some failed; not all empty.
        num_samples: how many were to be drawn for each prompt.
        pass_reward: a sample is right from this reward on.

    Returns:
        no pass@k for a k that no prompt has so many samples for; else it is of the prompts that do.
    """
    per_prompt = [np.asarray(one, dtype=np.float64) for one in rewards]
    sizes = [one.size for one in per_prompt]
    found = {"reward_mean": mean_with_interval([one.sum() for one in per_prompt], sizes, seed=seed)}
    passed = [(one.size, int((one >= pass_reward).sum())) for one in per_prompt]
    for k in ks_of(num_samples):
        chances = [pass_at_k(size, right, k) for size, right in passed if size >= k]
        if chances:
            found[f"pass_at_{k}"] = mean_with_interval(chances, np.ones(len(chances)), seed=seed)
    suffixes = ("", "_low", "_high")
    return {
        name + suffix: value for name, three in found.items() for suffix, value in zip(suffixes, three, strict=True)
    }
