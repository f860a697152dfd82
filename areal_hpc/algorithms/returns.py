"""Token rewards to token advantages: what a trajectory's outcome says of each of its tokens. Numpy, float64.

    outcome on the last trainable token, less KL on each --> token rewards --gae--> advantages --whiten--> normalised

What this run did not sample does not exist here: it has no reward, costs no discount and is no step of a recurrence.
``gather`` gives every rank's numbers to every rank, so that statistics are over the whole batch on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from areal_hpc.algorithms.advantages import Float64Array, IntArray
from areal_hpc.config.algorithm import GaeConfig, GaeLevel, Level, NormConfig
from areal_hpc.types import BoolArray, Float32Array, Int32Array

Gather = Callable[[list[float]], list[list[float]]]


def token_rewards(outcomes: Float64Array, mask: BoolArray, boundaries: Int32Array) -> Float64Array:
    """Each sequence's outcome [S] on its last trainable token, 0 on all others. [T]"""
    rewards = np.zeros(mask.size)
    places = np.flatnonzero(mask)
    sequences = _sequences(boundaries)[places]
    last = np.append(sequences[1:] != sequences[:-1], True)[: places.size]
    rewards[places[last]] = outcomes[sequences[last]]
    return rewards


def gae(
    *,
    rewards: Float64Array,
    values: Float64Array,
    bootstrap: Float64Array,
    mask: BoolArray,
    boundaries: Int32Array,
    config: GaeConfig,
) -> tuple[Float64Array, Float64Array]:
    """Generalised advantage estimates (arXiv:1506.02438) and returns of trainable tokens, 0 elsewhere. Both [T].

    Backwards over steps: ``A = r + gamma V_next - V + gamma lambda A_next``; the return is ``A + V``. With level
    token a step is a trainable token. With level turn it is a run of them: rewards are summed, the value is that of
    the first token, and every token of the turn has the turn's advantage. With values of 0 these are discounted
    returns.

    Args:
        values: [T], of the state before each token.
        bootstrap: [S], of the state after the last token: 0 where the episode ended, not where it was only cut.
    """
    places = np.flatnonzero(mask)
    sequences = _sequences(boundaries)[places]
    step_of, first = _steps(places, sequences, config.level)
    advantages = _recurrence(
        rewards=np.bincount(step_of, rewards[places], minlength=first.size).astype(np.float64),
        values=values[places[first]],
        sequences=sequences[first],
        bootstrap=bootstrap,
        config=config,
    )
    found, returns = np.zeros(mask.size), np.zeros(mask.size)
    found[places] = advantages[step_of]
    returns[places] = (advantages + values[places[first]])[step_of]
    return found, returns


def lambdas(num_steps: IntArray, config: GaeConfig) -> Float64Array:
    """Lambda of each sequence: ``config.lam``, or ``max(0, 1 - 1 / (alpha * steps))`` (VAPO, arXiv:2504.05118). [S]"""
    if config.alpha is None:
        return np.full(num_steps.shape, config.lam)
    return np.maximum(0.0, 1.0 - 1.0 / (config.alpha * np.maximum(num_steps, 1)))


def whiten(advantages: Sequence[Float64Array], config: NormConfig, gather: Gather) -> list[Float64Array]:
    """``(advantage - mean) / (deviation + eps)`` over the trainable tokens of all minibatches of all ranks.

    Equal advantages give exactly 0, and so does a lone token. Every rank has to call this, also with nothing.

    Args:
        advantages: of the trainable tokens of each minibatch on this rank, [N_m] each.
    """
    if config.mean is Level.NONE and config.std is Level.NONE:
        return list(advantages)
    values = np.concatenate([np.zeros(0), *advantages])
    told = np.array(gather([float(values.size), float(values.min(initial=np.inf))]))
    count = told[:, 0].sum()
    if count < 2:
        return [np.zeros(part.shape) for part in advantages]
    lowest = told[:, 1].min()
    # Equal values become exactly 0 before rounding can part them from their mean.
    mean = lowest + np.sum(gather([float((values - lowest).sum())])) / count
    squares = np.sum(gather([float(np.square((values - lowest) - (mean - lowest)).sum())]))
    deviation = np.sqrt(squares / (count - config.unbiased))
    shift = 0.0 if config.mean is Level.NONE else mean
    scale = 1.0 if config.std is Level.NONE else deviation + config.eps
    equal = config.std is not Level.NONE and deviation == 0
    return [np.zeros(part.shape) if equal else (part - shift) / scale for part in advantages]


def second_moment_bound(squares: Float32Array, threshold: float, gather: Gather) -> float:
    """The bound under which squares [N] are kept so that the mean of those kept, on all ranks, is below ``threshold``.

    M2PO (arXiv:2510.01161) leaves out the largest first. Equal squares stay or go together, so that the answer does not
    depend on an order; the smallest always stay. Bisection over the bits of float32, which sort as their numbers do.
    """
    ordered = np.sort(squares)
    sums = np.concatenate([[0.0], np.cumsum(ordered, dtype=np.float64)])
    smallest = float(ordered[0]) if ordered.size else np.inf
    low, high = _bits(min(told[0] for told in gather([smallest]))), _bits(np.inf)
    while low < high:
        middle = (low + high + 1) // 2
        kept = int(np.searchsorted(ordered, _number(middle), side="right"))
        count, total = np.sum(gather([float(kept), float(sums[kept])]), axis=0)
        low, high = (middle, high) if total < threshold * count else (low, middle - 1)
    return _number(low)


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


def _number(bits: int) -> float:
    return float(np.int32(bits).view(np.float32))


def _sequences(boundaries: Int32Array) -> IntArray:
    """The sequence of each token. [T]"""
    return np.repeat(np.arange(boundaries.size - 1), np.diff(boundaries))


def _steps(places: IntArray, sequences: IntArray, level: GaeLevel) -> tuple[IntArray, IntArray]:
    """For each trainable token its step [N], and for each step its first token's index among them [K]."""
    if level is GaeLevel.TOKEN:
        return np.arange(places.size), np.arange(places.size)
    begins = np.append(True, (np.diff(places) != 1) | (np.diff(sequences) != 0))[: places.size]
    return np.cumsum(begins) - 1, np.flatnonzero(begins)


def _recurrence(
    *, rewards: Float64Array, values: Float64Array, sequences: IntArray, bootstrap: Float64Array, config: GaeConfig
) -> NDArray[np.float64]:
    """Advantages of all steps [K]; one pass for each place from the end, over all sequences that are so long."""
    num_steps = np.bincount(sequences, minlength=bootstrap.size)
    ends, lam = np.cumsum(num_steps), lambdas(num_steps, config)
    result, later, next_value = np.zeros(rewards.shape), np.zeros(bootstrap.shape), bootstrap.astype(np.float64)
    for back in range(1, int(num_steps.max(initial=0)) + 1):
        long = np.flatnonzero(num_steps >= back)
        step = ends[long] - back
        delta = rewards[step] + config.discount * next_value[long] - values[step]
        result[step] = later[long] = delta + config.discount * lam[long] * later[long]
        next_value[long] = values[step]
    return result
