"""Which groups are kept, and the reason where one is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.config.schema import FilterConfig
from areal_hpc.rollout.filters import Verdict, judge
from areal_hpc.types import StopReason, Trajectory

OPEN = FilterConfig(zero_variance=False, max_overlong_fraction=1.0, min_group_size=1)


def trajectory(reward: float, *, cut: bool = False, episode: int = 0) -> Trajectory:
    one = np.ones(1, dtype=np.int32)
    return Trajectory(
        token_ids=one,
        loss_mask=np.ones(1, dtype=np.bool_),
        logprobs=np.zeros(1, dtype=np.float32),
        versions=one,
        reward=reward,
        stop=StopReason.LENGTH if cut else StopReason.STOP,
        episode=episode,
    )


def group(*rewards: float, cut: int = 0) -> list[Trajectory]:
    return [trajectory(reward, cut=n < cut, episode=n) for n, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("trajectories", "config", "verdict"),
    [
        (group(0, 1), FilterConfig(), Verdict.KEEP),
        (group(1, 1), FilterConfig(), Verdict.ZERO_VARIANCE),
        (group(0, 0, 0), FilterConfig(), Verdict.ZERO_VARIANCE),
        (group(1, 1), OPEN, Verdict.KEEP),
        (group(0.1, 0.1 + 1e-9), FilterConfig(), Verdict.KEEP),
        (group(1), FilterConfig(), Verdict.TOO_SMALL),
        (group(1), OPEN, Verdict.KEEP),
        ([], OPEN, Verdict.TOO_SMALL),
        ([], replace(OPEN, min_group_size=0), Verdict.TOO_SMALL),
        (group(0, 1, 0, 1, cut=2), replace(OPEN, max_overlong_fraction=0.5), Verdict.KEEP),
        (group(0, 1, 0, 1, cut=3), replace(OPEN, max_overlong_fraction=0.5), Verdict.OVERLONG),
        (group(0, 1, cut=1), replace(OPEN, max_overlong_fraction=0.0), Verdict.OVERLONG),
        (group(0, 1, cut=2), OPEN, Verdict.KEEP),
        (group(1, 1, cut=2), replace(OPEN, max_overlong_fraction=0.0, zero_variance=True), Verdict.OVERLONG),
    ],
)
def test_the_verdict_is_the_first_reason(
    trajectories: list[Trajectory], config: FilterConfig, verdict: Verdict
) -> None:
    assert judge(trajectories, config) is verdict
    assert verdict.is_keep() == (verdict is Verdict.KEEP)


def test_E11_branches_of_one_episode_count_once() -> None:
    branches = [trajectory(0, episode=0), trajectory(1, episode=0)]
    assert judge(branches, FilterConfig(min_group_size=2)) is Verdict.TOO_SMALL
    cut_twice = [trajectory(0, cut=True, episode=0), trajectory(0, cut=True, episode=0), *group(1, 1, 1)[1:]]
    assert judge(cut_twice, replace(OPEN, max_overlong_fraction=0.4)) is Verdict.KEEP


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_a_group_does_not_matter(rewards: list[float], random: object) -> None:
    trajectories = group(*rewards, cut=len(rewards) // 2)
    config = FilterConfig(max_overlong_fraction=0.5)
    assert judge(trajectories, config) is judge(trajectories[::-1], config)
