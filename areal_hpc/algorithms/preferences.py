"""Losses of pairs: a better and a worse answer to one prompt. Each is a short function of the pairs' margins.

    margins [P] -> losses [P], of which the step's loss is the mean over the pairs of all ranks

What a margin is tells the algorithms apart: for DPO how much more the policy prefers the better answer than the
reference does, in nats; for a reward model the difference of two scores.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from areal_hpc.algorithms.stats import Stats, fraction_of, mean_of
from areal_hpc.config.algorithm import AlgorithmConfig, PreferenceLoss

PairLoss = Callable[[Tensor, AlgorithmConfig], Tensor]
"""Margins [P] to losses [P]."""


def dpo_loss(margins: Tensor, config: AlgorithmConfig) -> Tensor:
    """``-log sigmoid(beta m)`` (DPO, arXiv:2305.18290, equation 7), or ``(m - 1 / (2 beta))^2`` (IPO,
    arXiv:2310.12036, equation 17).

    The first never has enough of a margin, so that preferences without noise drive the policy away from the reference
    whatever beta; the second stops at ``1 / (2 beta)``. Both are of whole answers: sums over tokens, not means.
    """
    beta = config.dpo.beta
    match config.dpo.loss:
        case PreferenceLoss.SIGMOID:
            return -logsigmoid(beta * margins)
        case PreferenceLoss.IPO:
            return (margins - 1 / (2 * beta)).square()


def bradley_terry_loss(margins: Tensor, config: AlgorithmConfig) -> Tensor:
    """``-log sigmoid(score of the better - score of the worse)`` (arXiv:2203.02155, equation 1, for one pair).

    Scores have a scale, which is that of log-odds, and no origin: adding a number to all of them changes nothing.
    """
    return -logsigmoid(margins)


def policy_margins(current: Tensor, reference: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """``log pi(better) - log ref(better) - (log pi(worse) - log ref(worse))`` of each pair. float64 [P]

    Args:
        current: float [T], log-probs with gradient.
        reference: float [T], by the frozen model.
        mask: bool [T], the answers' tokens.
        segments: int64 [T], sequence 2 p is pair p's better answer, sequence 2 p + 1 the worse.
    """
    difference = torch.where(mask, current.double() - reference.double(), 0.0)
    sequences = int(segments[-1]) + 1
    sums = difference.new_zeros(sequences).index_add(0, segments, difference)
    return pair_margins(sums)


def pair_margins(of_sequences: Tensor) -> Tensor:
    """Better minus worse, from one number for each sequence. [2 P] -> [P]"""
    better, worse = of_sequences.view(-1, 2).unbind(dim=1)
    return better - worse


def pair_stats(margins: Tensor, losses: Tensor) -> Stats:
    """The loss, how often the better answer is preferred (a tie is not), and by how much on average."""
    every = torch.ones_like(margins, dtype=torch.bool)
    return {
        "loss": mean_of(losses, every),
        "accuracy": fraction_of(margins > 0, every),
        "margin": mean_of(margins, every),
    }
