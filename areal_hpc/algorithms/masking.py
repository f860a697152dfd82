"""Rejection sampling: which off-policy tokens are trained on, and with what weight.

The behaviour policy that sampled a token is not the proximal policy that the step starts from: it is older, and an
engine computes with other kernels. ``d = log-prob proximal - behaviour`` measures the difference on the sampled token,
a metric of d is compared with a band, and what falls outside is left out of the loss or has its weight clamped.

IcePop (arXiv:2510.18855): token, mask, ratio, 0.5 to 5.0. KPop: token, mask, binary_kl, up to 2.0.
Everything here is detached: weights and masks are constants of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_hpc.algorithms.kl import estimate
from areal_hpc.algorithms.stats import Stats, fraction_of, max_of, mean_of
from areal_hpc.config.algorithm import (
    Aggregation,
    KlEstimator,
    Metric,
    RejectionAction,
    RejectionConfig,
    RejectionLevel,
)

CERTAIN = -(2.0**-24)
"""The largest log-prob that means what it says: float32 log-softmax rounds 1 - p away where it is below 2^-24."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """What the loss needs: tokens to train on and their behaviour weight, 0 where not kept."""

    kept: Tensor  # bool [T]
    weight: Tensor  # float [T], detached
    stats: Stats


def reject(
    *,
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    segments: Tensor,
    config: RejectionConfig,
    eligible: Tensor | None = None,
) -> Rejection:
    """Keep the trainable tokens whose metric lies in [lower, upper], both ends included.

    The weight is the importance ratio ``exp(d)`` of the token; with metric ratio at level sequence it is the
    sequence's ratio on all its tokens. A token whose d is not finite is never kept and never counts in its sequence;
    two equal log-probs differ by 0, even where both are -inf.

    Args:
        proximal, behaviour: float [T], log-probs of the sampled tokens.
        mask: bool [T], the trainable tokens.
        segments: int64 [T], which sequence (0 or more) a token belongs to; sequences must be whole.
        config: one that ``algorithm_checks.check_rejection`` accepts.
        eligible: bool [T], tokens that somebody else has not left out already; None is all. Others count as rejected.
    """
    proximal, behaviour = proximal.detach(), behaviour.detach()
    difference = log_difference(proximal, behaviour)  # [T]
    judged = (mask if eligible is None else mask & eligible) & difference.isfinite()
    weight = difference.exp()
    metric = weight if config.metric is Metric.RATIO else kl_divergence(config.metric, proximal, behaviour)
    if config.level is RejectionLevel.SEQUENCE and config.metric is Metric.RATIO:
        # In log space: the mean is the geometric mean, the sum is the ratio of whole sequences.
        weight = metric = aggregate(difference, judged, segments, config.agg).exp()
    elif config.level is RejectionLevel.SEQUENCE:
        metric = aggregate(metric, judged, segments, config.agg)
    inside = judged & _in_band(metric, config.lower, config.upper)
    kept = inside
    if config.action is RejectionAction.CLAMP:
        weight, kept = weight.clamp(config.lower, config.upper), judged
    return _rejection(kept & weight.isfinite(), weight, mask, inside)


def accept(eligible: Tensor, mask: Tensor, dtype: torch.dtype = torch.float32) -> Rejection:
    """Every eligible one of the trainable tokens with weight 1: no correction."""
    return _rejection(eligible, torch.ones(mask.shape, dtype=dtype, device=mask.device), mask, eligible)


def log_difference(first: Tensor, second: Tensor) -> Tensor:
    """``first - second`` [T]; 0 where they are equal, which subtraction denies of two infinities. Not for gradients."""
    return torch.where(first == second, 0.0, first - second)


def kl_divergence(metric: Metric, proximal: Tensor, behaviour: Tensor) -> Tensor:
    """The KL metric of each token [T].

    k1, k2, k3 are those of ``kl.estimate`` on d = proximal - behaviour: estimates of KL(proximal || behaviour) in form,
    although the tokens come from the behaviour policy. binary_kl: see ``binary_kl``.
    """
    difference = log_difference(proximal, behaviour)
    match metric:
        case Metric.KL_K1:
            return estimate(difference, KlEstimator.K1)
        case Metric.KL_K2:
            return estimate(difference, KlEstimator.K2)
        case Metric.KL_K3:
            return estimate(difference, KlEstimator.K3)
        case Metric.BINARY_KL:
            return torch.maximum(binary_kl(proximal, behaviour), binary_kl(behaviour, proximal))
        case Metric.RATIO:
            raise AssertionError("the ratio is no divergence")


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) [T] where each token is an event of two outcomes, chosen or not: ``p = exp(log_p)``.

    ``p (log p - log q) + (1 - p) (log(1 - p) - log(1 - q))``. The complement comes from the log-prob itself (expm1),
    since float32 has lost it in p already; a log-prob of 0.0 counts as ``CERTAIN``.
    """
    log_p, log_q = log_p.clamp(max=CERTAIN), log_q.clamp(max=CERTAIN)
    other_p, other_q = -torch.expm1(log_p), -torch.expm1(log_q)
    chosen = log_p.exp() * log_difference(log_p, log_q)
    chosen = torch.where(log_p.isneginf(), 0.0, chosen)  # the limit of p log p
    return chosen + other_p * (other_p.log() - other_q.log())


def aggregate(values: Tensor, judged: Tensor, segments: Tensor, how: Aggregation) -> Tensor:
    """One number for each sequence from its judged tokens, given back to every token of it. [T] -> [T]"""
    num_segments = int(segments.max()) + 1 if segments.numel() else 0
    if how is Aggregation.MAX:
        lowest = values.new_full((num_segments,), -torch.inf)
        chosen = torch.where(judged, values, -torch.inf)
        return lowest.scatter_reduce(0, segments, chosen, "amax")[segments]
    zeros = values.new_zeros(num_segments)
    total = zeros.index_add(0, segments, torch.where(judged, values, 0.0))
    if how is Aggregation.MEAN:
        total = total / zeros.index_add(0, segments, judged.to(values.dtype)).clamp(min=1)
    return total[segments]


def _in_band(metric: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """Where lower <= metric <= upper; nan is in no band. bool [T]"""
    low = -torch.inf if lower is None else lower
    high = torch.inf if upper is None else upper
    return (metric >= low) & (metric <= high)


def _rejection(kept: Tensor, weight: Tensor, mask: Tensor, inside: Tensor) -> Rejection:
    weight = torch.where(kept, weight, 0.0)
    stats = {
        "kept_fraction": fraction_of(kept, mask),
        "outside_fraction": fraction_of(~inside, mask),
        "behaviour_weight": mean_of(weight, kept),
        "behaviour_weight_max": max_of(weight, kept),
    }
    return Rejection(kept=kept, weight=weight, stats=stats)
