"""The clipped objective against a float64 loop with gradients in closed form, recorded numbers, and broken inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.algorithms.losses import clipped_loss
from areal_hpc.algorithms.objective import LossInputs, LossOutput, loglinear_proximal, proximal_logprobs
from areal_hpc.algorithms.stats import finish, merge
from areal_hpc.config.algorithm import (
    Aggregation,
    AlgorithmConfig,
    Metric,
    ProximalMethod,
    RejectionAction,
    RejectionConfig,
    RejectionLevel,
)

CASES = json.loads((Path(__file__).parents[1] / "data" / "algorithms.json").read_text(encoding="utf-8"))
KINDS = {
    "metric": Metric,
    "level": RejectionLevel,
    "action": RejectionAction,
    "agg": Aggregation,
    "proximal": ProximalMethod,
}
INF = math.inf
PLAIN = AlgorithmConfig(decoupled=False)
WIDE = AlgorithmConfig(rejection_sampling=RejectionConfig(upper=1e4))
LOGPROB = st.integers(-80, 0).map(lambda n: n / 16)  # exact in float32
ADVANTAGE = st.sampled_from([-2.0, -0.5, 0.0, 1.0, 3.0])
TOKEN = st.tuples(LOGPROB, LOGPROB, LOGPROB, ADVANTAGE, st.booleans(), st.integers(0, 2))
TOKENS = st.lists(TOKEN, min_size=1, max_size=8)
CONFIGS = [
    PLAIN,
    AlgorithmConfig(clip_high=0.28),
    AlgorithmConfig(dual_clip=3.0, rejection_sampling=RejectionConfig(lower=0.5)),
    AlgorithmConfig(rejection_sampling=RejectionConfig(action=RejectionAction.CLAMP, upper=2.0)),
    AlgorithmConfig(rejection_sampling=RejectionConfig(metric=Metric.BINARY_KL, upper=2.0)),
    AlgorithmConfig(rejection_sampling=RejectionConfig(level=RejectionLevel.SEQUENCE, upper=1.5)),
    AlgorithmConfig(proximal=ProximalMethod.REUSE),
    AlgorithmConfig(proximal=ProximalMethod.LOGLINEAR),
]


def algorithm(case: dict[str, Any]) -> AlgorithmConfig:
    def typed(fields: dict[str, Any]) -> dict[str, Any]:
        return {key: KINDS[key](value) if key in KINDS else value for key, value in fields.items()}

    rejection = RejectionConfig(**typed(case.get("rejection", {})))
    return AlgorithmConfig(**typed(case["config"]), rejection_sampling=rejection)


def batch(
    current: Sequence[float],
    proximal: Sequence[float],
    behaviour: Sequence[float],
    advantages: Sequence[float],
    mask: Sequence[int] | None = None,
    segments: Sequence[int] | None = None,
    versions: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> LossInputs:
    count = len(current)
    return LossInputs(
        current=torch.tensor(current, dtype=dtype, requires_grad=True),
        proximal=torch.tensor(proximal, dtype=dtype),
        behaviour=torch.tensor(behaviour, dtype=dtype),
        advantages=torch.tensor(advantages, dtype=dtype),
        mask=torch.tensor([1] * count if mask is None else mask, dtype=torch.bool),
        segments=torch.tensor([0] * count if segments is None else segments, dtype=torch.int64),
        versions=torch.tensor([3] * count if versions is None else versions, dtype=torch.int32),
        version_now=5,
    )


def of_tokens(tokens: Sequence[tuple[float, float, float, float, bool, int]]) -> LossInputs:
    columns: list[list[Any]] = [[token[i] for token in tokens] for i in range(6)]
    return batch(*columns)


def run(inputs: LossInputs, config: AlgorithmConfig) -> tuple[LossOutput, torch.Tensor]:
    """The loss and the gradient of its sum."""
    output = clipped_loss(inputs, config)
    (gradient,) = torch.autograd.grad(output.per_token.sum(), inputs.current)
    return output, gradient


def by_hand(inputs: LossInputs, config: AlgorithmConfig) -> tuple[list[float], list[float]]:
    """Loss and gradient of each token from the definition; token-level rejection of ratios only."""
    losses, gradients = [], []
    rejection = config.rejection_sampling
    for t in range(len(inputs.current)):
        assert inputs.proximal is not None
        current, proximal, behaviour, advantage = (
            float(x[t].detach()) for x in (inputs.current, inputs.proximal, inputs.behaviour, inputs.advantages)
        )
        weight = math.exp(proximal - behaviour)
        inside = (rejection.lower or 0.0) <= weight <= (rejection.upper or INF)
        if not inputs.mask[t] or not inside:
            losses.append(0.0)
            gradients.append(0.0)
            continue
        ratio = math.exp(current - proximal)
        if advantage >= 0:
            clipped = ratio > 1 + config.clip_high
            loss = -advantage * min(ratio, 1 + config.clip_high)
        else:
            clipped = ratio < 1 - config.clip_low
            loss = -advantage * max(ratio, 1 - config.clip_low)
            if config.dual_clip is not None and ratio > config.dual_clip:
                clipped, loss = True, -advantage * config.dual_clip
        losses.append(weight * loss)
        gradients.append(0.0 if clipped else -weight * advantage * ratio)
    return losses, gradients


@pytest.mark.parametrize("name", CASES["losses"])
def test_loss_and_gradient_agree_with_recorded_numbers(name: str) -> None:
    case, tokens = CASES["losses"][name], CASES["tokens"]
    output, gradient = run(batch(**tokens), algorithm(case))
    trainable = sum(tokens["mask"])
    assert output.per_token.sum().item() / trainable == pytest.approx(case["loss"], abs=1e-5)
    torch.testing.assert_close(gradient / trainable, torch.tensor(case["gradient"]), atol=1e-5, rtol=0)
    stats = finish(output.stats)
    if "clipped" not in case:
        return
    kept = case.get("kept", tokens["mask"])
    assert stats["kept_fraction"] == pytest.approx(sum(kept) / trainable)
    if sum(kept):
        clipped = sum(c and k for c, k in zip(case["clipped"], kept, strict=True))
        assert stats["clip_fraction"] == pytest.approx(clipped / sum(kept))
    if "weight" in case and sum(kept):
        assert stats["behaviour_weight"] == pytest.approx(sum(case["weight"]) / sum(kept), abs=1e-5)


@given(TOKENS, st.sampled_from([None, 3.0]), st.sampled_from([None, 0.5]))
def test_loss_is_its_definition(
    tokens: list[tuple[float, float, float, float, bool, int]], dual_clip: float | None, lower: float | None
) -> None:
    config = AlgorithmConfig(
        clip_high=0.28, dual_clip=dual_clip, rejection_sampling=RejectionConfig(lower=lower, upper=5.0)
    )
    inputs = of_tokens(tokens)
    output, gradient = run(inputs, config)
    losses, gradients = by_hand(inputs, config)
    torch.testing.assert_close(output.per_token.double(), torch.tensor(losses).double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), torch.tensor(gradients).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS[:-2])
def test_gradient_is_the_derivative_of_the_value(config: AlgorithmConfig) -> None:
    """Finite differences in float64, away from the kinks; reuse and loglinear detach current on purpose."""
    current = [-0.3, -1.2, -0.9, -2.0, -0.1]
    inputs = batch(
        current, [-0.5, -1.0, -1.0, -2.1, -0.2], [-0.6, -0.9, -1.6, -2.0, -0.2], [1, -1, 2, -3, 0], dtype=torch.float64
    )

    def value(x: torch.Tensor) -> torch.Tensor:
        changed = {name: getattr(inputs, name) for name in LossInputs.__slots__} | {"current": x}
        return clipped_loss(LossInputs(**changed), config).per_token

    assert torch.autograd.gradcheck(value, (inputs.current,))


@given(st.lists(st.tuples(LOGPROB, ADVANTAGE), min_size=1, max_size=8), st.sampled_from(CONFIGS))
def test_equal_policies_give_the_plain_policy_gradient(
    tokens: list[tuple[float, float]], config: AlgorithmConfig
) -> None:
    logprobs, advantages = [p for p, _ in tokens], [a for _, a in tokens]
    output, gradient = run(batch(logprobs, logprobs, logprobs, advantages), config)
    torch.testing.assert_close(gradient, -torch.tensor(advantages), rtol=0, atol=0)
    stats = finish(output.stats)
    assert (stats["kept_fraction"], stats["clip_fraction"], stats["behaviour_weight"]) == (1.0, 0.0, 1.0)
    assert (stats["logprob_gap"], stats["approx_kl"]) == (0.0, 0.0)


@given(TOKENS, st.sampled_from(CONFIGS), st.randoms(use_true_random=False))
def test_E8_loss_and_gradient_do_not_depend_on_packing(
    tokens: list[tuple[float, float, float, float, bool, int]], config: AlgorithmConfig, random: Any
) -> None:
    """All in one micro-batch, or each sequence in its own, shuffled: same tokens' losses, gradients and statistics."""
    whole, whole_gradient = run(of_tokens(tokens), config)
    places = {s: [i for i, token in enumerate(tokens) if token[5] == s] for s in {token[5] for token in tokens}}
    parts = []
    for place in places.values():
        random.shuffle(place)
        output, gradient = run(of_tokens([tokens[i] for i in place]), config)
        torch.testing.assert_close(output.per_token, whole.per_token[place])
        torch.testing.assert_close(gradient, whole_gradient[place])
        parts.append(output.stats)
    assert finish(merge(parts)) == pytest.approx(finish(whole.stats), rel=1e-5, abs=1e-6, nan_ok=True)


