"""The arithmetic of the fixed order, against what it is made to guarantee."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from areal_hpc.buffer.order import FixedOrder, fixed_order
from areal_hpc.config.keys import with_value
from areal_hpc.config.schema import Config, ModelConfig, PromptsConfig, RolloutConfig, TrainerConfig
from areal_hpc.errors import GenerationError
from areal_hpc.types import StopReason, Trajectory, TrajectoryGroup, WeightVersion

ORDERS = st.builds(FixedOrder, groups_per_step=st.integers(1, 6), max_staleness=st.integers(0, 4))


def test_the_worked_example() -> None:
    order = FixedOrder(groups_per_step=2, max_staleness=1)
    assert [order.version_of(position) for position in range(10)] == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert list(order.positions_of(2)) == [4, 5]
    assert [order.num_before(version) for version in range(4)] == [0, 4, 6, 8]


@given(ORDERS, st.integers(0, 30))
def test_every_position_is_in_one_step_and_never_too_old_for_it(order: FixedOrder, num_steps: int) -> None:
    positions = [position for step in range(num_steps) for position in order.positions_of(step)]
    assert positions == list(range(num_steps * order.groups_per_step))
    for step in range(num_steps):
        ages = {step - order.version_of(position) for position in order.positions_of(step)}
        assert ages == {min(step, order.max_staleness)}


@given(ORDERS, st.integers(0, 30))
def test_what_older_weights_sample_is_a_beginning_that_holds_the_next_step(order: FixedOrder, version: int) -> None:
    """So weights may be published before the step they make possible, and no step waits for weights that come later."""
    older = [position for position in range(300) if order.version_of(position) < version]
    assert older == list(range(order.num_before(version)))
    assert order.num_before(version) >= order.positions_of(version - 1).stop
    outstanding = [p for p in range(300) if order.version_of(p) <= version and p >= order.positions_of(version).start]
    assert len(outstanding) == (order.max_staleness + 1) * order.groups_per_step


def test_a_position_begins_under_its_own_weights_only() -> None:
    order = FixedOrder(groups_per_step=2, max_staleness=1)
    assert not order.admits(6, WeightVersion(3, 1))
    assert order.admits(6, WeightVersion(3, 2))
    with pytest.raises(AssertionError, match="position 6 is for version 2"):
        order.admits(6, WeightVersion(3, 3))


def group(versions: list[int], position: int = 4) -> TrajectoryGroup:
    sampled = np.array(versions) >= 0
    trajectory = Trajectory(
        token_ids=np.zeros(len(versions), dtype=np.int32),
        loss_mask=sampled,
        logprobs=np.zeros(len(versions), dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
        reward=0.0,
        stop=StopReason.STOP,
    )
    return TrajectoryGroup(position=position, prompt_id="p", trajectories=(trajectory,))


@pytest.mark.parametrize("versions", [[-1, 1, 2], [-1, 0, 1], [2, 2]])
def test_a_token_of_other_weights_is_refused(versions: list[int]) -> None:
    order = FixedOrder(groups_per_step=2, max_staleness=1)
    order.check(group([-1, -1, 1, 1]))
    order.check(group([-1]))
    with pytest.raises(GenerationError, match=r"position 4 must be sampled by weights of version 1 and was by \["):
        order.check(group(versions))


def test_only_deterministic_training_has_an_order() -> None:
    config = Config(
        name="a",
        model=ModelConfig(path="m"),
        prompts=PromptsConfig(train="p"),
        rollout=RolloutConfig(reward="m:f"),
        trainer=TrainerConfig(total_steps=1),
    )
    assert fixed_order(config) is None
    assert fixed_order(with_value(config, "deterministic", True)) == FixedOrder(groups_per_step=16, max_staleness=2)
