"""Losses of pairs against float64 references written from the papers, and what must hold of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.algorithms.losses import sft_loss
from areal_hpc.algorithms.objective import LossInputs
from areal_hpc.algorithms.preferences import (
    bradley_terry_loss,
    dpo_loss,
    pair_margins,
    pair_stats,
    policy_margins,
)
from areal_hpc.algorithms.stats import finish
from areal_hpc.config.algorithm import AlgorithmConfig, DpoConfig, PreferenceLoss

MARGINS = st.lists(st.floats(-60, 60), min_size=1, max_size=8)


def dpo(beta: float, loss: PreferenceLoss = PreferenceLoss.SIGMOID) -> AlgorithmConfig:
    return AlgorithmConfig(name="dpo", dpo=DpoConfig(beta=beta, loss=loss))


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@given(margins=MARGINS, beta=st.floats(0.01, 2.0))
def test_sigmoid_is_the_papers_loss_and_gradient(margins: list[float], beta: float) -> None:
    """The gradient weighs a pair by how wrong it is: -beta sigmoid(-beta m) (equation below 7)."""
    found = tensor(margins)
    losses = dpo_loss(found, dpo(beta))
    np.testing.assert_allclose(losses.detach(), [math.log1p(math.exp(-beta * m)) for m in margins], rtol=1e-9)
    losses.sum().backward()
    assert found.grad is not None
    np.testing.assert_allclose(found.grad, [-beta / (1 + math.exp(beta * m)) for m in margins], rtol=1e-9)


@given(margins=MARGINS, beta=st.floats(0.01, 2.0))
def test_ipo_wants_one_margin_and_no_more(margins: list[float], beta: float) -> None:
    found = tensor(margins)
    losses = dpo_loss(found, dpo(beta, PreferenceLoss.IPO))
    np.testing.assert_allclose(losses.detach(), [(m - 0.5 / beta) ** 2 for m in margins], rtol=1e-9)
    at_goal = tensor([0.5 / beta])
    dpo_loss(at_goal, dpo(beta, PreferenceLoss.IPO)).sum().backward()
    assert at_goal.grad is not None
    assert float(at_goal.grad) == 0.0


@given(margins=MARGINS)
def test_bradley_terry_is_the_log_likelihood_of_the_choice(margins: list[float]) -> None:
    losses = bradley_terry_loss(torch.tensor(margins, dtype=torch.float64), AlgorithmConfig(name="reward_model"))
    np.testing.assert_allclose(losses, [-math.log(1 / (1 + math.exp(-m))) for m in margins], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("margin", [-1e4, -1e30, 1e4, 1e30])
def test_E6_no_margin_is_too_large(margin: float) -> None:
    for loss in (lambda m: dpo_loss(m, dpo(0.1)), lambda m: bradley_terry_loss(m, AlgorithmConfig())):
        found = tensor([margin])
        value = loss(found).sum()
        value.backward()
        assert value.isfinite()
        assert found.grad is not None
        assert found.grad.isfinite().all()


def of_pairs() -> dict[str, Any]:
    """Two pairs of answers of different lengths, each after a prompt."""
    generator = np.random.default_rng(0)
    lengths = [5, 9, 4, 7]
    mask = np.concatenate([np.arange(n) >= 2 for n in lengths])
    return {
        "current": torch.from_numpy(generator.uniform(-5, 0, mask.size).astype(np.float32)),
        "reference": torch.from_numpy(generator.uniform(-5, 0, mask.size).astype(np.float32)),
        "mask": torch.from_numpy(mask),
        "segments": torch.from_numpy(np.repeat(np.arange(4), lengths)),
    }


def test_a_margin_is_the_difference_of_two_log_ratios() -> None:
    given = of_pairs()
    current, reference, mask, segments = (np.asarray(value) for value in given.values())
    ratios = [
        sum(float(current[t]) - float(reference[t]) for t in np.flatnonzero(mask & (segments == s))) for s in range(4)
    ]
    np.testing.assert_allclose(policy_margins(**given), [ratios[0] - ratios[1], ratios[2] - ratios[3]], rtol=1e-12)


def test_a_policy_that_is_its_reference_has_no_preference() -> None:
    given = of_pairs()
    margins = policy_margins(**{**given, "reference": given["current"]})
    assert margins.tolist() == [0.0, 0.0]
    stats = finish(pair_stats(margins, dpo_loss(margins, dpo(0.1))))
    assert stats == {"loss": pytest.approx(math.log(2)), "accuracy": 0.0, "margin": 0.0}  # a tie is no preference


def test_E5_what_is_masked_may_be_anything() -> None:
    given = of_pairs()
    expected = policy_margins(**given)
    current = torch.where(given["mask"], given["current"], torch.nan).requires_grad_()
    found = policy_margins(**{**given, "current": current})
    torch.testing.assert_close(found.detach(), expected)
    found.sum().backward()
    assert current.grad is not None
    assert torch.equal(current.grad[~given["mask"]], torch.zeros(int((~given["mask"]).sum())))
    assert current.grad[given["mask"]].abs().tolist() == [1.0] * int(given["mask"].sum())


def test_scores_have_no_origin() -> None:
    scores = torch.tensor([1.0, -2.0, 0.5, 0.25])
    assert torch.equal(pair_margins(scores), pair_margins(scores + 8))
    assert pair_margins(scores).tolist() == [3.0, 0.25]


def test_sft_is_minus_the_log_prob_and_nothing_where_masked() -> None:
    mask = torch.tensor([False, True, True])
    current = torch.tensor([0.0, -1.5, -0.5], requires_grad=True)
    inputs = LossInputs(
        current=current,
        proximal=None,
        behaviour=torch.zeros(3),
        advantages=torch.full((3,), torch.nan),  # not read
        mask=mask,
        segments=torch.zeros(3, dtype=torch.int64),
        versions=torch.full((3,), -1),
        version_now=1,
    )
    output = sft_loss(inputs, AlgorithmConfig(name="sft"))
    assert output.per_token.tolist() == [0.0, 1.5, 0.5]
    output.per_token.sum().backward()
    assert current.grad is not None
    assert current.grad.tolist() == [0.0, -1.0, -1.0]
    assert finish(output.stats) == {"logprob_mean": -1.0}
