"""What every trainer backend does around its own forward and backward: divisors, loss inputs, statistics, the account.

    totals = sums([batch.num_trainable for batch in minibatches], ranks)
    divisors = loss_divisors(minibatches, totals, algorithm, ranks)
    stats, norms = each_update(minibatches, totals, divisors, update)
    stats = account(reduced(stats, ranks), norms, totals, lr)

``ranks`` are those among which sequences are dealt, for ``reduced`` also those that computed the same and tell nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_hpc.algorithms.objective import LossInputs, LossOutput
from areal_hpc.algorithms.preferences import pair_stats, policy_margins
from areal_hpc.algorithms.stats import Stats, finish, mean_of, merge
from areal_hpc.algorithms.table import LossFunction, find
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.training.forward import sequence_of_token
from areal_hpc.training.gap import FRESH, FRESH_MAX, fresh_gap
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import Batch


def sums(numbers: Sequence[int], ranks: Ranks) -> list[int]:
    """Each number summed over the ranks."""
    return [sum(of_ranks) for of_ranks in zip(*ranks.gather(list(numbers)), strict=True)]


def loss_divisors(
    minibatches: Sequence[Batch], totals: Sequence[int], algorithm: AlgorithmConfig, ranks: Ranks
) -> list[int]:
    """What the sum of each minibatch's losses is divided by: its trainable tokens, on all ranks; or a constant for each
    trajectory, so that a token weighs no less in a step of long answers (Dr. GRPO, arXiv:2503.20783); or its pairs.
    """
    if find(algorithm.name).pair_loss is not None:
        return sums([batch.num_sequences // 2 for batch in minibatches], ranks)
    if algorithm.length_normaliser == 0:
        return list(totals)
    sequences = sums([batch.num_sequences for batch in minibatches], ranks)
    return [count * algorithm.length_normaliser for count in sequences]


def each_update(
    minibatches: Sequence[Batch],
    totals: Sequence[int],
    divisors: Sequence[int],
    update: Callable[[Batch, int], tuple[list[Stats], float]],
) -> tuple[list[Stats], list[float]]:
    """One optimizer update for each minibatch that has a trainable token on some rank.

    Args:
        update: takes a minibatch and what the sum of its losses is divided by; answers with the statistics of this
            rank's micro-batches and the gradient's norm, and leaves the weights alone where that is not finite.
    """
    stats: list[Stats] = []
    norms: list[float] = []
    for batch, total, divisor in zip(minibatches, totals, divisors, strict=True):
        if total > 0:
            found, norm = update(batch, divisor)
            stats += found
            norms.append(norm)
    return stats, norms


def loss_inputs(batch: Batch, logprobs: Tensor, *, version_now: int, kl_coef: float) -> LossInputs:
    """The micro-batch on the device of its trainable tokens' current ``logprobs`` [N]."""

    def tensor(array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(logprobs.device)

    def tensor_or_none(array: np.ndarray[Any, Any] | None) -> Tensor | None:
        return None if array is None else tensor(array)

    mask = tensor(batch.loss_mask)
    return LossInputs(
        current=logprobs.new_zeros(mask.shape).masked_scatter(mask, logprobs),
        proximal=tensor_or_none(batch.proximal),
        behaviour=tensor(batch.behaviour),
        advantages=tensor(batch.advantages),
        mask=mask,
        segments=tensor(sequence_of_token(batch)),
        versions=tensor(batch.versions),
        version_now=version_now,
        reference=tensor_or_none(batch.reference),
        eligible=tensor_or_none(batch.eligible),
        kl_coef=kl_coef,
    )


def token_losses(
    batch: Batch,
    logprobs: Tensor,
    entropy: Tensor,
    loss: LossFunction,
    algorithm: AlgorithmConfig,
    *,
    version_now: int,
    kl_coef: float,
) -> tuple[Tensor, Stats]:
    """The losses of a micro-batch with gradient, one for each token, and their statistics.

    Args:
        logprobs: float32 [N], of the trainable tokens.
        entropy: float32 [N], of the distributions that these come from.
    """
    inputs = loss_inputs(batch, logprobs, version_now=version_now, kl_coef=kl_coef)
    output = loss(inputs, algorithm)
    return output.per_token, microbatch_stats(output, inputs.mask, entropy) | fresh_gap(batch, version_now)


def pair_losses(margins: Tensor, algorithm: AlgorithmConfig) -> tuple[Tensor, Stats]:
    """The losses of a micro-batch of pairs, one for each pair, and their statistics."""
    pair_loss = find(algorithm.name).pair_loss
    assert pair_loss is not None, f"{algorithm.name} is not of pairs"
    losses = pair_loss(margins, algorithm)
    return losses, pair_stats(margins.detach(), losses)


def answer_margins(batch: Batch, logprobs: Tensor) -> Tensor:
    """How much more the policy prefers the better answer of each pair than its reference does. float64 [P]

    Args:
        logprobs: float32 [N], of the trainable tokens.
    """
    assert batch.reference is not None, "the reference's log-probs are missing from the batch"
    mask, reference, segments = (
        torch.from_numpy(array).to(logprobs.device)
        for array in (batch.loss_mask, batch.reference, sequence_of_token(batch))
    )
    current = logprobs.new_zeros(mask.shape).masked_scatter(mask, logprobs)
    return policy_margins(current=current, reference=reference, mask=mask, segments=segments)


def microbatch_stats(output: LossOutput, mask: Tensor, entropy: Tensor) -> Stats:
    """Statistics of one micro-batch; ``entropy`` [N] is that of the trainable tokens."""
    return {
        **output.stats,
        "loss": mean_of(output.per_token, mask),
        "entropy": mean_of(entropy, torch.ones_like(entropy, dtype=torch.bool)),
    }


def reduced(parts: Sequence[Stats], ranks: Ranks) -> dict[str, float]:
    """Statistics over all micro-batches of all ranks; a rank without any has no names to offer."""
    local = {name: (float(first), int(count)) for name, (first, count) in merge(parts).items()}
    told = [
        {name: (torch.tensor(first), torch.tensor(count)) for name, (first, count) in stats.items()}
        for stats in ranks.gather(local)
        if stats
    ]
    return finish(merge(told))


def account(told: Mapping[str, float], norms: Sequence[float], totals: Sequence[int], lr: float) -> dict[str, float]:
    """What a step tells, and what became of its minibatches; the loss is NaN where nothing was trained on.

    Args:
        told: statistics of the losses, from ``reduced``.
        norms: of each update's gradient; one that is not finite was not applied.
        totals: trainable tokens of each minibatch on all ranks; those with none had no update.
    """
    applied = [norm for norm in norms if math.isfinite(norm)]
    # With staleness most steps have no fresh token.
    measured = {name: value for name, value in told.items() if name not in (FRESH, FRESH_MAX) or not math.isnan(value)}
    return {
        "loss": math.nan,
        **measured,
        "lr": lr,
        "grad_norm": sum(applied) / len(applied) if applied else math.nan,
        "trainable_tokens": float(sum(totals)),
        "updates": float(len(applied)),
        "skipped_nonfinite": float(len(norms) - len(applied)),
        "skipped_empty": float(len(totals) - len(norms)),
    }
