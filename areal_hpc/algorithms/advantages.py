"""Rewards to advantages: penalty, scale, normalise. Float64 throughout; one number for each trajectory.

    reward --overlong penalty--> --(r + bias) * scale, clipped--> --reward_norm--> shaped reward
    shaped reward --adv_norm--> advantage of all its tokens, or --returns.py--> an advantage for each token

Statistics are over *samples*: an episode is one sample however many branches (trajectories) it was recorded as, and
groups are known by their ids, so a group that lost a member shifts nobody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_hpc.config.algorithm import AlgorithmConfig, Level, NormConfig, OverlongConfig
from areal_hpc.types import BoolArray, GroupRef

Float64Array = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What is known of a step's N trajectories before their tokens are read.

    Raises:
        AssertionError: the arrays differ in length (our own mistake, not the user's).
    """

    rewards: Float64Array  # [N]
    groups: IntArray  # [N], trajectories of one prompt share a number; any numbers, any order
    generated: IntArray  # [N], tokens that this run sampled
    truncated: BoolArray  # [N], cut by the token budget: the carried stop reason, for algorithms that bootstrap
    episodes: IntArray  # [N], within a group, branches of one episode share a number
    max_new_tokens: int  # the sampling limit
    baselines: Float64Array | None = None  # [N, 2], mean and deviation of what came before; NaN where there is a group

    def __post_init__(self) -> None:
        shapes = {a.shape for a in (self.rewards, self.groups, self.generated, self.truncated, self.episodes)}
        assert shapes == {(self.rewards.size,)}, shapes

    @property
    def samples(self) -> IntArray:
        """A number for each episode of each group: trajectories that share one are branches of one sample. [N]"""
        pairs = np.stack([self.groups, self.episodes])
        return np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1)

    @classmethod
    def of(cls, refs: Sequence[GroupRef], max_new_tokens: int) -> AdvantageInputs:
        """A claim's trajectories in the order of ``refs``, from its metadata alone."""
        return cls(
            rewards=np.array([r for ref in refs for r in ref.rewards], dtype=np.float64),
            groups=np.repeat(np.arange(len(refs)), [len(ref.rewards) for ref in refs]),
            generated=np.array([n for ref in refs for n in ref.generated], dtype=np.int64),
            truncated=np.array([t for ref in refs for t in ref.truncated], dtype=np.bool_),
            episodes=np.array([e for ref in refs for e in ref.episodes], dtype=np.int64),
            baselines=np.repeat(
                np.array([ref.baseline or (np.nan, np.nan) for ref in refs], dtype=np.float64).reshape(-1, 2),
                [len(ref.rewards) for ref in refs],
                axis=0,
            ),
            max_new_tokens=max_new_tokens,
        )


def trajectory_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> Float64Array:
    """Group-relative advantages [N] of outcome rewards (GRPO, arXiv:2402.03300).

    The levels of ``config.reward_norm`` give its relatives: no deviation is Dr. GRPO (arXiv:2503.20783), leave-one-out
    is RLOO (arXiv:2402.14740), group mean with batch deviation is Lite PPO (arXiv:2508.08221). Every token of a
    trajectory has the trajectory's advantage, so ``config.adv_norm`` weighs each trajectory by its trainable tokens.
    """
    tokens = inputs.generated.astype(np.float64)
    shaped = shaped_rewards(inputs, config)
    return normalise(shaped, inputs.groups, config.adv_norm, weights=tokens, samples=inputs.samples)


def given_rewards(inputs: AdvantageInputs, config: AlgorithmConfig) -> Float64Array:
    """Rewards [N] as they are: of given answers, which nothing is relative to."""
    return inputs.rewards


def no_rewards(inputs: AdvantageInputs, config: AlgorithmConfig) -> Float64Array:
    """0 for each of N trajectories: what is learned comes from elsewhere, such as a teacher."""
    return np.zeros(inputs.rewards.shape)


def shaped_rewards(inputs: AdvantageInputs, config: AlgorithmConfig) -> Float64Array:
    """Rewards [N] after penalty, scale and ``config.reward_norm``; an episode counts once, however many branches."""
    rewards = inputs.rewards + overlong_penalty(inputs.generated, inputs.max_new_tokens, config.overlong)
    rewards = scale_rewards(rewards, config)
    samples = inputs.samples
    share = 1.0 / np.bincount(samples)[samples]
    shaped = normalise(rewards, inputs.groups, config.reward_norm, weights=share, samples=samples)
    return shaped if inputs.baselines is None else _against_baselines(shaped, rewards, inputs.baselines, config)


def _against_baselines(
    shaped: Float64Array, rewards: Float64Array, baselines: Float64Array, config: AlgorithmConfig
) -> Float64Array:
    """``shaped`` [N], but of a lone episode with a baseline its reward against that, where others have their group's.

    The baseline is of episodes before it, so that it does not depend on this one's answer: REINFORCE with a baseline
    (Williams 1992), whose gradient it leaves unbiased. Without a deviation yet, the difference stays as it is.
    """
    norm = config.reward_norm
    if norm.mean is not Level.GROUP:
        return shaped
    difference = rewards - scale_rewards(baselines[:, 0], config)
    deviation = abs(config.reward_scale) * baselines[:, 1]
    divisor = np.where((norm.std is not Level.NONE) & (deviation > 0), deviation + norm.eps, 1.0)
    return np.where(np.isnan(baselines[:, 0]), shaped, difference / divisor)


