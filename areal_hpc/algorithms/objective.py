"""What all policy losses have in common, so that a loss is one short function of ratios and advantages.

    loss = sum over all ranks and micro-batches of per_token.sum() / number of trainable tokens of the global batch

so the gradient depends neither on packing nor on how sequences fall on ranks. Rejected tokens are 0 in the sum and stay
in the divisor: rejecting never makes the remaining tokens louder.

    def surrogate(terms, config): ...                               one number for each token; statistics of its own
    def my_loss(inputs, config): return objective(inputs, config, surrogate)

``objective`` finds the proximal policy, rejects and weighs, keeps broken ratios out of loss and gradient, adds the KL
loss, and measures. Selection is by ``where``, at both ends: before ``exp`` for the gradient and on the loss for its
value, since 0 * inf and 0 * nan are nan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_hpc.algorithms.kl import bounded
from areal_hpc.algorithms.masking import Rejection, accept, log_difference, reject
from areal_hpc.algorithms.stats import Stats, fraction_of, max_of, mean_of, min_of
from areal_hpc.config.algorithm import AlgorithmConfig, KlPlace, ProximalMethod


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
    reference: Tensor | None = None  # float32 [T], by the frozen reference model; None where there is none
    eligible: Tensor | None = None  # bool [T], tokens that may be trained on; None is all trainable ones
    kl_coef: float = 0.0  # of this step


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Losses [T], 0 where masked or rejected, and statistics that add up (see ``stats``)."""

    per_token: Tensor
    stats: Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a surrogate sees: finite everywhere; what it says of tokens that are not ``trained`` is ignored."""

    log_ratio: Tensor  # [T], current - proximal, with gradient; 0 where not trained
    current: Tensor  # [T], log-probs with gradient; 0 where not trained
    advantages: Tensor  # [T], 0 where not trained
    trained: Tensor  # bool [T]
    segments: Tensor  # int64 [T]


Surrogate = Callable[[Terms, AlgorithmConfig], tuple[Tensor, Stats]]
"""Terms to losses [T] and the statistics that only this surrogate has."""


def objective(inputs: LossInputs, config: AlgorithmConfig, surrogate: Surrogate) -> LossOutput:
    """The surrogate's loss around the proximal policy, times the behaviour weight after rejection, plus the KL loss.

    The weight ``exp(proximal - behaviour)`` is detached (decoupled PPO, arXiv:2110.00641); it is 1 without
    ``config.decoupled``. A token whose ratio is not finite is left out and counted in ``nonfinite_fraction``.
    """
    proximal = proximal_logprobs(inputs, config.proximal)
    rejection = _rejection(inputs, proximal, config)
    log_ratio = inputs.current - proximal
    finite = log_ratio.isfinite() & log_ratio.detach().exp().isfinite()
    trained = rejection.kept & finite
    terms = Terms(
        log_ratio=torch.where(trained, log_ratio, 0.0),
        current=torch.where(trained, inputs.current, 0.0),
        advantages=torch.where(trained, inputs.advantages, 0.0),
        trained=trained,
        segments=inputs.segments,
    )
    loss, stats = surrogate(terms, config)
    divergence, kl_stats = _reference_kl(inputs, terms, config)
    if config.kl.place is KlPlace.LOSS and inputs.reference is not None:
        loss = loss + inputs.kl_coef * divergence
    stats = (
        rejection.stats
        | _policy_stats(inputs)
        | stats
        | kl_stats
        | {
            "nonfinite_fraction": fraction_of(~finite, inputs.mask),
            # KL(proximal || current) by the k3 estimator; its samples come from the proximal policy, near enough
            "approx_kl": mean_of(torch.expm1(terms.log_ratio) - terms.log_ratio, trained),
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
        case ProximalMethod.BEHAVIOUR:
            return inputs.behaviour.detach()


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
        eligible = inputs.mask if inputs.eligible is None else inputs.mask & inputs.eligible
        return accept(eligible, inputs.mask, inputs.current.dtype)
    return reject(
        proximal=proximal,
        behaviour=inputs.behaviour,
        mask=inputs.mask,
        segments=inputs.segments,
        config=config.rejection_sampling,
        eligible=inputs.eligible,
    )


def _reference_kl(inputs: LossInputs, terms: Terms, config: AlgorithmConfig) -> tuple[Tensor, Stats]:
    """KL(current || reference) on trained tokens [T], 0 elsewhere and where the reference's log-prob is not finite."""
    if inputs.reference is None:
        return torch.zeros_like(terms.current), {}
    comparable = terms.trained & inputs.reference.isfinite()
    difference = torch.where(comparable, terms.current - torch.where(comparable, inputs.reference, 0.0), 0.0)
    divergence = bounded(difference, config.kl.estimator)
    return divergence, {"reference_kl": mean_of(divergence, comparable)}


def _policy_stats(inputs: LossInputs) -> Stats:
    """How far what the trainer computes is from the behaviour policy, in log-probs and in versions.

    Where no proximal log-probs were computed, the current ones are what was: all else stands in for them, and is made
    of the behaviour policy's own.
    """
    computed = inputs.current.detach() if inputs.proximal is None else inputs.proximal
    gap = log_difference(computed, inputs.behaviour).abs()
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
