"""The losses beside PPO's against loops in float64, recorded numbers, and the properties that all losses share."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from good_config import changed
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.algorithms.losses import cispo_loss, clipped_loss, gspo_loss, sapo_loss, value_loss
from areal_hpc.algorithms.objective import LossInputs, LossOutput
from areal_hpc.algorithms.stats import finish, merge
from areal_hpc.config.algorithm import (
    AlgorithmConfig,
    KlConfig,
    KlEstimator,
    KlPlace,
    ProximalMethod,
    RejectionConfig,
)
from areal_hpc.config.resolve import resolve

CASES = json.loads((Path(__file__).parents[1] / "data" / "algorithms.json").read_text(encoding="utf-8"))
Loss = Callable[[LossInputs, AlgorithmConfig], LossOutput]
LOSSES: dict[str, Loss] = {
    "gspo": gspo_loss,
    "gspo_with_token_mask": gspo_loss,
    "cispo": cispo_loss,
    "cispo_decoupled": cispo_loss,
    "sapo": sapo_loss,
}
INF = math.inf
SAPO = AlgorithmConfig(name="sapo", decoupled=False, proximal=ProximalMethod.BEHAVIOUR)
CISPO = AlgorithmConfig(name="cispo", clip_low=1.0, clip_high=4.0)
GSPO = AlgorithmConfig(name="gspo", clip_low=0.1, clip_high=0.2)
WITH_KL = AlgorithmConfig(kl=KlConfig(coef=0.5, estimator=KlEstimator.K2))


def clipped_with_kl(batch: LossInputs, config: AlgorithmConfig) -> LossOutput:
    return clipped_loss(replace(batch, kl_coef=config.kl.coef), config)


KINDS: dict[str, tuple[Loss, AlgorithmConfig]] = {
    "gspo": (gspo_loss, GSPO),
    "cispo": (cispo_loss, CISPO),
    "sapo": (sapo_loss, SAPO),
    "kl": (clipped_with_kl, WITH_KL),
}
LOGPROB = st.integers(-80, 0).map(lambda n: n / 16)  # exact in float32
ADVANTAGE = st.sampled_from([-2.0, -0.5, 0.0, 1.0, 3.0])
TOKEN = st.tuples(LOGPROB, LOGPROB, LOGPROB, ADVANTAGE, st.booleans(), st.integers(0, 2), LOGPROB)
TOKENS = st.lists(TOKEN, min_size=1, max_size=8)


def inputs(tokens: Sequence[Sequence[Any]], dtype: torch.dtype = torch.float32) -> LossInputs:
    """Of (current, proximal, behaviour, advantage, trainable, sequence, reference) each."""
    current, proximal, behaviour, advantages, mask, segments, reference = (
        [token[i] for token in tokens] for i in range(7)
    )
    return LossInputs(
        current=torch.tensor(current, dtype=dtype, requires_grad=True),
        proximal=torch.tensor(proximal, dtype=dtype),
        behaviour=torch.tensor(behaviour, dtype=dtype),
        advantages=torch.tensor(advantages, dtype=dtype),
        mask=torch.tensor(mask, dtype=torch.bool),
        segments=torch.tensor(segments, dtype=torch.int64),
        versions=torch.full((len(tokens),), 3),
        version_now=5,
        reference=torch.tensor(reference, dtype=dtype),
    )


def run(loss: Loss, batch: LossInputs, config: AlgorithmConfig) -> tuple[LossOutput, torch.Tensor]:
    output = loss(batch, config)
    (gradient,) = torch.autograd.grad(output.per_token.sum(), batch.current)
    return output, gradient


def by_hand(kind: str, tokens: Sequence[Sequence[Any]], config: AlgorithmConfig) -> list[float]:
    """Gradient of each token in closed form; weights above 5 are rejected, sequences are summed one at a time."""
    gradients = []
    weights = [math.exp(p - b) if config.decoupled else 1.0 for _, p, b, *_ in tokens]
    kept = [bool(token[4]) and w <= 5.0 for token, w in zip(tokens, weights, strict=True)]
    for t, (current, proximal, behaviour, advantage, _, sequence, reference) in enumerate(tokens):
        if not kept[t]:
            gradients.append(0.0)
            continue
        ratio = math.exp(current - (behaviour if kind == "sapo" else proximal))
        if kind == "cispo":
            gradient = -advantage * min(max(ratio, 1 - config.clip_low), 1 + config.clip_high) * weights[t]
        elif kind == "sapo":
            tau = config.sapo_tau_positive if advantage > 0 else config.sapo_tau_negative
            gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
            gradient = -4 * gate * (1 - gate) * ratio * advantage
        elif kind == "gspo":
            mates = [i for i, token in enumerate(tokens) if kept[i] and token[5] == sequence]
            whole = math.exp(math.fsum(tokens[i][0] - tokens[i][1] for i in mates) / len(mates))
            gradient = 0.0  # each mate's loss moves with this token's log-prob through the mean
            for i in mates:
                a = tokens[i][3]
                out = (a > 0 and whole > 1 + config.clip_high) or (a < 0 and whole < 1 - config.clip_low)
                gradient += 0.0 if out else -a * whole * weights[i] / len(mates)
        else:
            out = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
            gradient = 0.0 if out else -advantage * ratio
            d = current - reference
            gradient = weights[t] * (gradient + (0.5 * d if d * d / 2 < 10 else 0.0))
        gradients.append(gradient)
    return gradients


@pytest.mark.parametrize("name", CASES["surrogates"])
def test_loss_and_gradient_agree_with_recorded_numbers(name: str) -> None:
    case, tokens = CASES["surrogates"][name], CASES["tokens"]
    fields = {key: ProximalMethod(value) if key == "proximal" else value for key, value in case["config"].items()}
    config = AlgorithmConfig(**fields, rejection_sampling=RejectionConfig(**case.get("rejection", {})))
    columns = (tokens[key] for key in ("current", "proximal", "behaviour", "advantages", "mask", "segments"))
    batch = replace(inputs(list(zip(*columns, [0.0] * 8, strict=True))), reference=None)
    output, gradient = run(LOSSES[name], batch, config)
    trainable = sum(tokens["mask"])
    assert output.per_token.sum().item() / trainable == pytest.approx(case["loss"], abs=1e-5)
    torch.testing.assert_close(gradient / trainable, torch.tensor(case["gradient"]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@given(tokens=TOKENS)
def test_gradients_are_their_definition(kind: str, tokens: Any) -> None:
    loss, config = KINDS[kind]
    _, gradient = run(loss, inputs(tokens, torch.float64), config)
    expected = torch.tensor(by_hand(kind, tokens, config), dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["gspo", "sapo", "kl"])
def test_gradient_is_the_derivative_of_the_value(kind: str) -> None:
    """Finite differences in float64, away from the kinks; cispo detaches its weight on purpose."""
    loss, config = KINDS[kind]
    rows = [(-0.3, -0.35, -0.6, 1, 1, 0, -0.5), (-1.2, -1.1, -0.9, -1, 1, 0, -1.0), (-2.0, -2.1, -2.0, -3, 1, 1, -1.5)]
    batch = inputs(rows, torch.float64)
    assert torch.autograd.gradcheck(lambda x: loss(replace(batch, current=x), config).per_token, (batch.current,))


@pytest.mark.parametrize("kind", KINDS)
@given(tokens=st.lists(st.tuples(LOGPROB, ADVANTAGE), min_size=1, max_size=8))
def test_equal_policies_give_the_plain_policy_gradient(kind: str, tokens: Any) -> None:
    """All ratios are 1 and nothing is masked; gspo shares a sequence's gradient, and here they share one advantage."""
    loss, config = KINDS[kind]
    advantage = tokens[0][1]
    output, gradient = run(loss, inputs([(p, p, p, advantage, 1, 0, p) for p, _ in tokens]), config)
    torch.testing.assert_close(gradient, torch.full_like(gradient, -advantage))
    stats = finish(output.stats)
    assert (stats["kept_fraction"], stats["approx_kl"], stats["reference_kl"]) == (1.0, 0.0, 0.0)
    assert stats.get("clip_fraction", 0.0) == 0.0