def overlong_penalty(generated: IntArray, max_new_tokens: int, config: OverlongConfig) -> Float64Array:
    """Soft penalty [N], in [-factor, 0], that grows over the last ``config.tokens`` before the limit.

    DAPO's soft overlong punishment (arXiv:2503.14476) times ``factor``: 0 up to ``max_new_tokens - tokens``, then
    linear to ``-factor`` at the limit and beyond it.
    """
    if config.tokens == 0:
        return np.zeros(generated.shape, dtype=np.float64)
    excess = (generated - (max_new_tokens - config.tokens)) / config.tokens
    return -config.factor * np.clip(excess, 0.0, 1.0)


def scale_rewards(rewards: Float64Array, config: AlgorithmConfig) -> Float64Array:
    """``(reward + reward_bias) * reward_scale``, clipped to +-``reward_clip``. [N] -> [N]"""
    scaled = (rewards + config.reward_bias) * config.reward_scale
    return np.clip(scaled, -config.reward_clip, config.reward_clip)


def normalise(
    values: Float64Array,
    groups: IntArray,
    config: NormConfig,
    weights: Float64Array | None = None,
    samples: IntArray | None = None,
) -> Float64Array:
    """``(value - mean) / (deviation + eps)`` [N], each over the group, the batch, or left out.

    The deviation is that of the centred values, so a group mean with a batch deviation pools the spread within groups.
    Leaving one out concerns the mean only: ``(sum - own sample) / (weight - own sample's weight)``.
    Where there is nothing to compare with - a lone sample, or no deviation at all - the answer is exactly 0.

    Args:
        values: [N]
        groups: [N], group ids; sizes may differ and members need not stand together.
        weights: [N], how many samples (or tokens) an entry stands for; 1 each if not given.
        samples: [N], entries with one number are branches of one sample, in one group; all differ if not given.
    """
    weights = np.ones(values.shape) if weights is None else weights
    samples = np.arange(values.size) if samples is None else _compact(samples)
    result = centred = values.astype(np.float64)
    compared = np.ones(values.shape, dtype=np.bool_)
    if config.mean is not Level.NONE:
        sets = _sets(groups, config.mean)
        centred = _centre(values, sets, weights)
        result = _centre(values, sets, weights, samples) if config.leave_one_out else centred
        compared &= _num_samples(sets, weights, samples) > 1
    if config.std is not Level.NONE:
        sets = _sets(groups, config.std)
        deviation = _deviation(centred, sets, weights, config.unbiased)
        result = np.divide(result, deviation + config.eps, out=np.zeros(values.shape), where=deviation > 0)
        compared &= _num_samples(sets, weights, samples) > 1
    return np.where(compared, result, 0.0)


def _compact(ids: IntArray) -> IntArray:
    """Any ids as 0, 1, 2, ...; equal ids stay equal."""
    return np.unique(ids, return_inverse=True)[1].reshape(-1)


def _sets(groups: IntArray, level: Level) -> IntArray:
    """For each entry the number of the set that its statistics are over. [N]"""
    return _compact(groups) if level is Level.GROUP else np.zeros(groups.shape, dtype=np.int64)


def _centre(
    values: Float64Array, sets: IntArray, weights: Float64Array, left_out: IntArray | None = None
) -> Float64Array:
    """Values minus the weighted mean of their set, without their own sample if ``left_out`` names the samples."""
    lowest: Float64Array = np.full(values.shape, np.inf)
    np.minimum.at(lowest, sets, values)
    shifted = values - lowest[sets]  # equal values become exactly 0 before rounding can part them from their mean
    total = np.bincount(sets, weights * shifted)[sets]
    weight = np.bincount(sets, weights)[sets]
    if left_out is not None:
        total = total - np.bincount(left_out, weights * shifted)[left_out]
        weight = weight - np.bincount(left_out, weights)[left_out]
    mean: Float64Array = np.divide(total, weight, out=np.zeros(values.shape), where=weight > 0)
    return shifted - mean


def _deviation(values: Float64Array, sets: IntArray, weights: Float64Array, unbiased: bool) -> Float64Array:
    """Weighted standard deviation of the set of each entry, 0 where it is not defined. [N]"""
    squares = np.bincount(sets, weights * np.square(_centre(values, sets, weights)))[sets]
    freedom = np.bincount(sets, weights)[sets] - (1.0 if unbiased else 0.0)
    variance: Float64Array = np.divide(squares, freedom, out=np.zeros(values.shape), where=freedom > 0)
    return np.sqrt(variance)


def _num_samples(sets: IntArray, weights: Float64Array, samples: IntArray) -> IntArray:
    """How many different samples with a weight the set of each entry holds. [N]"""
    weighty = weights > 0
    pairs = np.unique(np.stack([sets[weighty], samples[weighty]]), axis=1)
    counts: IntArray = np.bincount(pairs[0], minlength=int(sets.max(initial=-1)) + 1)[sets]
    return counts
