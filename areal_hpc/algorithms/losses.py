"""Policy losses, token by token. The backend sums them over the whole global batch and divides once.

    loss = sum over all ranks and micro-batches of per_token.sum() / number of trainable tokens of the global batch

so the gradient depends neither on packing nor on how sequences fall on ranks. Rejected tokens are 0 in the sum and stay
in the divisor: rejecting never makes the remaining tokens louder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_hpc.algorithms.masking import Rejection, accept, log_difference, reject
from areal_hpc.algorithms.stats import Stats, fraction_of, max_of, mean_of, min_of
from areal_hpc.config.algorithm import AlgorithmConfig, ProximalMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch of whole sequences, flat; index t is the same token everywhere."""

    current: Tensor  # float32 [T], log-probs with gradient
    proximal: Tensor | None  # float32 [T], by the weights at the start of the step; None unless recomputed
    behaviour: Tensor  # float32 [T], by the policy that sampled
    advantages: Tensor  # float32 [T]
    mask: Tensor  # bool [T], the trainable tokens
    segments: Tensor  # int64 [T], which sequence of the micro-batch, 0 or more
    versions: Tensor  # int [T], the weights that sampled each token; negative where nobody did
    version_now: int  # the version that this step makes: its proximal policy is version_now - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Losses [T], 0 where masked or rejected, and statistics that add up (see ``stats``)."""

    per_token: Tensor
    stats: Stats


def clipped_loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutput:
    """PPO's clipped objective around the proximal policy, weighted by how likely the behaviour policy was to differ.

    With ``r = exp(current - proximal)``: ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` (PPO,
    arXiv:1707.06347; two bounds: DAPO, arXiv:2503.14476); for A < 0 at most ``dual_clip * |A|`` (arXiv:1912.09729);
    times the detached ``exp(proximal - behaviour)`` after rejection (decoupled PPO, arXiv:2110.00641).

    A token whose ratio is not finite is left out and counted in ``nonfinite_fraction``. Selection is by ``where``, at
    both ends: before ``exp`` for the gradient and on the loss for its value, since 0 * inf and 0 * nan are nan.
    """
    proximal = proximal_logprobs(inputs, config.proximal)
    rejection = _rejection(inputs, proximal, config)
    log_ratio = inputs.current - proximal
    finite = log_ratio.isfinite() & log_ratio.detach().exp().isfinite()
    trained = rejection.kept & finite
    log_ratio = torch.where(trained, log_ratio, 0.0)
    ratio = log_ratio.exp()

    free = -inputs.advantages * ratio
    bounded = -inputs.advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(free, bounded)
    ceiling = torch.inf if config.dual_clip is None else config.dual_clip * inputs.advantages.abs()
    dual_clipped = loss > ceiling  # never where A >= 0: the loss is at most 0 there
    loss = torch.where(dual_clipped, ceiling, loss)

    stats = (
        rejection.stats
        | _policy_stats(inputs, proximal)
        | {
            "clip_fraction": fraction_of(bounded > free, trained),
            "dual_clip_fraction": fraction_of(dual_clipped, trained),
            "nonfinite_fraction": fraction_of(~finite, inputs.mask),
            # KL(proximal || current) by the k3 estimator; its samples come from the proximal policy, near enough
            "approx_kl": mean_of(torch.expm1(log_ratio) - log_ratio, trained),
        }
    )
    return LossOutput(per_token=torch.where(trained, loss * rejection.weight, 0.0), stats=stats)


def proximal_logprobs(inputs: LossInputs, method: ProximalMethod) -> Tensor:
    """The proximal policy's log-probs [T], detached, by the configured method."""
    match method:
        case ProximalMethod.RECOMPUTE:
            assert inputs.proximal is not None, "recomputed proximal log-probs are missing from the batch"
            return inputs.proximal.detach()
        case ProximalMethod.LOGLINEAR:
            return loglinear_proximal(inputs.current, inputs.behaviour, inputs.versions, inputs.version_now)
        case ProximalMethod.REUSE:
            return inputs.current.detach()


def loglinear_proximal(current: Tensor, behaviour: Tensor, versions: Tensor, version_now: int) -> Tensor:
    """Proximal log-probs [T] without a forward: between behaviour and current in proportion to their versions.

    ``behaviour + alpha (current - behaviour)`` with ``alpha = (version_now - 1 - v) / (version_now - v)`` in [0, 1];
    a token of the newest weights, or of none, keeps its behaviour log-prob.
    """
    current = current.detach()
    age = (version_now - versions).clamp(min=1)  # at least 1: then alpha is at least 0
    alpha = torch.where(versions < 0, 0.0, (age - 1) / age)
    return torch.where(alpha > 0, behaviour + alpha * (current - behaviour), behaviour)


def _rejection(inputs: LossInputs, proximal: Tensor, config: AlgorithmConfig) -> Rejection:
    if not config.decoupled:
        return accept(inputs.mask, inputs.current.dtype)
    return reject(
        proximal=proximal,
        behaviour=inputs.behaviour,
        mask=inputs.mask,
        segments=inputs.segments,
        config=config.rejection_sampling,
    )


def _policy_stats(inputs: LossInputs, proximal: Tensor) -> Stats:
    """How far proximal and behaviour policy are apart, in log-probs and in versions."""
    gap = log_difference(proximal, inputs.behaviour).abs()
    comparable = inputs.mask & gap.isfinite()
    sampled = inputs.mask & (inputs.versions >= 0)
    staleness = (inputs.version_now - 1 - inputs.versions).float()
    return {
        "logprob_gap": mean_of(gap, comparable),
        "logprob_gap_max": max_of(gap, comparable),
        "staleness_mean": mean_of(staleness, sampled),
        "staleness_min": min_of(staleness, sampled),
        "staleness_max": max_of(staleness, sampled),
    }
