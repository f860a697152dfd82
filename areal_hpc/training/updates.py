"""What every trainer backend does around its own forward and backward: divisors, loss inputs, statistics, the account.

    totals = sums([batch.num_trainable for batch in minibatches], ranks)
    divisors = loss_divisors(minibatches, totals, algorithm, ranks)
    for each minibatch                      sum of token losses / divisor -> gradient -> update, if its norm is finite
    stats = account(reduced(...), norms, totals, lr)

``ranks`` are those among which sequences are dealt, for ``reduced`` also those that computed the same and tell nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_hpc.algorithms.objective import LossInputs, LossOutput
from areal_hpc.algorithms.stats import Stats, finish, mean_of, merge
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.training.forward import sequence_of_token
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import Batch


def sums(numbers: Sequence[int], ranks: Ranks) -> list[int]:
    """Each number summed over the ranks."""
    return [sum(of_ranks) for of_ranks in zip(*ranks.gather(list(numbers)), strict=True)]


def loss_divisors(
    minibatches: Sequence[Batch], totals: Sequence[int], algorithm: AlgorithmConfig, ranks: Ranks
) -> list[int]:
    """What the sum of each minibatch's token losses is divided by: its trainable tokens, or a constant for each
    trajectory, so that a long answer does not weigh less token by token (Dr. GRPO, arXiv:2503.20783).
    """
    if algorithm.length_normaliser == 0:
        return list(totals)
    sequences = sums([batch.num_sequences for batch in minibatches], ranks)
    return [count * algorithm.length_normaliser for count in sequences]


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
    return {
        "loss": math.nan,
        **told,
        "lr": lr,
        "grad_norm": sum(applied) / len(applied) if applied else math.nan,
        "trainable_tokens": float(sum(totals)),
        "updates": float(len(applied)),
        "skipped_nonfinite": float(len(norms) - len(applied)),
        "skipped_empty": float(len(totals) - len(norms)),
    }
