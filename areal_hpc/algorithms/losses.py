"""The menu of losses: each a short surrogate of importance ratios and advantages, in the frame of ``objective``.

With ``r = exp(current - proximal)`` on a token and A its advantage; what a loss does to a token whose policy has moved
too far is what tells them apart: clipped drops it, gspo drops its whole sequence, cispo bounds its weight and keeps its
gradient, sapo lets it fade.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from areal_hpc.algorithms.masking import aggregate
from areal_hpc.algorithms.objective import LossInputs, LossOutput, Terms, objective
from areal_hpc.algorithms.stats import Stats, fraction_of, mean_of
from areal_hpc.config.algorithm import Aggregation, AlgorithmConfig


def clipped_loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutput:
    """PPO's clipped objective around the proximal policy; see ``clipped``."""
    return objective(inputs, config, clipped)


def gspo_loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutput:
    """The clipped objective of whole sequences' ratios; see ``gspo``."""
    return objective(inputs, config, gspo)


def cispo_loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutput:
    """Weighted policy gradient with a clipped weight; see ``cispo``."""
    return objective(inputs, config, cispo)


def sapo_loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutput:
    """A soft gate in place of the clip; see ``sapo``."""
    return objective(inputs, config, sapo)


def sft_loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutput:
    """``-log pi`` of each token of a given answer: maximum likelihood, the cross-entropy of language modelling.

    No ratio and no advantage: the answers are taken to be right, whoever wrote them. The mean is over the tokens of the
    whole batch, so a long answer counts for more than a short one.
    """
    per_token = torch.where(inputs.mask, -inputs.current, 0.0)
    return LossOutput(per_token=per_token, stats={"logprob_mean": mean_of(inputs.current, inputs.mask)})


def clipped(terms: Terms, config: AlgorithmConfig) -> tuple[Tensor, Stats]:
    """``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` (PPO, arXiv:1707.06347; two bounds: DAPO,
    arXiv:2503.14476), and for A < 0 at most ``dual_clip * |A|`` (arXiv:1912.09729).
    """
    ratio = terms.log_ratio.exp()
    free = -terms.advantages * ratio
    bounded = -terms.advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(free, bounded)
    ceiling = torch.inf if config.dual_clip is None else config.dual_clip * terms.advantages.abs()
    dual_clipped = loss > ceiling  # never where A >= 0: the loss is at most 0 there
    return torch.where(dual_clipped, ceiling, loss), {
        "clip_fraction": fraction_of(bounded > free, terms.trained),
        "dual_clip_fraction": fraction_of(dual_clipped, terms.trained),
    }


def gspo(terms: Terms, config: AlgorithmConfig) -> tuple[Tensor, Stats]:
    """``clipped`` with the sequence's ratio ``exp(mean of current - proximal)`` on all its tokens (arXiv:2507.18071).

    The mean is over trained tokens, so a rejected token has no part in it. Ratios of sequences are much closer to 1
    than those of tokens: the bounds are smaller by orders of magnitude.
    """
    mean = aggregate(terms.log_ratio, terms.trained, terms.segments, Aggregation.MEAN)
    return clipped(replace(terms, log_ratio=mean), config)


def cispo(terms: Terms, config: AlgorithmConfig) -> tuple[Tensor, Stats]:
    """``-A log pi clip(r, 1 - clip_low, 1 + clip_high)``, the clipped ratio detached (MiniMax-M1, arXiv:2506.13585).

    Unlike under PPO's clip, a token beyond the bound keeps its gradient, at the bound's weight. ``clip_low`` of 1 is no
    lower bound, as in the paper.
    """
    ratio = terms.log_ratio.detach().exp()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -terms.advantages * weight * terms.current, {
        "clip_fraction": fraction_of(weight != ratio, terms.trained),
    }


def sapo(terms: Terms, config: AlgorithmConfig) -> tuple[Tensor, Stats]:
    """``-A (4 / tau) sigmoid(tau (r - 1))`` with tau by the sign of A (arXiv:2511.20347).

    The gradient is ``4 g (1 - g) r A`` of a policy gradient with ``g = sigmoid(tau (r - 1))``: all of it at r = 1,
    fading smoothly to both sides, faster where the advantage is negative. Its recipe measures r against the behaviour
    policy, so there is no other correction.
    """
    tau = torch.where(terms.advantages > 0, config.sapo_tau_positive, config.sapo_tau_negative)
    gate = torch.sigmoid(tau * (terms.log_ratio.exp() - 1))
    return -terms.advantages * (4 / tau) * gate, {"gate_mean": mean_of(4 * gate * (1 - gate), terms.trained)}


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """The critic's loss on each token, and where the clip decides it: float and bool [T].

    ``max((V - R)^2, (clip(V, V_before +- clip) - R)^2) / 2``: a value that has moved further than ``clip`` towards its
    return in this step has no gradient (PPO's reference implementation, arXiv:2005.12729 section 3).
    """
    moved = values - before
    free = (values - returns).square()
    bounded = (before + moved.clamp(-clip, clip) - returns).square()
    return torch.maximum(free, bounded) / 2, (moved.abs() > clip) & (bounded > free)  # nearer, they differ by rounding