@given(TOKENS, st.sampled_from(CONFIGS))
def test_masked_tokens_have_no_loss_and_no_gradient(
    tokens: list[tuple[float, float, float, float, bool, int]], config: AlgorithmConfig
) -> None:
    output, gradient = run(of_tokens(tokens), config)
    masked = ~torch.tensor([token[4] for token in tokens])
    assert (output.per_token[masked] == 0).all()
    assert (gradient[masked] == 0).all()


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    config = AlgorithmConfig(decoupled=False, dual_clip=2.0)
    output, gradient = run(batch([-0.1, -0.1], [-3.1, -0.2], [0.0, 0.0], [-1.0, -1.0]), config)
    assert output.per_token.tolist() == pytest.approx([2.0, math.exp(0.1)], rel=1e-6)
    assert gradient.tolist() == pytest.approx([0.0, math.exp(0.1)], rel=1e-6)
    assert finish(output.stats)["dual_clip_fraction"] == 0.5


@pytest.mark.parametrize("log_ratio", [-1000.0, 1000.0, math.nan, INF, -INF])
@pytest.mark.parametrize("where", ["current", "proximal", "behaviour"])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("config", CONFIGS)
def test_E6_a_wild_log_ratio_leaves_loss_and_gradient_finite(
    log_ratio: float, where: str, advantage: float, config: AlgorithmConfig
) -> None:
    columns = {name: [-1.0, -1.0] for name in ("current", "proximal", "behaviour")}
    columns[where] = [-1.0 + log_ratio, -1.0]
    output, gradient = run(batch(**columns, advantages=[advantage, 1.0], segments=[0, 1]), config)
    assert output.per_token.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient[1] == -1.0  # the other sequence trains as if nothing had happened
    assert all(math.isfinite(value) for value in finish(output.stats).values())


