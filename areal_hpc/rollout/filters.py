"""Which finished groups are worth training on: a pure judgement with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from areal_hpc.config.schema import FilterConfig
from areal_hpc.types import StopReason, Trajectory


class Verdict(StrEnum):
    """What a filter says of a group."""

    KEEP = "keep"
    TOO_SMALL = "too_small"
    """Fewer episodes than a group-relative advantage needs."""
    OVERLONG = "overlong"
    """Too large a share of its answers was cut by length (DAPO, arXiv:2503.14476, section 3.4)."""
    ZERO_VARIANCE = "zero_variance"
    """All rewards are equal: its advantages are zero (DAPO's dynamic sampling, section 3.2)."""

    def is_keep(self) -> bool:
        return self is Verdict.KEEP


def judge(trajectories: Sequence[Trajectory], config: FilterConfig) -> Verdict:
    """The first reason to refuse the group, in the order of ``Verdict``, else KEEP.

    The branches of one episode (equal ``episode``) count once: size and length are judged by episodes.
    """
    episodes = {trajectory.episode for trajectory in trajectories}
    cut = {trajectory.episode for trajectory in trajectories if trajectory.stop is StopReason.LENGTH}
    if len(episodes) < max(config.min_group_size, 1):
        return Verdict.TOO_SMALL
    if len(cut) > config.max_overlong_fraction * len(episodes):
        return Verdict.OVERLONG
    if config.zero_variance and len({trajectory.reward for trajectory in trajectories}) == 1:
        return Verdict.ZERO_VARIANCE
    return Verdict.KEEP
