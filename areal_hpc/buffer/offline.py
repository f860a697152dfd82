"""The trainer's end of a data set, in place of the ring's: the next groups in the stream's order, as often as it takes.

    refs = reader.claim(groups_per_step, version)      reads and tokenizes them; too long ones are dropped as filtered
    groups = [reader.read(ref) for ref in refs]
    ...
    reader.release(version + 1)                        what was claimed is consumed

Nothing is outstanding but the step's own groups, nobody has to be told of anything, and nothing can be late. The state
is the set of consumed positions, as the ring's is, so journal, checkpoints and proof are those of any run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal_hpc.errors import DataError
from areal_hpc.types import Drop, Dropped, GroupRef, TrajectoryGroup, WeightVersion
from areal_hpc.watermark import Watermark

CHAIN = "data"
"""What stands for the name of a log in references to a data set's groups; their ticket is their position."""


class OfflineReader:
    """A ``RolloutReader`` of given answers.

    Args:
        group_at: the group at a position of the endless stream.
        num_rows: positions after which the stream begins again.
        max_tokens: a group with a longer trajectory is left out.
        state: of the checkpoint that is gone on from.
    """

    def __init__(
        self,
        group_at: Callable[[int], TrajectoryGroup],
        *,
        num_rows: int,
        max_tokens: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._group_at, self._num_rows, self._max_tokens = group_at, num_rows, max_tokens
        self._consumed = 0 if state is None else Watermark.from_state(state["consumed"]).low
        self._claimed = self._consumed
        self._groups: dict[int, TrajectoryGroup] = {}
        self._too_long: list[int] = []
        self._untold: list[Dropped] = []

    def claim(self, num_groups: int, version: WeightVersion) -> list[GroupRef]:
        """The next groups; what an earlier claim took and no step was trained on comes again.

        Raises:
            DataError: not one row of the whole data set is short enough, or a row cannot be used.
        """
        self._groups, self._too_long, position = {}, [], self._consumed
        while len(self._groups) < num_groups:
            group = self._group_at(position)
            if max(t.token_ids.size for t in group.trajectories) <= self._max_tokens:
                self._groups[position] = group
            else:
                self._too_long.append(position)
            position += 1
            if len(self._too_long) >= 2 * self._num_rows and not self._groups:  # one data epoch at least is in them
                raise DataError(
                    f"each of the {self._num_rows} rows is longer than model.max_tokens {self._max_tokens}; raise it"
                )
        self._claimed = position
        return [_ref(group, version) for group in self._groups.values()]

    def read(self, ref: GroupRef) -> TrajectoryGroup:
        return self._groups[ref.position] if ref.position in self._groups else self._group_at(ref.position)

    def may_publish(self, version: WeightVersion) -> bool:
        """Nobody samples from older weights."""
        return True

    def poll(self) -> None:
        """There are no writers."""

    def discard(self, ref: GroupRef, reason: Drop) -> None:
        raise AssertionError("a data set has no damaged records")

    def take_dropped(self) -> list[Dropped]:
        """Rows that were too long, once the step that passed over them is done."""
        told, self._untold = self._untold, []
        return told

    def release(self, version: WeightVersion) -> None:
        """The step is done: what was claimed for it is consumed, and so is what was passed over."""
        self._consumed = self._claimed
        self._untold += [
            Dropped(chain=CHAIN, ticket=position, position=position, reason=Drop.FILTERED, consumed=True)
            for position in self._too_long
        ]
        self._too_long = []

    def waiting_for(self) -> str:
        return "nothing: a row is there or not"

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": Watermark(self._consumed).state_dict()}

    def covered(self, state: Mapping[str, Any]) -> None:
        """Nothing is deleted."""

    def stats(self) -> Mapping[str, float]:
        return {}


def _ref(group: TrajectoryGroup, version: WeightVersion) -> GroupRef:
    trajectories = group.trajectories
    return GroupRef(
        chain=CHAIN,
        segment=0,
        offset=0,
        seq=0,
        ticket=group.position,
        position=group.position,
        prompt_id=group.prompt_id,
        version=version,
        rewards=tuple(t.reward for t in trajectories),
        lengths=tuple(int(t.token_ids.size) for t in trajectories),
        generated=tuple(t.num_generated for t in trajectories),
        truncated=tuple(False for _ in trajectories),
        episodes=tuple(t.episode for t in trajectories),
    )
