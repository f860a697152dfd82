"""Rejection sampling against a float64 loop, against recorded numbers, and where float32 gives out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.algorithms.masking import Rejection, accept, binary_kl, kl_divergence, reject
from areal_hpc.algorithms.stats import finish
from areal_hpc.config.algorithm import Aggregation, Metric, RejectionAction, RejectionConfig, RejectionLevel
from areal_hpc.config.algorithm_checks import check_rejection
from areal_hpc.errors import ConfigError

CASES = json.loads((Path(__file__).parents[1] / "data" / "algorithms.json").read_text(encoding="utf-8"))
INF = math.inf
# Sixteenths are exact in float32, so that the order of a sum cannot decide whether a value lies in the band.
LOGPROBS = st.integers(-80, 0).map(lambda n: n / 16)
TOKENS = st.lists(st.tuples(LOGPROBS, LOGPROBS, st.booleans(), st.integers(0, 3)), min_size=1, max_size=10)


def _legal() -> list[RejectionConfig]:
    """Every combination of options that means something, with bounds no value of the tests lies exactly on."""
    bounds = [(None, 1.77), (0.333, 2.77), (0.333, None), (-0.77, 0.77), (-0.77, None), (None, 0.123)]
    found = []
    for metric, level, action, agg, (lower, upper) in product(
        Metric, RejectionLevel, RejectionAction, Aggregation, bounds
    ):
        config = RejectionConfig(metric=metric, level=level, action=action, agg=agg, lower=lower, upper=upper)
        try:
            check_rejection(config)
        except ConfigError:
            continue
        found.append(config)
    return found


LEGAL = _legal()


def rejection_config(fields: dict[str, Any]) -> RejectionConfig:
    kinds = {"metric": Metric, "level": RejectionLevel, "action": RejectionAction, "agg": Aggregation}
    return RejectionConfig(**{key: kinds[key](value) if key in kinds else value for key, value in fields.items()})


def run(
    proximal: Sequence[float],
    behaviour: Sequence[float],
    config: RejectionConfig,
    mask: Sequence[int] | None = None,
    segments: Sequence[int] | None = None,
) -> Rejection:
    count = len(proximal)
    return reject(
        proximal=torch.tensor(proximal, dtype=torch.float32),
        behaviour=torch.tensor(behaviour, dtype=torch.float32),
        mask=torch.tensor([1] * count if mask is None else mask, dtype=torch.bool),
        segments=torch.tensor([0] * count if segments is None else segments, dtype=torch.int64),
        config=config,
    )


def two_outcomes(log_p: float, log_q: float) -> float:
    p, q = math.exp(log_p), math.exp(log_q)
    return p * (log_p - log_q) + ((1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0)


def metric_by_hand(metric: Metric, prox: float, behave: float) -> float:
    difference = prox - behave
    if metric is Metric.KL_K1:
        return difference
    if metric is Metric.KL_K2:
        return difference**2 / 2
    if metric is Metric.KL_K3:
        return math.exp(-difference) - 1 + difference
    return max(two_outcomes(prox, behave), two_outcomes(behave, prox))


def by_hand(tokens: list[tuple[float, float, bool, int]], config: RejectionConfig) -> tuple[list[bool], list[float]]:
    """Kept and weight of each token, one at a time, in float64."""
    gather = {Aggregation.MEAN: lambda x: math.fsum(x) / len(x), Aggregation.SUM: math.fsum, Aggregation.MAX: max}
    kept, weights = [], []
    for prox, behave, trainable, segment in tokens:
        if not trainable:
            kept.append(False)
            weights.append(0.0)
            continue
        mates = [(prox, behave)]
        if config.level is RejectionLevel.SEQUENCE:
            mates = [(p, b) for p, b, m, s in tokens if m and s == segment]
        if config.metric is Metric.RATIO:
            value = weight = math.exp(gather[config.agg]([p - b for p, b in mates]))
        else:
            value = gather[config.agg]([metric_by_hand(config.metric, p, b) for p, b in mates])
            weight = math.exp(prox - behave)
        lower = -INF if config.lower is None else config.lower
        upper = INF if config.upper is None else config.upper
        if config.action is RejectionAction.CLAMP:
            kept.append(True)
            weights.append(min(max(weight, lower), upper))
        else:
            kept.append(lower <= value <= upper)
            weights.append(weight if kept[-1] else 0.0)
    return kept, weights


@pytest.mark.parametrize("name", CASES["rejections"])
def test_rejection_agrees_with_recorded_numbers(name: str) -> None:
    case, tokens = CASES["rejections"][name], CASES["tokens"]
    config = rejection_config(case["rejection"])
    result = run(tokens["proximal"], tokens["behaviour"], config, tokens["mask"], tokens["segments"])
    assert result.kept.int().tolist() == case["kept"]
    torch.testing.assert_close(result.weight, torch.tensor(case["weight"]), atol=1e-5, rtol=0)


@given(TOKENS.filter(lambda tokens: all(max(p, b) < 0 for p, b, _, _ in tokens)), st.sampled_from(LEGAL))
def test_rejection_is_its_definition(tokens: list[tuple[float, float, bool, int]], config: RejectionConfig) -> None:
    proximal, behaviour, mask, segments = zip(*tokens, strict=True)
    result = run(proximal, behaviour, config, mask, segments)
    kept, weights = by_hand(tokens, config)
    assert result.kept.tolist() == kept
    torch.testing.assert_close(result.weight.double(), torch.tensor(weights).double(), rtol=1e-4, atol=1e-6)


def test_every_option_is_in_some_legal_combination() -> None:
    """So the property tests above and below leave none out."""
    for field, kind in (
        ("metric", Metric),
        ("level", RejectionLevel),
        ("action", RejectionAction),
        ("agg", Aggregation),
    ):
        assert {getattr(config, field) for config in LEGAL} == set(kind)


@given(TOKENS, st.sampled_from(LEGAL), st.randoms(use_true_random=False))
def test_order_and_sequence_numbers_do_not_matter(
    tokens: list[tuple[float, float, bool, int]], config: RejectionConfig, random: Any
) -> None:
    order = list(range(len(tokens)))
    random.shuffle(order)
    proximal, behaviour, mask, segments = zip(*tokens, strict=True)
    straight = run(proximal, behaviour, config, mask, segments)
    shuffled = [tokens[i] for i in order]
    proximal, behaviour, mask, segments = zip(*shuffled, strict=True)
    mixed = run(proximal, behaviour, config, mask, [9 - s for s in segments])
    assert mixed.kept.tolist() == straight.kept[order].tolist()
    torch.testing.assert_close(mixed.weight, straight.weight[order])


@given(st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=8), st.sampled_from(LEGAL))
def test_equal_policies_keep_everything_at_weight_one(logprobs: list[float], config: RejectionConfig) -> None:
    result = run(logprobs, logprobs, config)
    assert result.kept.all()
    assert (result.weight == 1.0).all()


def test_both_bounds_are_inclusive() -> None:
    config = RejectionConfig(metric=Metric.KL_K1, lower=-0.5, upper=0.25)
    result = run([-1.5, -0.75, -1.5625, -0.6875], [-1.0, -1.0, -1.0, -1.0], config)
    assert result.kept.tolist() == [True, True, False, False]


def test_a_single_sequence_is_judged_the_same_in_any_pack() -> None:
    config = RejectionConfig(level=RejectionLevel.SEQUENCE, upper=1.5)
    alone = run([-1.0, -2.0], [-1.2, -2.1], config)
    packed = run([-9.0, -1.0, -2.0], [-1.0, -1.2, -2.1], config, segments=[0, 1, 1])
    torch.testing.assert_close(packed.weight[1:], alone.weight, rtol=0, atol=0)


def test_binary_kl_agrees_with_recorded_numbers() -> None:
    case = CASES["binary_kl"]
    log_p, log_q = torch.tensor(case["log_p"]), torch.tensor(case["log_q"])
    # The recorded numbers computed 1 - p in float32 and are right to about 3e-5 only.
    torch.testing.assert_close(binary_kl(log_p, log_q), torch.tensor(case["kl_pq"]), atol=1e-5, rtol=0)
    torch.testing.assert_close(binary_kl(log_q, log_p), torch.tensor(case["kl_qp"]), atol=1e-5, rtol=0)


@given(st.floats(-30, -(2.0**-23), width=32), st.floats(-30, -(2.0**-23), width=32))
def test_binary_kl_is_accurate_in_float32(log_p: float, log_q: float) -> None:
    exact = math.exp(log_p) * (log_p - log_q) - math.expm1(log_p) * (
        math.log(-math.expm1(log_p)) - math.log(-math.expm1(log_q))
    )
    computed = binary_kl(torch.tensor([log_p]), torch.tensor([log_q]))
    assert computed.item() == pytest.approx(exact, rel=1e-5, abs=2e-6)


def test_certain_tokens_are_kept_where_the_policies_agree() -> None:
    """A log-prob of exactly 0.0 makes 1 - p vanish in float32; the recorded system masks the first two of these."""
    case = CASES["saturated"]
    config = RejectionConfig(metric=Metric.BINARY_KL, upper=2.0)
    result = run(case["proximal"], case["behaviour"], config)
    assert result.kept.tolist() == [True, True, True, True]
    assert finish(result.stats)["kept_fraction"] == 1.0
    assert run([0.0], [-4.0], config).kept.tolist() == [False]
    assert binary_kl(torch.tensor([0.0]), torch.tensor([-4.0])).item() == pytest.approx(4.0, abs=1e-4)


def test_binary_kl_of_an_impossible_token() -> None:
    impossible, half = torch.tensor([-INF]), torch.tensor([math.log(0.5)])
    assert binary_kl(impossible, half).item() == pytest.approx(math.log(2))
    assert binary_kl(half, impossible).item() == INF
    assert binary_kl(impossible, impossible).item() == 0.0


def test_binary_kl_is_judged_in_its_worse_direction() -> None:
    """The divergences of these two are 3.0 one way and 8.4 the other."""
    for proximal, behaviour in ((-9.0, -0.05), (-0.05, -9.0)):
        result = run([proximal], [behaviour], RejectionConfig(metric=Metric.BINARY_KL, upper=5.0))
        assert result.kept.tolist() == [False]


def test_E6_a_log_ratio_that_is_not_finite_harms_no_other_token() -> None:
    for config in LEGAL:
        result = run([-1.0, math.nan, INF, -INF, -1.0], [-1.0, -1.0, -1.0, -1.0, -1.0], config)
        assert result.kept.tolist() == [True, False, False, False, True], config
        assert result.weight.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0], config


def test_E6_two_policies_that_both_rule_a_token_out_agree() -> None:
    for config in LEGAL:
        assert run([-INF, -1.0], [-INF, -1.0], config).weight.tolist() == [1.0, 1.0], config


def test_E5_what_is_masked_may_be_anything() -> None:
    for config in LEGAL:
        result = run([math.nan, -1.0, INF], [-1.0, -1.0, 0.0], config, mask=[0, 1, 0])
        assert result.weight.tolist() == [0.0, 1.0, 0.0], config


def test_a_ratio_too_large_for_float32_is_left_out_even_without_an_upper_bound() -> None:
    result = run([-1.0, -1.0], [-1001.0, -1.0], RejectionConfig(lower=0.5, upper=None))
    assert result.weight.tolist() == [0.0, 1.0]


def test_weights_are_constants() -> None:
    proximal = torch.tensor([-1.0, -2.0], requires_grad=True)
    ones = torch.ones(2, dtype=torch.bool)
    behaviour, segments = torch.tensor([-1.5, -1.5]), torch.zeros(2, dtype=torch.int64)
    result = reject(proximal=proximal, behaviour=behaviour, mask=ones, segments=segments, config=RejectionConfig())
    assert not result.weight.requires_grad


def test_stats_say_what_was_kept() -> None:
    tokens = CASES["tokens"]
    result = run(tokens["proximal"], tokens["behaviour"], RejectionConfig(), tokens["mask"], tokens["segments"])
    stats = finish(result.stats)
    assert stats["kept_fraction"] == pytest.approx(0.6)
    assert stats["outside_fraction"] == pytest.approx(0.4)
    assert stats["behaviour_weight"] == pytest.approx((2 * math.exp(-0.1) + math.exp(-0.5)) / 3, abs=1e-6)
    assert stats["behaviour_weight_max"] == pytest.approx(math.exp(-0.1), abs=1e-6)


def test_clamping_keeps_all_and_counts_what_was_outside() -> None:
    result = run([-1.0, -1.0], [-4.0, -1.0], RejectionConfig(action=RejectionAction.CLAMP, upper=2.0))
    assert result.weight.tolist() == [2.0, 1.0]
    assert finish(result.stats)["kept_fraction"] == 1.0
    assert finish(result.stats)["outside_fraction"] == 0.5


def test_E17_no_tokens_at_all() -> None:
    for config in LEGAL:
        stats = finish(run([], [], config).stats)
        assert all(math.isnan(value) for value in stats.values())
    assert accept(torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.bool)).weight.shape == (0,)


def test_kl_metrics_agree_with_recorded_numbers() -> None:
    case = CASES["kl"]
    logprobs = torch.tensor(case["logprobs"], dtype=torch.float64)
    reference = torch.tensor(case["reference"], dtype=torch.float64)
    recorded = {Metric.KL_K1: case["k1"], Metric.KL_K3: case["k3"], Metric.KL_K2: [0.125, 0.245, 10.0]}
    for metric, expected in recorded.items():
        bounded = kl_divergence(metric, logprobs, reference).clamp(-case["bound"], case["bound"])
        assert bounded.tolist() == pytest.approx(expected, abs=1e-5)


def test_kl_metrics_point_from_the_first_policy_to_the_second() -> None:
    """Averaged over the first one's own distribution, k1 and k3 are exactly its KL to the second, not the reverse
    (J. Schulman, "Approximating KL divergence", 2020)."""
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    exact = float((policy * (policy / reference).log()).sum())
    for metric in (Metric.KL_K1, Metric.KL_K3):
        values = kl_divergence(metric, policy.log(), reference.log())
        assert float((policy * values).sum()) == pytest.approx(exact, abs=1e-12)
    assert (kl_divergence(Metric.KL_K3, policy.log(), reference.log()) >= 0).all()
