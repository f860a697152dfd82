"""The carriers refuse what cannot be true of them."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest

from areal_hpc import errors
from areal_hpc.types import (
    NOT_SAMPLED,
    Baseline,
    Batch,
    Completion,
    Drop,
    GroupRef,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    WeightVersion,
    episode_means,
)


def completion(logprobs: list[float], num_versions: int) -> Completion:
    return Completion(
        token_ids=np.arange(len(logprobs), dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.zeros(num_versions, dtype=np.int32),
        stop=StopReason.STOP,
    )


def trajectory(reward: float = 1.0, versions: tuple[int, ...] = (NOT_SAMPLED, 3, 2)) -> Trajectory:
    return Trajectory(
        token_ids=np.array([5, 6, 7], dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.array([0.0, -1.0, -2.0], dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
        reward=reward,
        stop=StopReason.STOP,
    )


def test_F5_a_token_without_a_logprob_or_a_version_is_refused() -> None:
    with pytest.raises(ValueError, match="one log-prob and one version per token"):
        completion([-1.0, -2.0], num_versions=1)


@pytest.mark.parametrize("logprob", [float("nan"), float("inf"), float("-inf")])
def test_D23_a_logprob_that_is_not_finite_is_refused(logprob: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        completion([-1.0, logprob], num_versions=2)


def test_an_empty_answer_is_legal() -> None:
    assert completion([], num_versions=0).token_ids.size == 0


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        trajectory(reward)


def test_what_was_sampled_is_counted_by_the_mask() -> None:
    assert trajectory().num_generated == 2


@pytest.mark.parametrize(
    ("values", "episodes", "expected"),
    [
        ([1.0, 0.0, 0.0], [7, 2, 2], [0.0, 1.0]),
        ([0.25, 0.75, 2.0], [4, 4, 4], [1.0]),
        ([3.0, 4.0], [0, 1], [3.0, 4.0]),
        ([], [], []),
    ],
)
def test_an_episode_counts_once_however_many_branches_it_has(
    values: list[float], episodes: list[int], expected: list[float]
) -> None:
    assert episode_means(values, episodes).tolist() == expected


def test_a_group_gathers_rewards_and_tokens() -> None:
    group = TrajectoryGroup(position=0, prompt_id="d/0", trajectories=(trajectory(0.0), trajectory(1.0)))
    assert group.rewards.tolist() == [0.0, 1.0]
    assert group.num_tokens == 6


def test_an_aborted_answer_is_not_complete() -> None:
    assert [reason for reason in StopReason if not reason.is_complete()] == [StopReason.ABORT]


def test_only_what_was_judged_is_consumed_by_its_drop() -> None:
    assert {reason for reason in Drop if not reason.reissues()} == {Drop.FILTERED, Drop.FAILED}


def test_a_group_reference_survives_json() -> None:
    ref = GroupRef(
        chain="00000.1.0.ab",
        segment=2,
        offset=4096,
        seq=7,
        ticket=3,
        position=11,
        prompt_id="d/11",
        version=WeightVersion(1, 5),
        rewards=(0.0, 1.0),
        lengths=(10, 12),
        generated=(4, 6),
        truncated=(False, True),
        episodes=(0, 1),
    )
    for one in (ref, replace(ref, baseline=Baseline(0.5, 0.25))):
        assert GroupRef.from_record(json.loads(json.dumps(one.record()))) == one
    assert ref.num_tokens == 22


def test_selecting_sequences_keeps_each_token_with_its_values() -> None:
    total = 9
    batch = Batch(
        token_ids=np.arange(total, dtype=np.int32),
        loss_mask=np.arange(total) % 2 == 0,
        behaviour=np.arange(total, dtype=np.float32) / 10,
        versions=np.arange(total, dtype=np.int32) * 2,
        advantages=np.arange(total, dtype=np.float32) * 3,
        boundaries=np.array([0, 2, 5, 9], dtype=np.int32),
    ).with_proximal(np.arange(total, dtype=np.float32) / 7)
    chosen = batch.select([2, 0])
    expected = [5, 6, 7, 8, 0, 1]
    assert chosen.token_ids.tolist() == expected
    assert chosen.boundaries.tolist() == [0, 4, 6]
    assert chosen.lengths.tolist() == [4, 2]
    assert chosen.versions.tolist() == [2 * i for i in expected]
    assert chosen.loss_mask.tolist() == [i % 2 == 0 for i in expected]
    assert chosen.proximal is not None
    assert chosen.proximal.tolist() == [np.float32(i / 7) for i in expected]
    assert (chosen.num_sequences, chosen.num_trainable) == (2, 3)
    assert batch.select([]).num_sequences == 0


def test_every_error_crosses_process_borders() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 10
    for kind in kinds:
        copy = pickle.loads(pickle.dumps(kind("rank 3: do this")))
        assert type(copy) is kind
        assert str(copy) == "rank 3: do this"
    assert issubclass(errors.ConfigError, ValueError)