@pytest.mark.parametrize("kind", KINDS)
@given(tokens=TOKENS, random=st.randoms(use_true_random=False))
def test_E8_packing_and_order_change_nothing(kind: str, tokens: Any, random: Any) -> None:
    loss, config = KINDS[kind]
    whole, whole_gradient = run(loss, inputs(tokens), config)
    parts = []
    for sequence in {token[5] for token in tokens}:
        place = [i for i, token in enumerate(tokens) if token[5] == sequence]
        random.shuffle(place)
        output, gradient = run(loss, inputs([tokens[i] for i in place]), config)
        torch.testing.assert_close(output.per_token, whole.per_token[place])
        torch.testing.assert_close(gradient, whole_gradient[place])
        parts.append(output.stats)
    assert finish(merge(parts)) == pytest.approx(finish(whole.stats), rel=1e-5, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("kind", KINDS)
@given(tokens=TOKENS)
def test_masked_tokens_have_no_loss_and_no_gradient(kind: str, tokens: Any) -> None:
    loss, config = KINDS[kind]
    output, gradient = run(loss, inputs(tokens), config)
    masked = ~torch.tensor([bool(token[4]) for token in tokens])
    assert not output.per_token[masked].any()
    assert not gradient[masked].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [-1001.0, 999.0, math.nan, INF, -INF, 0.0])
