"""The fixed order of deterministic training: which step a position belongs to, and which weights sample it.

    step(p)    = p // groups_per_step                   a step trains on its own positions, less those that were dropped
    version(p) = max(0, step(p) - max_staleness)        all its tokens are sampled by these weights (steps done)

With 2 groups a step and a bound of 1:

    position   0 1   2 3   4 5   6 7   8 9
    step        0     1     2     3     4
    version     0     0     1     2     3

A position is reserved while its weights are the published ones. Newer weights are published only when every position
of older ones is settled: sealed or dropped, and durable. So what a position holds follows from its number and the
weights before it, by induction from the first weights on; who made it, when, and how often it was begun play no part.
One bound follows: no more than (max_staleness + 1) * groups_per_step positions are outstanding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areal_hpc.config.schema import Config
from areal_hpc.errors import GenerationError
from areal_hpc.types import TrajectoryGroup, WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedOrder:
    """Arithmetic on positions; versions and steps are counted in optimizer steps done."""

    groups_per_step: int
    max_staleness: int

    def version_of(self, position: int) -> int:
        """The weights that sample ``position``."""
        return max(0, position // self.groups_per_step - self.max_staleness)

    def positions_of(self, step: int) -> range:
        """What the weights of version ``step`` are trained on, to become version ``step + 1``."""
        return range(step * self.groups_per_step, (step + 1) * self.groups_per_step)

    def num_before(self, version: int) -> int:
        """How many positions weights older than ``version`` sample: the first so many."""
        return (version + self.max_staleness) * self.groups_per_step if version > 0 else 0

    def admits(self, position: int, published: WeightVersion) -> bool:
        """Whether an episode for ``position`` may begin while these weights are the published ones."""
        version = self.version_of(position)
        assert published.step <= version, f"position {position} is for version {version}; {published} is published"
        return published.step == version

    def check(self, group: TrajectoryGroup) -> None:
        """Check that the weights of the group's position sampled all of its tokens.

        Raises:
            GenerationError: an engine sampled some of the tokens by other weights than the position's.
        """
        wanted = self.version_of(group.position)
        found = {int(v) for t in group.trajectories for v in np.unique(t.versions[t.loss_mask])}
        if found - {wanted}:
            raise GenerationError(
                f"position {group.position} must be sampled by weights of version {wanted} and was by {sorted(found)}; "
                "an engine serves other weights than it was told, so this run would not be reproducible"
            )


def fixed_order(config: Config) -> FixedOrder | None:
    """The order that ``deterministic`` asks for; None where the oldest groups come first."""
    if not config.deterministic:
        return None
    return FixedOrder(groups_per_step=config.algorithm.groups_per_step, max_staleness=config.buffer.max_staleness)