@pytest.mark.parametrize("config", CONFIGS)
def test_E5_garbage_in_masked_places_reaches_nothing(config: AlgorithmConfig) -> None:
    garbage = [math.nan, INF, -INF, -1.0]
    output, gradient = run(
        batch(garbage, [*garbage[::-1][1:], -1.0], [math.nan] * 3 + [-1.0], [math.nan] * 3 + [1.0], [0, 0, 0, 1]),
        config,
    )
    assert output.per_token.tolist() == [0.0, 0.0, 0.0, -1.0]
    assert gradient.tolist() == [0.0, 0.0, 0.0, -1.0]
    assert all(math.isfinite(value) for value in finish(output.stats).values())


@pytest.mark.parametrize("config", CONFIGS)
def test_log_probs_of_certain_and_impossible_tokens_are_finite(config: AlgorithmConfig) -> None:
    output, gradient = run(batch([0.0, -INF], [0.0, -INF], [0.0, -INF], [1.0, 1.0]), config)
    assert output.per_token.isfinite().all()
    assert gradient.tolist() == [-1.0, 0.0]


def test_tokens_without_a_finite_ratio_are_counted() -> None:
    output, _ = run(batch([math.nan, -1.0], [-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0]), WIDE)
    assert finish(output.stats)["nonfinite_fraction"] == 0.5


