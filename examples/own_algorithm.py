r"""A loss of one's own, tested without a model: the trust of a token falls linearly to 0 as its ratio leaves 1.

    pytest examples/own_algorithm.py
    PYTHONPATH=examples areal-hpc run configs/quickstart.yaml examples/own_algorithm.yaml

A loss is a function of ``LossInputs`` and the section `algorithm`. Through ``objective`` it need only say what a token
costs: the proximal policy, rejection, behaviour weights, broken ratios, a KL loss and the statistics that all losses
have are dealt with there, and the sum is divided by the trainable tokens of the global batch by the trainer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_hpc.algorithms.objective import LossInputs, LossOutput, Terms, objective
from areal_hpc.algorithms.stats import Stats, mean_of
from areal_hpc.config.algorithm import AlgorithmConfig


def fading_loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutput:
    """Policy gradient times ``max(0, 1 - |r - 1| / clip_high)``, where PPO has all of it or nothing."""
    return objective(inputs, config, fading)


def fading(terms: Terms, config: AlgorithmConfig) -> tuple[Tensor, Stats]:
    ratio = terms.log_ratio.detach().exp()
    trust = (1 - (ratio - 1).abs() / config.clip_high).clamp(min=0)
    loss = -terms.advantages * ratio * trust * terms.current
    return loss, {"trust": mean_of(trust, terms.trained)}


def gradients(current: list[float], advantages: list[float]) -> list[float]:
    """Of tokens whose proximal and behaviour log-probs are -1."""
    logprobs, one = torch.tensor(current, requires_grad=True), torch.full((len(current),), -1.0)
    output = fading_loss(
        LossInputs(
            current=logprobs,
            proximal=one,
            behaviour=one,
            advantages=torch.tensor(advantages),
            mask=torch.ones(len(current), dtype=torch.bool),
            segments=torch.zeros(len(current), dtype=torch.int64),
            versions=torch.zeros(len(current), dtype=torch.int64),
            version_now=1,
        ),
        AlgorithmConfig(clip_high=0.5),
    )
    output.per_token.sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad.tolist()


def test_a_token_at_the_proximal_policy_has_the_plain_gradient() -> None:
    assert gradients([-1.0, -1.0], [2.0, -0.5]) == [-2.0, 0.5]


def test_trust_falls_to_both_sides_and_ends() -> None:
    near, far, low = gradients([-0.9, -0.5, -1.9], [1.0, 1.0, 1.0])
    assert -1.0 < near < -0.5
    assert far == low == 0.0
