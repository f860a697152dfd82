"""KL to a reference model: direction, gradients in expectation, bounds, recorded numbers, and the controller."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.algorithms.kl import BOUND, adapted, bounded, estimate
from areal_hpc.config.algorithm import KlConfig, KlEstimator

CASES = json.loads((Path(__file__).parents[1] / "data" / "algorithms.json").read_text(encoding="utf-8"))
POLICY = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def test_estimates_agree_with_recorded_numbers() -> None:
    case = CASES["kl"]
    difference = torch.tensor(case["logprobs"], dtype=torch.float64) - torch.tensor(case["reference"]).double()
    for estimator in (KlEstimator.K1, KlEstimator.K3):
        assert bounded(difference, estimator).tolist() == pytest.approx(case[estimator], abs=1e-5)


def test_the_direction_is_from_the_policy_to_the_reference() -> None:
    exact = float((POLICY * (POLICY / REFERENCE).log()).sum())
    difference = POLICY.log() - REFERENCE.log()
    for estimator in (KlEstimator.K1, KlEstimator.K3):
        assert float((POLICY * bounded(difference, estimator)).sum()) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize(
    ("estimator", "direction"), [(KlEstimator.K1, None), (KlEstimator.K2, "forward"), (KlEstimator.K3, "backward")]
)
def test_as_a_loss_each_has_the_gradient_that_is_said_of_it(estimator: KlEstimator, direction: str | None) -> None:
    """Expected gradient over the policy's own samples, which are constants, against that of the exact divergence."""
    logits = POLICY.log().clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    expected_loss = (POLICY * bounded(logprobs - REFERENCE.log(), estimator)).sum()
    (found,) = torch.autograd.grad(expected_loss, logits, retain_graph=True)
    exact = {
        None: (logprobs * 0).sum(),
        "forward": (logprobs.exp() * (logprobs - REFERENCE.log())).sum(),
        "backward": (REFERENCE * (REFERENCE.log() - logprobs)).sum(),
    }[direction]
    (expected,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


@given(st.floats(-1e4, 1e4, width=32), st.sampled_from(list(KlEstimator)))
def test_one_token_counts_for_a_bounded_amount(difference: float, estimator: KlEstimator) -> None:
    d = torch.tensor([difference], requires_grad=True)
    value = bounded(d, estimator)
    (gradient,) = torch.autograd.grad(value.sum(), d)
    assert abs(value.item()) <= BOUND
    assert math.isfinite(gradient.item())
    if abs(difference) < 2:
        assert value.item() == pytest.approx(estimate(torch.tensor(difference).double(), estimator).item(), abs=1e-5)


@pytest.mark.parametrize("difference", [math.inf, -math.inf])
@pytest.mark.parametrize("estimator", KlEstimator)
def test_E6_an_impossible_token_has_a_finite_gradient(difference: float, estimator: KlEstimator) -> None:
    d = torch.tensor([difference], requires_grad=True)
    (gradient,) = torch.autograd.grad(bounded(d, estimator).sum(), d)
    assert gradient.item() == 0.0


def test_the_coefficient_follows_the_target() -> None:
    """Ziegler et al. 2019: proportional control in log space, errors clipped at a fifth, gain 0.1."""
    config = KlConfig(coef=0.1, target=0.5)
    assert adapted(0.1, 0.5, config) == pytest.approx(0.1)
    assert adapted(0.1, 0.55, config) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert adapted(0.1, 50.0, config) == pytest.approx(0.1 * (1 + 0.1 * 0.2))
    assert adapted(0.1, 0.0, config) == pytest.approx(0.1 * (1 - 0.1 * 0.2))
    assert adapted(0.1, math.nan, config) == 0.1
    assert adapted(0.1, 9.0, KlConfig(coef=0.1)) == 0.1
