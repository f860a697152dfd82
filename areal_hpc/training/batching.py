"""From trajectories to what a rank holds: minibatches, shares of ranks, micro-batches, packed arrays. Pure, numpy only.

    plan = plan_step(lengths, generated, num_minibatches, num_ranks, seed)      # the same on every rank
    for shares in plan:                                                         # one optimizer update each
        batch = pack([trajectories[i] for i in shares[rank]], advantages[shares[rank]])
        for sequences in microbatches(batch.lengths, tokens_per_microbatch):    # one forward and backward each
            part = batch.select(sequences)

The loss is a mean over the trainable tokens of all ranks, so nothing here can change a gradient beyond rounding: it
decides who computes what. Only the minibatches matter to learning, and they do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from areal_hpc.routing import joined
from areal_hpc.types import Batch, StopReason, Trajectory

Scalar = TypeVar("Scalar", bound=np.generic)


def plan_step(
    lengths: ArrayLike,
    generated: ArrayLike,
    num_minibatches: int,
    num_ranks: int,
    seed: int,
    *,
    together: int = 1,
) -> list[list[list[int]]]:
    """Who trains on what: ``plan[minibatch][rank]`` holds indices of trajectories; a share may be empty.

    Args:
        lengths: tokens of each trajectory [N], prompt included; what ranks are balanced by.
        generated: trainable tokens of each trajectory [N]; what minibatches have in equal measure.
        seed: the order in which trajectories meet the optimizer; take another one for each step.
        together: so many trajectories in a row stay in one share, in their order: 2 for pairs.
    """
    lengths, generated = np.asarray(lengths, dtype=np.int64), np.asarray(generated, dtype=np.int64)
    assert lengths.shape == generated.shape and lengths.ndim == 1, (lengths.shape, generated.shape)
    if together > 1:
        lengths, generated = (of.reshape(-1, together).sum(axis=1) for of in (lengths, generated))
        plan = plan_step(lengths, generated, num_minibatches, num_ranks, seed)
        return [[spread(share, together) for share in minibatch] for minibatch in plan]
    assert num_minibatches > 0 and num_ranks > 0, (num_minibatches, num_ranks)
    order = np.random.default_rng(seed).permutation(lengths.size)
    # Trajectories without a trainable token are dealt last: otherwise chance could fill a minibatch with them alone.
    order = order[np.argsort(generated[order] == 0, kind="stable")]
    return [_balance(np.sort(order[m::num_minibatches]), lengths, num_ranks) for m in range(num_minibatches)]


def spread(units: Sequence[int], together: int) -> list[int]:
    """The members of units of ``together`` in a row each: unit u has u * together and those after it."""
    return [unit * together + member for unit in units for member in range(together)]


def _balance(indices: NDArray[np.int64], lengths: NDArray[np.int64], num_ranks: int) -> list[list[int]]:
    """Longest first to the rank with the fewest tokens: the largest share is at most 4/3 of the best (Graham 1969)."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = np.zeros(num_ranks, dtype=np.int64)
    for index in indices[np.argsort(-lengths[indices], kind="stable")]:
        rank = int(loads.argmin())
        shares[rank].append(int(index))
        loads[rank] += lengths[index]
    return [sorted(share) for share in shares]


def microbatches(lengths: ArrayLike, tokens_per_microbatch: int, *, padded: bool = False) -> list[list[int]]:
    """Sequences grouped by first-fit decreasing so that no group holds more than ``tokens_per_microbatch`` tokens.

    A sequence longer than that is a group of its own. With ``padded`` each sequence counts as much as the longest of
    its group, which is what rows of one width cost.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    groups: list[list[int]] = []
    room: list[int] = []
    for index in np.argsort(-sizes, kind="stable"):
        for group, free in enumerate(room):
            cost = int(sizes[groups[group][0]] if padded else sizes[index])
            if cost <= free:
                groups[group].append(int(index))
                room[group] -= cost
                break
        else:
            groups.append([int(index)])
            room.append(tokens_per_microbatch - int(sizes[index]))
    return groups


def pack(trajectories: Sequence[Trajectory], advantages: ArrayLike) -> Batch:
    """Flat arrays of the trajectories, one after the other; ``advantages`` [N] holds one number for each of them.

    A token that this run did not sample gets advantage 0.
    """
    per_sequence = np.asarray(advantages, dtype=np.float32)
    assert per_sequence.shape == (len(trajectories),), (per_sequence.shape, len(trajectories))
    lengths = [t.token_ids.size for t in trajectories]
    loss_mask = _concatenate([t.loss_mask for t in trajectories], np.bool_)
    return Batch(
        token_ids=_concatenate([t.token_ids for t in trajectories], np.int32),
        loss_mask=loss_mask,
        behaviour=_concatenate([t.logprobs for t in trajectories], np.float32),
        versions=_concatenate([t.versions for t in trajectories], np.int32),
        advantages=np.where(loss_mask, np.repeat(per_sequence, lengths), np.float32(0)),
        boundaries=np.cumsum([0, *lengths], dtype=np.int32),
        truncated=np.array([t.stop is StopReason.LENGTH for t in trajectories], dtype=np.bool_),
        experts=joined([t.experts for t in trajectories], lengths),
    )


def _concatenate(arrays: Sequence[NDArray[Scalar]], dtype: type[Scalar]) -> NDArray[Scalar]:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)
