"""How far the policy is from a frozen reference: estimators on sampled tokens, and the controller of the coefficient.

With d = log-prob policy - reference on tokens that the policy sampled, the estimates of KL(policy || reference) are
k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (J. Schulman, "Approximating KL divergence", 2020).

As a *reward*, k1 is the unbiased one. As a *loss* its gradient has mean 0 and holds nothing; k2 has the gradient of
KL(policy || reference), k3 that of KL(reference || policy) (arXiv:2510.01555).
"""

from __future__ import annotations

import math

from torch import Tensor, expm1

from areal_hpc.config.algorithm import KlConfig, KlEstimator

BOUND = 10.0
"""Nats that one token may count for: a token that one of the two rules out must not drown all others."""
MAX_CHANGE = 0.2


def estimate(difference: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimate on each token, from d = log-prob policy - reference. [T] -> [T]"""
    match estimator:
        case KlEstimator.K1:
            return difference
        case KlEstimator.K2:
            return difference.square() / 2
        case KlEstimator.K3:
            return expm1(-difference) + difference


def bounded(difference: Tensor, estimator: KlEstimator) -> Tensor:
    """``estimate`` within +-``BOUND``; value and gradient are finite for any d but nan. [T] -> [T]"""
    # d is clamped as well: beyond twice the bound exp overflows, and 0 * inf is nan in the gradient.
    return estimate(difference.clamp(-2 * BOUND, 2 * BOUND), estimator).clamp(-BOUND, BOUND)


def adapted(coef: float, measured: float, config: KlConfig) -> float:
    """The next step's coefficient: larger while ``measured`` (nats per token) is above ``config.target``.

    ``coef (1 + clip(measured / target - 1, +-0.2) / horizon)`` (arXiv:1909.08593, section 2.2, where horizon is 10).
    As it was where there is no target, or where nothing was measured (nan).
    """
    if config.target is None or math.isnan(measured):
        return coef
    error = min(max(measured / config.target - 1, -MAX_CHANGE), MAX_CHANGE)
    return coef * (1 + error / config.horizon)