@pytest.mark.parametrize("where", range(7))
def test_E5_E6_a_broken_number_harms_no_other_token(kind: str, value: float, where: int) -> None:
    loss, config = KINDS[kind]
    if where in (4, 5) or (where == 3 and not math.isfinite(value)):
        return  # a mask, a sequence's number, an advantage: none of them comes from a model
    broken = [-1.0, -1.0, -1.0, 0.0, 1, 0, -1.0]
    broken[where] = value
    output, gradient = run(loss, inputs([broken, (-1.0, -1.0, -1.0, 1.0, 1, 1, -1.0)]), config)
    assert output.per_token.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient[1] == -1.0
    broken[4] = 0
    output, gradient = run(loss, inputs([broken, (-1.0, -1.0, -1.0, 1.0, 1, 0, -1.0)]), config)
    assert (output.per_token[0], gradient[0], gradient[1]) == (0.0, 0.0, -1.0)


def test_a_kl_in_the_reward_is_measured_and_is_no_loss() -> None:
    config = replace(WITH_KL, kl=replace(WITH_KL.kl, place=KlPlace.REWARD))
    output, gradient = run(clipped_with_kl, inputs([(-1.0, -1.0, -1.0, 0.0, 1, 0, -2.0)]), config)
    assert (output.per_token.item(), gradient.item()) == (0.0, 0.0)
    assert finish(output.stats)["reference_kl"] == 0.5


def test_cispo_keeps_the_gradient_that_ppo_drops() -> None:
    row = [(-0.5, -2.5, -2.5, 1.0, 1, 0, -1.0)]
    assert run(clipped_loss, replace(inputs(row), reference=None), AlgorithmConfig())[1].item() == 0.0
    output, gradient = run(cispo_loss, replace(inputs(row), reference=None), CISPO)
    assert gradient.item() == -5.0
    assert finish(output.stats)["clip_fraction"] == 1.0


def test_sapo_lets_go_of_both_sides() -> None:
    """The gradient's gate is 1 where the policies agree and falls as the ratio leaves 1 either way."""
    gates = []
    for current in (-3.0, -2.0, -1.0):
        output, _ = run(sapo_loss, inputs([(current, -9.0, -2.0, 1.0, 1, 0, -1.0)]), SAPO)
        gates.append(finish(output.stats)["gate_mean"])
    assert gates[1] == 1.0
    assert max(gates[0], gates[2]) < 0.95


