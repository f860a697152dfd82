"""Steps for the tests of the archive: what a trainer would have claimed, with tokens that say whose they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_hpc.types import (
    ArchivedStep,
    GroupRef,
    StopReason,
    TrainedStep,
    Trajectory,
    TrajectoryGroup,
    WeightVersion,
)


def trajectory(
    prompt: Sequence[int],
    answer: Sequence[tuple[int, int]],
    *,
    reward: float = 1.0,
    stop: StopReason = StopReason.STOP,
    episode: int = 0,
) -> Trajectory:
    """``answer``: (token, version), where version -1 is a token that nobody sampled; log-probs are -0.5."""
    versions = np.array([-1] * len(prompt) + [version for _, version in answer], dtype=np.int32)
    return Trajectory(
        token_ids=np.array([*prompt, *(token for token, _ in answer)], dtype=np.int32),
        loss_mask=versions >= 0,
        logprobs=np.where(versions >= 0, np.float32(-0.5), np.float32(0)),
        versions=versions,
        reward=reward,
        stop=stop,
        episode=episode,
    )


def group(position: int, *trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(position=position, prompt_id=f"train-{position}", trajectories=trajectories)


def ref_to(group: TrajectoryGroup, version: WeightVersion, *, step: int, row: int) -> GroupRef:
    """A reference that points into the archive, as one that was read from there does."""
    trajectories = group.trajectories
    return GroupRef(
        chain="00000.00000001.000000.0a1b2c3d",
        segment=step,
        offset=row,
        seq=0,
        ticket=group.position,
        position=group.position,
        prompt_id=group.prompt_id,
        version=version,
        rewards=tuple(t.reward for t in trajectories),
        lengths=tuple(t.token_ids.size for t in trajectories),
        generated=tuple(t.num_generated for t in trajectories),
        truncated=tuple(t.stop is StopReason.LENGTH for t in trajectories),
        episodes=tuple(t.episode for t in trajectories),
        baseline=group.baseline,
    )


def step_with(
    version: WeightVersion, groups: Sequence[TrajectoryGroup], *, damaged: Sequence[int] = (), proximal: float = -0.5
) -> ArchivedStep:
    """A step of these groups, sampled one step before; advantages are 0, 1, 2 ..., ``damaged`` rows have no tokens."""
    sampled = WeightVersion(version.epoch, version.step - 1)
    trajectories = [t for g in groups for t in g.trajectories]
    starts = np.cumsum([0, *(len(g.trajectories) for g in groups)])
    lost = {n for row in damaged for n in range(starts[row], starts[row + 1])}
    return ArchivedStep(
        step=TrainedStep(
            version=version,
            refs=tuple(ref_to(g, sampled, step=version.step, row=row) for row, g in enumerate(groups)),
            readable=tuple(row not in damaged for row in range(len(groups))),
            advantages=np.arange(len(trajectories), dtype=np.float32),
            proximal={
                n: np.where(t.loss_mask, np.float32(proximal), np.float32(0))
                for n, t in enumerate(trajectories)
                if n not in lost and t.token_ids.size
            },
        ),
        groups={row: g for row, g in enumerate(groups) if row not in damaged},
    )


def assert_equal(found: ArchivedStep, expected: ArchivedStep) -> None:
    """Every field, arrays with their dtypes."""
    assert (found.step.version, found.step.refs) == (expected.step.version, expected.step.refs)
    assert found.step.readable == expected.step.readable
    _same_array(found.step.advantages, expected.step.advantages)
    assert found.step.proximal.keys() == expected.step.proximal.keys()
    for n, values in found.step.proximal.items():
        _same_array(values, expected.step.proximal[n])
    assert found.groups.keys() == expected.groups.keys()
    for g, group_ in found.groups.items():
        other = expected.groups[g]
        assert (group_.position, group_.prompt_id) == (other.position, other.prompt_id)
        assert group_.baseline == other.baseline
        for one, two in zip(group_.trajectories, other.trajectories, strict=True):
            assert (one.reward, one.stop, one.episode) == (two.reward, two.stop, two.episode)
            for name in ("token_ids", "loss_mask", "logprobs", "versions"):
                _same_array(getattr(one, name), getattr(two, name))


def _same_array(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
