"""Advantages against a loop in plain Python, against recorded numbers, and under every reordering."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.algorithms.advantages import (
    AdvantageInputs,
    normalise,
    overlong_penalty,
    trajectory_advantages,
)
from areal_hpc.config.algorithm import AlgorithmConfig, Level, NormConfig, OverlongConfig

CASES = json.loads((Path(__file__).parents[1] / "data" / "algorithms.json").read_text(encoding="utf-8"))
REWARDS = st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0, 0.3])
LEVELS = st.sampled_from(list(Level))
NORMS = st.builds(NormConfig, mean=LEVELS, std=LEVELS, leave_one_out=st.booleans(), unbiased=st.booleans())
MEMBERS = st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=12)  # (value, group)


def norm(fields: dict[str, Any]) -> NormConfig:
    return NormConfig(**fields | {"mean": Level(fields["mean"]), "std": Level(fields["std"])})


def inputs(rewards: list[float], groups: list[int], **fields: Any) -> AdvantageInputs:
    count = len(rewards)
    return AdvantageInputs(
        rewards=np.array(rewards, dtype=np.float64),
        groups=np.array(groups, dtype=np.int64),
        generated=np.array(fields.get("generated", [4] * count), dtype=np.int64),
        truncated=np.array(fields.get("truncated", [False] * count), dtype=np.bool_),
        episodes=np.array(fields.get("episodes", range(count)), dtype=np.int64),
        max_new_tokens=fields.get("max_new_tokens", 8),
        baselines=None if "baselines" not in fields else np.array(fields["baselines"], dtype=np.float64),
    )


def by_hand(values: list[float], groups: list[int], config: NormConfig) -> list[float]:
    """The definition, one entry at a time, with exact sums."""

    def members(level: Level, i: int) -> list[int]:
        return [j for j in range(len(values)) if level is Level.BATCH or groups[j] == groups[i]]

    def mean(numbers: list[float]) -> float:
        return math.fsum(numbers) / len(numbers)

    plain = list(values)
    if config.mean is not Level.NONE:
        plain = [values[i] - mean([values[j] for j in members(config.mean, i)]) for i in range(len(values))]
    answer = list(plain)
    for i in range(len(values)):
        if config.mean is not Level.NONE and config.leave_one_out:
            others = [values[j] for j in members(config.mean, i) if j != i]
            answer[i] = values[i] - mean(others) if others else 0.0
        if config.mean is not Level.NONE and len(members(config.mean, i)) == 1:
            answer[i] = 0.0
        if config.std is not Level.NONE:
            set_ = members(config.std, i)
            spread = [plain[j] for j in set_]
            if len(set_) == 1 or max(spread) - min(spread) < 1e-12:
                answer[i] = 0.0
                continue
            squares = math.fsum((x - mean(spread)) ** 2 for x in spread)
            answer[i] /= math.sqrt(squares / (len(set_) - config.unbiased)) + config.eps
    return answer


@pytest.mark.parametrize("name", CASES["normalise"])
def test_normalise_agrees_with_recorded_numbers(name: str) -> None:
    case = CASES["normalise"][name]
    result = normalise(np.array(case["values"]), np.array(case["groups"]), norm(case["config"]))
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, case["normalised"], atol=1e-5)


@given(MEMBERS, NORMS)
def test_normalise_is_its_definition(members: list[tuple[float, int]], config: NormConfig) -> None:
    values, groups = [v for v, _ in members], [g for _, g in members]
    result = normalise(np.array(values), np.array(groups), config)
    np.testing.assert_allclose(result, by_hand(values, groups, config), rtol=1e-9, atol=1e-9)


@given(MEMBERS, NORMS, st.randoms(use_true_random=False))
def test_E11_members_of_a_group_need_not_stand_together(
    members: list[tuple[float, int]], config: NormConfig, random: Any
) -> None:
    order = list(range(len(members)))
    random.shuffle(order)
    values, groups = np.array([v for v, _ in members]), np.array([g for _, g in members])
    renamed = 7 - 3 * groups  # ids are names, not positions
    shuffled = normalise(values[order], renamed[order], config)
    np.testing.assert_allclose(shuffled, normalise(values, groups, config)[order], rtol=1e-9, atol=1e-9)


def test_E11_a_group_that_lost_a_member_shifts_nobody_elses() -> None:
    config = NormConfig(std=Level.NONE)
    whole = normalise(np.array([1.0, 0.0, 0.0, 0.0, 5.0, 7.0]), np.array([0, 0, 0, 0, 1, 1]), config)
    lost = normalise(np.array([1.0, 0.0, 0.0, 5.0, 7.0]), np.array([0, 0, 0, 1, 1]), config)
    np.testing.assert_allclose(lost[-2:], whole[-2:])
    np.testing.assert_allclose(lost, [2 / 3, -1 / 3, -1 / 3, -1, 1], atol=1e-12)


@given(REWARDS, st.integers(1, 9), NORMS.filter(lambda c: (c.mean, c.std) != (Level.NONE, Level.NONE)))
def test_equal_rewards_give_exactly_zero(reward: float, count: int, config: NormConfig) -> None:
    result = normalise(np.full(count, reward), np.arange(count) % 2, config)
    assert (result == 0.0).all()


def test_E12_leaving_one_out_of_one_gives_zero() -> None:
    config = NormConfig(std=Level.NONE, leave_one_out=True)
    np.testing.assert_array_equal(normalise(np.array([3.0, 1.0, 2.0]), np.array([0, 1, 1]), config), [0.0, -1.0, 1.0])


@given(MEMBERS, NORMS.filter(lambda c: c.mean is not Level.NONE), st.sampled_from([-100.0, 0.25, 1e6]))
def test_a_constant_added_to_all_rewards_changes_nothing(
    members: list[tuple[float, int]], config: NormConfig, shift: float
) -> None:
    values, groups = np.array([round(v * 64) / 64 for v, _ in members]), np.array([g for _, g in members])
    moved = normalise(values + shift, groups, config)
    np.testing.assert_allclose(moved, normalise(values, groups, config), rtol=1e-6, atol=1e-9)


def test_advantages_over_trainable_tokens_agree_with_recorded_numbers() -> None:
    case = CASES["token_weighted"]
    values, mask = np.array(case["values"]).reshape(-1), np.array(case["mask"]).reshape(-1)
    config = NormConfig(mean=Level.BATCH, std=Level.BATCH)
    result = normalise(values, np.zeros(values.size, dtype=np.int64), config, weights=mask)
    np.testing.assert_allclose(result * mask, np.array(case["normalised"]).reshape(-1), atol=1e-5)


@given(st.lists(st.tuples(REWARDS, st.integers(1, 5)), min_size=2, max_size=8), st.booleans())
def test_a_weight_is_so_many_tokens(members: list[tuple[float, int]], unbiased: bool) -> None:
    config = NormConfig(mean=Level.BATCH, std=Level.BATCH, unbiased=unbiased)
    values, tokens = np.array([v for v, _ in members]), np.array([n for _, n in members])
    spread_out = by_hand(list(np.repeat(values, tokens)), [0] * int(tokens.sum()), config)
    weighted = normalise(values, np.zeros(values.size, dtype=np.int64), config, weights=tokens.astype(np.float64))
    np.testing.assert_allclose(np.repeat(weighted, tokens), spread_out, rtol=1e-9, atol=1e-9)


@given(
    st.lists(st.tuples(REWARDS, st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=8),
    NORMS,
)
def test_E11_branches_of_an_episode_weigh_its_reward_once(
    members: list[tuple[float, int, int]], norm_config: NormConfig
) -> None:
    rewards, groups = [r for r, _, _ in members], [g for _, g, _ in members]
    config = AlgorithmConfig(reward_norm=norm_config)
    once = trajectory_advantages(inputs(rewards, groups), config)
    branches = [i for i, (_, _, count) in enumerate(members) for _ in range(count)]
    branched = trajectory_advantages(
        inputs([rewards[i] for i in branches], [groups[i] for i in branches], episodes=branches), config
    )
    np.testing.assert_allclose(branched, once[branches], rtol=1e-7, atol=1e-7)


def test_leaving_one_out_leaves_all_branches_of_the_episode_out() -> None:
    """Branches may have rewards of their own; the baseline of each is the mean of the *other* episodes."""
    config = AlgorithmConfig(reward_norm=NormConfig(std=Level.NONE, leave_one_out=True))
    result = trajectory_advantages(inputs([1.0, 0.0, 3.0, 6.0], [5, 5, 5, 5], episodes=[0, 0, 1, 2]), config)
    np.testing.assert_allclose(result, [1 - 4.5, 0 - 4.5, 3 - 3.25, 6 - 1.75], atol=1e-12)


@pytest.mark.parametrize("std", Level)
def test_a_lone_episode_has_no_advantage_however_many_branches(std: Level) -> None:
    config = AlgorithmConfig(reward_norm=NormConfig(std=std))
    result = trajectory_advantages(inputs([1.0, 0.0], [0, 0], episodes=[4, 4]), config)
    np.testing.assert_array_equal(result, [0.0, 0.0])


NONE = (math.nan, math.nan)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [(1 - 0.25) / (0.5 + 1e-5), 0.0, 1 / math.sqrt(2), -1 / math.sqrt(2)]),
        ({"reward_norm": NormConfig(std=Level.NONE)}, [0.75, 0.0, 0.5, -0.5]),
        ({"reward_norm": NormConfig(std=Level.NONE), "reward_scale": 2.0, "reward_bias": 7.0}, [1.5, 0.0, 1.0, -1.0]),
        ({"reward_norm": NormConfig(mean=Level.NONE, std=Level.NONE)}, [1.0, 0.5, 1.0, 0.0]),
    ],
)
def test_a_lone_episode_is_held_against_its_baseline_and_others_against_their_group(
    fields: dict[str, Any], expected: list[float]
) -> None:
    """The second one is alone as well, and nothing came before it."""
    of = inputs([1.0, 0.5, 1.0, 0.0], [0, 1, 2, 2], baselines=[(0.25, 0.5), NONE, NONE, NONE])
    np.testing.assert_allclose(trajectory_advantages(of, AlgorithmConfig(**fields)), expected, rtol=1e-4)


def test_a_baseline_of_equal_rewards_has_no_deviation_to_divide_by() -> None:
    of = inputs([1.0, 0.0], [0, 1], baselines=[(0.75, 0.0), (0.0, 0.0)])
    np.testing.assert_allclose(trajectory_advantages(of, AlgorithmConfig()), [0.25, 0.0])


def test_what_has_no_tokens_is_nothing_to_compare_with() -> None:
    config = NormConfig(mean=Level.BATCH, std=Level.NONE, leave_one_out=True)
    result = normalise(np.array([1.0, 0.0]), np.array([0, 0]), config, weights=np.array([5.0, 0.0]))
    np.testing.assert_array_equal(result, [0.0, 0.0])


def test_episode_numbers_count_within_their_group_only() -> None:
    apart = trajectory_advantages(inputs([1.0, 0.0, 0.0, 1.0], [0, 0, 1, 1], episodes=[0, 1, 0, 1]), AlgorithmConfig())
    np.testing.assert_allclose(apart, [0.70709678, -0.70709678, -0.70709678, 0.70709678], atol=1e-7)


def test_overlong_penalty_agrees_with_recorded_numbers_up_to_the_limit() -> None:
    case = CASES["overlong"]
    config = OverlongConfig(tokens=case["tokens"], factor=case["factor"])
    penalty = overlong_penalty(np.array(case["generated"]), case["max_new_tokens"], config)
    # The last answer is longer than the limit. The recorded system goes on below -factor; DAPO does not.
    expected = [*case["penalised"][:3], -case["factor"]]
    np.testing.assert_allclose(np.array(case["rewards"]) + penalty, expected, atol=1e-12)


def test_no_penalty_zone_is_no_penalty() -> None:
    np.testing.assert_array_equal(overlong_penalty(np.array([1, 99]), 8, OverlongConfig()), [0.0, 0.0])


@pytest.mark.parametrize("name", CASES["advantages"])
def test_trajectory_advantages_agree_with_recorded_numbers(name: str) -> None:
    """The last trainable token's advantage of each trajectory: without a discount every token has the same."""
    case = CASES["advantages"][name]
    config = AlgorithmConfig(reward_norm=norm(case["reward_norm"]), adv_norm=norm(case["adv_norm"]), **case["config"])
    expected = list(case["advantages"])
    if name == "mask_no_eos":
        # The recorded system takes the longest sample of a batch for truncated, by its length, and voids its reward.
        # The stop reason says that it ended by itself: it keeps the scaled reward (0 - 0.5) * 10.
        assert expected[2] == 0.0
        expected[2] = -5.0
    result = trajectory_advantages(inputs(case["rewards"], case["groups"], generated=case["generated"]), config)
    np.testing.assert_allclose(result, expected, atol=1e-5)


def test_the_penalty_acts_before_the_group_is_compared() -> None:
    config = AlgorithmConfig(overlong=OverlongConfig(tokens=4, factor=1.0), reward_norm=NormConfig(std=Level.NONE))
    result = trajectory_advantages(inputs([1.0, 1.0], [0, 0], generated=[4, 6]), config)
    np.testing.assert_allclose(result, [0.25, -0.25], atol=1e-12)


@pytest.mark.parametrize("adv_norm", [Level.NONE, Level.BATCH])
def test_E17_an_empty_step_and_a_step_without_tokens_are_no_crash(adv_norm: Level) -> None:
    config = AlgorithmConfig(adv_norm=NormConfig(mean=adv_norm, std=adv_norm))
    assert trajectory_advantages(inputs([], []), config).shape == (0,)
    assert np.isfinite(trajectory_advantages(inputs([1.0, 0.0], [0, 0], generated=[0, 0]), config)).all()
