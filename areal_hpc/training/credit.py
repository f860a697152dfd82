"""Between the packed batch and the update: what the models say at the start of the step, and what follows from it.

    proximal log-probs     one more forward of the policy, unless the algorithm gets them otherwise
    reference log-probs    of the frozen model, where there is a KL
    values                 of the critic, where there is one
      -> token advantages  outcome less KL, GAE, normalised over all ranks            (token-level algorithms)
      -> eligible tokens   the second moment's bound, over all ranks                  (M2PO)

Every rank calls this together, also with empty shares; nothing of it depends on how sequences fall on ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from areal_hpc.algorithms.kl import bounded
from areal_hpc.algorithms.returns import gae, second_moment_bound, token_rewards, whiten
from areal_hpc.algorithms.table import find
from areal_hpc.config.algorithm import AlgorithmConfig, KlPlace, ProximalMethod
from areal_hpc.config.recipes import reference_of
from areal_hpc.protocols import Peers, TrainerBackend
from areal_hpc.types import Batch, Float32Array


def assess(
    batches: Sequence[Batch],
    outcomes: Sequence[NDArray[np.float64]],
    backend: TrainerBackend,
    config: AlgorithmConfig,
    ranks: Peers,
) -> list[Batch]:
    """The batches with all that the loss needs, by the weights that the step starts from.

    Args:
        batches: this rank's share of each minibatch; ``advantages`` are the trajectories' own.
        outcomes: for each batch what ``Algorithm.outcomes`` gave its sequences, [S] each.
        ranks: those among which sequences are dealt.
    """
    if config.proximal is ProximalMethod.RECOMPUTE:
        batches = [batch.with_proximal(backend.logprobs(batch)) for batch in batches]
    if reference_of(config) is not None:
        batches = [replace(batch, reference=backend.reference_logprobs(batch)) for batch in batches]
    if find(config.name).token_level:
        batches = [
            _with_token_advantages(batch, of_sequence, backend, config)
            for batch, of_sequence in zip(batches, outcomes, strict=True)
        ]
        batches = _whitened(batches, config, ranks)
    if config.m2_threshold is not None:
        batches = _within_second_moment(batches, config.m2_threshold, ranks)
    return list(batches)


def gather_proximal(
    plan: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], minibatches: Sequence[Batch], ranks: Peers
) -> dict[int, Float32Array]:
    """The proximal log-probs [T] of each trajectory, where they were computed: every rank's share. Collective.

    Args:
        plan: for each minibatch and rank, which trajectories are its share.
        lengths: of each trajectory, in tokens.
    """
    mine = [batch.proximal for batch in minibatches if batch.proximal is not None]
    found: dict[int, Float32Array] = {}
    for rank, values in enumerate(ranks.gather_floats(np.concatenate([np.zeros(0, np.float32), *mine]))):
        if values.size:
            indices = [index for minibatch in plan for index in minibatch[rank]]
            ends = np.cumsum([lengths[index] for index in indices])
            assert values.size == ends[-1], (rank, values.size, ends[-1])
            found |= dict(zip(indices, np.split(values, ends[:-1]), strict=True))
    return found


def _with_token_advantages(
    batch: Batch, outcomes: NDArray[np.float64], backend: TrainerBackend, config: AlgorithmConfig
) -> Batch:
    rewards = token_rewards(outcomes, batch.loss_mask, batch.boundaries)
    if config.kl.coef > 0 and config.kl.place is KlPlace.REWARD:
        rewards -= backend.kl_coef * _behaviour_kl(batch, config)
    values, bootstrap = np.zeros(batch.token_ids.size), np.zeros(batch.num_sequences)
    if find(config.name).critic:
        found, last = backend.values(batch)
        assert batch.truncated is not None, "whether sequences were cut is missing from the batch"
        values, bootstrap = found.astype(np.float64), np.where(batch.truncated, last, 0.0).astype(np.float64)
        batch = replace(batch, values=found)
    advantages, returns = gae(
        rewards=rewards,
        values=values,
        bootstrap=bootstrap,
        mask=batch.loss_mask,
        boundaries=batch.boundaries,
        config=config.gae,
    )
    return replace(batch, advantages=advantages.astype(np.float32), returns=returns.astype(np.float32))


def _behaviour_kl(batch: Batch, config: AlgorithmConfig) -> NDArray[np.float64]:
    """KL(behaviour || reference) of each trainable token [T]; 0 elsewhere and where a log-prob is not finite.

    The behaviour policy's, since it sampled the tokens: only of that policy is the estimate unbiased.
    """
    assert batch.reference is not None, "the reference's log-probs are missing from the batch"
    difference = batch.behaviour.astype(np.float64) - batch.reference
    counted = batch.loss_mask & np.isfinite(difference)
    estimate = bounded(torch.from_numpy(np.where(counted, difference, 0.0)), config.kl.estimator)
    return np.where(counted, estimate.numpy(), 0.0)


def _whitened(batches: Sequence[Batch], config: AlgorithmConfig, ranks: Peers) -> list[Batch]:
    """Advantages of trainable tokens normalised over all minibatches of all ranks."""
    parts = [batch.advantages[batch.loss_mask].astype(np.float64) for batch in batches]
    return [
        replace(batch, advantages=_placed(part, batch))
        for batch, part in zip(batches, whiten(parts, config.adv_norm, ranks.gather), strict=True)
    ]


def _placed(of_trainable: NDArray[np.float64], batch: Batch) -> NDArray[np.float32]:
    """Numbers of the trainable tokens at their places, 0 elsewhere. [N] -> [T]"""
    placed = np.zeros(batch.token_ids.size, dtype=np.float32)
    placed[batch.loss_mask] = of_trainable
    return placed


def _within_second_moment(batches: Sequence[Batch], threshold: float, ranks: Peers) -> list[Batch]:
    """Leave out the tokens whose policies differ most, until the mean square of the rest is below the threshold."""
    squares = [_squared_log_ratio(batch) for batch in batches]
    finite = [np.isfinite(square) for square in squares]
    known = [square[where] for square, where in zip(squares, finite, strict=True)]
    bound = second_moment_bound(np.concatenate([np.zeros(0, np.float32), *known]), threshold, ranks.gather)
    return [
        replace(batch, eligible=where & (square <= bound))
        for batch, square, where in zip(batches, squares, finite, strict=True)
    ]


def _squared_log_ratio(batch: Batch) -> NDArray[np.float32]:
    """``(behaviour - proximal)^2`` of trainable tokens, nan elsewhere; 0 where both policies say the same. [T]"""
    assert batch.proximal is not None, "recomputed proximal log-probs are missing from the batch"
    with np.errstate(invalid="ignore"):
        difference = np.where(batch.behaviour == batch.proximal, 0.0, batch.behaviour - batch.proximal)
    return np.where(batch.loss_mask, np.square(difference), np.nan).astype(np.float32)
