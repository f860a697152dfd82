"""The trainer's end of an archive, in place of the ring's: the same groups for the same steps, in the same order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_hpc.buffer.archive import archived_steps, read_step
from areal_hpc.errors import CorruptRecord, DataError
from areal_hpc.routing import Routing
from areal_hpc.run_dir import RunDir
from areal_hpc.types import ArchivedStep, Drop, Dropped, GroupRef, TrajectoryGroup, WeightVersion


class ReplayReader:
    """A ``RolloutReader`` of what ``run`` has archived; any rank may ``read``, as from the ring.

    Nothing can be late, nobody waits for a slot, and what was left out then is left out again. So ``claim`` never
    answers None, and what would tell writers or delete files does nothing.

    Args:
        routing: of the trainer's model, where that is to replay the experts that engines have recorded.

    Raises:
        DataError: by ``claim`` and ``read``: the step is not in the archive, its file is damaged, or it has records of
            another model's experts.
    """

    def __init__(self, run: RunDir, routing: Routing | None = None) -> None:
        self._run, self._routing = run, routing
        self._paths: Mapping[int, Path] = archived_steps(run)
        self._loaded: ArchivedStep | None = None
        self._staleness: list[int] = []  # of the groups claimed last, in steps

    def claim(self, num_groups: int, version: WeightVersion) -> list[GroupRef]:
        """The groups of the step after ``version``, however many they are."""
        refs = self._step(version.step + 1).step.refs
        self._staleness = [version.step - ref.version.step for ref in refs]
        return list(refs)

    def read(self, ref: GroupRef) -> TrajectoryGroup:
        """The group as it was archived.

        Raises:
            CorruptRecord: the group's bytes were damaged when it was trained, so that step went on without it.
        """
        group = self._step(ref.segment).groups.get(ref.offset)
        if group is None:
            raise CorruptRecord(f"position {ref.position} of step {ref.segment} was not readable then either")
        return group

    def _step(self, number: int) -> ArchivedStep:
        if self._loaded is None or self._loaded.step.version.step != number:
            if number not in self._paths:
                raise DataError(f"step {number} is not in {self._run.archive}; set replay.to_step to one below it")
            self._loaded = read_step(self._paths[number], number)
            self._check_experts(self._loaded)
        return self._loaded

    def _check_experts(self, archived: ArchivedStep) -> None:
        if self._routing is None:
            return
        for trajectory in (t for group in archived.groups.values() for t in group.trajectories):
            if trajectory.experts is not None and (other := self._routing.misfit(trajectory.experts)):
                raise DataError(
                    f"step {archived.step.version.step} of {self._run.archive} was sampled by a mixture of {other}, "
                    f"and model.path has {self._routing}; replay with the run's own model, or one of its shape"
                )

    def may_publish(self, version: WeightVersion) -> bool:
        """Nobody samples from older weights."""
        return True

    def poll(self) -> None:
        """There are no writers."""

    def discard(self, ref: GroupRef, reason: Drop) -> None:
        """Nobody runs it again."""

    def take_dropped(self) -> list[Dropped]:
        """Nothing that was dropped then is archived."""
        return []

    def release(self, version: WeightVersion) -> None:
        """Nobody waits for a slot."""

    def covered(self, state: Mapping[str, Any]) -> None:
        """Nothing is deleted."""

    def waiting_for(self) -> str:
        return "nothing: an archive is there or not"

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the step of the checkpoint says all."""
        return {}

    def stats(self) -> Mapping[str, float]:
        ages = self._staleness
        return {"staleness_mean": sum(ages) / len(ages), "staleness_max": max(ages)} if ages else {}
