"""A data set in place of the ring: the same calls, the stream's order, nothing lost or taken twice."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.buffer.offline import OfflineReader
from areal_hpc.config.schema import EvaluationConfig
from areal_hpc.errors import DataError
from areal_hpc.roles.wiring.evaluations import is_asked_for
from areal_hpc.types import Drop, StopReason, Trajectory, TrajectoryGroup, WeightVersion
from areal_hpc.watermark import Watermark


def group(position: int, length: int) -> TrajectoryGroup:
    trajectory = Trajectory(
        token_ids=np.full(length, position, dtype=np.int32),
        loss_mask=np.arange(length) > 0,
        logprobs=np.zeros(length, dtype=np.float32),
        versions=np.full(length, -1, dtype=np.int32),
        reward=1.0,
        stop=StopReason.STOP,
    )
    return TrajectoryGroup(position=position, prompt_id=f"row/{position}", trajectories=(trajectory,))


def reader_of(lengths: Sequence[int], state: dict[str, object] | None = None) -> OfflineReader:
    """A data set whose rows have these lengths, in the order of the file."""
    return OfflineReader(
        lambda position: group(position, lengths[position % len(lengths)]),
        num_rows=len(lengths),
        max_tokens=8,
        state=json.loads(json.dumps(state)) if state else None,
    )


def step(reader: OfflineReader, number: int, num_groups: int = 2) -> list[int]:
    """One step as the loop does it: the positions that it was trained on."""
    refs = reader.claim(num_groups, WeightVersion(1, number))
    assert all(reader.read(ref).position == ref.position for ref in refs)
    assert all(ref.version.step == number for ref in refs)
    reader.release(WeightVersion(1, number + 1))
    return [ref.position for ref in refs]


def test_steps_take_the_stream_in_order_and_begin_it_again() -> None:
    reader = reader_of([3, 4, 5])
    reader.release(WeightVersion(1, 0))  # the start's own announcement
    assert [step(reader, number) for number in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert reader.state_dict() == {"consumed": {"low": 6, "above": []}}
    assert reader.take_dropped() == []


def test_what_was_claimed_and_not_trained_on_comes_again() -> None:
    """A stop request is looked at after the claim: the checkpoint then made must not count it."""
    reader = reader_of([3, 4, 5])
    step(reader, 0)
    reader.claim(2, WeightVersion(1, 1))
    state = reader.state_dict()
    assert Watermark.from_state(state["consumed"]) == Watermark(2)
    assert reader.take_dropped() == []
    assert step(reader_of([3, 4, 5], state), 1) == [2, 3]


def test_rows_that_are_too_long_are_dropped_and_told_of_with_their_step() -> None:
    reader = reader_of([3, 9, 4, 99, 5])
    assert [ref.position for ref in reader.claim(2, WeightVersion(1, 0))] == [0, 2]
    assert reader.take_dropped() == []  # the step may never be done
    reader.release(WeightVersion(1, 1))
    (dropped,) = reader.take_dropped()
    assert (dropped.position, dropped.reason, dropped.consumed) == (1, Drop.FILTERED, True)
    assert step(reader, 1) == [4, 5]
    assert [one.position for one in reader.take_dropped()] == [3]


@given(
    lengths=st.lists(st.integers(2, 11), min_size=1, max_size=9),
    stops=st.lists(st.booleans(), min_size=1, max_size=12),
    num_groups=st.integers(1, 4),
)
def test_C3_every_position_is_consumed_once_whatever_stops_the_run(
    lengths: list[int], stops: list[bool], num_groups: int
) -> None:
    if min(lengths) > 8:
        with pytest.raises(DataError, match=r"rows is longer than model.max_tokens 8; raise it"):
            reader_of(lengths).claim(num_groups, WeightVersion(1, 0))
        return
    reader, consumed = reader_of(lengths), list[int]()
    for number, stop in enumerate(stops):
        if stop:
            reader.claim(num_groups, WeightVersion(1, number))
            reader = reader_of(lengths, reader.state_dict())
        trained = step(reader, number, num_groups)
        assert len(trained) == num_groups
        consumed += [*trained, *(one.position for one in reader.take_dropped())]
    assert sorted(consumed) == list(range(len(consumed)))
    assert reader.state_dict()["consumed"]["low"] == len(consumed)


def test_another_rank_reads_what_it_has_not_claimed() -> None:
    refs = reader_of([3, 4]).claim(1, WeightVersion(1, 0))
    assert reader_of([3, 4]).read(refs[0]).trajectories[0].token_ids.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("every", "at_start", "due"), [(0, True, []), (2, True, [0, 2, 4, 5]), (2, False, [2, 4, 5]), (9, False, [5])]
)
def test_evaluations_are_due_at_the_start_each_so_many_steps_and_at_the_end(
    every: int, at_start: bool, due: list[int]
) -> None:
    config = EvaluationConfig(every_steps=every, at_start=at_start)
    assert [step for step in range(6) if is_asked_for(step, config, 5)] == due