def test_rejected_tokens_stay_in_the_divisor() -> None:
    """The sum has zeros for them and the count of trainable tokens is the mask's, so nothing else gets louder."""
    config = AlgorithmConfig(rejection_sampling=RejectionConfig(upper=2.0))
    alone, _ = run(batch([-1.0], [-1.0], [-1.0], [1.0]), config)
    beside, _ = run(batch([-1.0, -1.0], [-1.0, -1.0], [-1.0, -9.0], [1.0, 1.0]), config)
    assert beside.per_token.tolist() == [alone.per_token.item(), 0.0]


def test_loglinear_agrees_with_recorded_numbers() -> None:
    case = CASES["loglinear"]
    current = torch.tensor(case["current"], requires_grad=True)
    result = loglinear_proximal(
        current, torch.tensor(case["behaviour"]), torch.tensor(case["versions"]), case["version_now"]
    )
    torch.testing.assert_close(result, torch.tensor(case["proximal"]), atol=1e-6, rtol=0)
    assert not result.requires_grad


def test_loglinear_of_the_newest_weights_never_touches_a_broken_current() -> None:
    result = loglinear_proximal(torch.tensor([-INF]), torch.tensor([-1.0]), torch.tensor([4]), 5)
    assert result.tolist() == [-1.0]


def test_proximal_methods() -> None:
    inputs = batch([-1.0], [-2.0], [-4.0], [1.0], versions=[3])
    values = {method: proximal_logprobs(inputs, method) for method in ProximalMethod}
    assert {method: value.item() for method, value in values.items()} == {
        ProximalMethod.RECOMPUTE: -2.0,
        ProximalMethod.LOGLINEAR: -2.5,  # half way: version 3 sampled, 4 is proximal, 5 is being made
        ProximalMethod.REUSE: -1.0,
        ProximalMethod.BEHAVIOUR: -4.0,
    }
    assert not any(value.requires_grad for value in values.values())


def test_stats_of_the_policies() -> None:
    inputs = batch(
        [-1.0, -1.5, -9.0], [-1.0, -1.0, -9.0], [-1.5, -0.75, 0.0], [1, 1, 1], [1, 1, 0], versions=[2, 4, -1]
    )
    stats = finish(run(inputs, WIDE)[0].stats)
    assert stats["logprob_gap"] == pytest.approx(0.375)
    assert stats["logprob_gap_max"] == pytest.approx(0.5)
    assert (stats["staleness_min"], stats["staleness_mean"], stats["staleness_max"]) == (0.0, 1.0, 2.0)
    assert stats["approx_kl"] == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 2)


@pytest.mark.parametrize("method", [ProximalMethod.LOGLINEAR, ProximalMethod.REUSE, ProximalMethod.BEHAVIOUR])
def test_the_gap_is_to_what_the_trainer_computes_not_to_what_stands_in_for_it(method: ProximalMethod) -> None:
    """A stand-in is made of the behaviour policy's log-probs: it would agree with an engine that computes nonsense."""
    inputs = replace(batch([-1.0, -1.5], [], [-1.5, -3.5], [1, 1], versions=[4, 2]), proximal=None)
    stats = finish(run(inputs, AlgorithmConfig(decoupled=False, proximal=method))[0].stats)
    assert (stats["logprob_gap"], stats["logprob_gap_max"]) == (1.25, 2.0)


@pytest.mark.parametrize("config", CONFIGS)
def test_E17_a_micro_batch_without_tokens_has_a_gradient_and_the_same_stats(config: AlgorithmConfig) -> None:
    empty, gradient = run(batch([], [], [], []), config)
    assert empty.per_token.sum() == 0
    assert gradient.shape == (0,)
    some, _ = run(batch([-1.0], [-1.0], [-1.0], [1.0]), config)
    assert finish(merge([empty.stats, some.stats])) == finish(some.stats)
    masked, _ = run(batch([-1.0], [-1.0], [-1.0], [1.0], mask=[0]), config)
    assert all(math.isnan(value) for value in finish(masked.stats).values())