def test_what_m2po_leaves_out_stays_in_the_divisor() -> None:
    """The recorded system divides by the count that is left, 3 of 5: the right loss is 3/5 of its number."""
    case, tokens = CASES["m2po_loss"], CASES["tokens"]
    columns = (tokens[key] for key in ("current", "proximal", "behaviour", "advantages", "mask", "segments"))
    batch = replace(inputs(list(zip(*columns, [0.0] * 8, strict=True))), reference=None)
    squares = (batch.behaviour - batch.proximal).square()  # type: ignore[operator]
    kept = [0, 0, 1, 1, 0, 0, 0, 0]
    assert [int(m and s <= 0.011) for m, s in zip(tokens["mask"], squares.tolist(), strict=True)] == kept
    config = AlgorithmConfig(name="m2po", decoupled=False, m2_threshold=case["threshold"])
    eligible = torch.tensor(CASES["m2po"]["m2po_0.04"]["kept"], dtype=torch.bool)
    output, gradient = run(clipped_loss, replace(batch, eligible=eligible), config)
    assert gradient.tolist() == pytest.approx([0, 0, 0, -1.0, 0, 0, 0, 0])  # the third is beyond the clip
    assert output.per_token.sum().item() == pytest.approx(-1.2 - 1.0)
    assert finish(output.stats)["kept_fraction"] == pytest.approx(2 / 5)


def test_m2po_weighs_what_it_keeps_by_its_ratio_to_the_policy_that_sampled() -> None:
    """Its objective (arXiv:2510.01161) is the sum of M r A with r = current / behaviour: the gradient is -M r A."""
    config = resolve(changed(algorithm__name="m2po")).algorithm
    rows = [(-1.0, -1.0, -1.4, 2.0, 1, 0, 0.0), (-2.0, -2.0, -1.5, -1.0, 1, 0, 0.0), (-3.0, -3.0, -2.9, 1.0, 1, 0, 0.0)]
    batch = replace(inputs(rows), reference=None, eligible=torch.tensor([True, True, False]))
    output, gradient = run(clipped_loss, batch, config)
    assert gradient.tolist() == pytest.approx([-2.0 * math.exp(0.4), math.exp(-0.5), 0.0])
    assert finish(output.stats)["kept_fraction"] == pytest.approx(2 / 3)


def test_the_critics_loss_agrees_with_recorded_numbers() -> None:
    case = CASES["critic"]
    values, before, returns, mask = (torch.tensor(case[key]) for key in ("values", "before", "returns", "mask"))
    loss, clipped = value_loss(values, before, returns, case["clip"])
    assert loss[mask.bool()].mean().item() == pytest.approx(case["loss"], abs=1e-6)
    assert (clipped & mask.bool()).int().tolist() == case["clipped"]


def test_a_value_that_has_moved_far_enough_rests() -> None:
    values = torch.tensor([0.7, 0.3, -0.7], requires_grad=True)
    loss, clipped = value_loss(values, torch.zeros(3), torch.ones(3), clip=0.5)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert gradient.tolist() == pytest.approx([0.0, -0.7, -1.7])  # away from the return, it is pulled back
    assert clipped.tolist() == [True, False, False]


def test_a_value_that_has_moved_less_is_not_clipped_by_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    before, values = (0.05 * torch.rand(1000, generator=generator) for _ in range(2))
    assert (before + (values - before) != values).any()
    assert not value_loss(values, before, torch.full((1000,), 0.03), clip=0.2)[1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_E17_a_micro_batch_without_tokens(kind: str) -> None:
    loss, config = KINDS[kind]
    empty, gradient = run(loss, inputs([]), config)
    assert (empty.per_token.sum().item(), gradient.shape) == (0.0, (0,))
