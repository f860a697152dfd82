"""The menu: a name, how its advantages are computed, its loss, and what it needs. A new algorithm is a new row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from areal_hpc.algorithms.advantages import AdvantageInputs, Float64Array, trajectory_advantages
from areal_hpc.algorithms.losses import LossInputs, LossOutput, clipped_loss
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.algorithm_checks import check_name

AdvantageFunction = Callable[[AdvantageInputs, AlgorithmConfig], Float64Array]
LossFunction = Callable[[LossInputs, AlgorithmConfig], LossOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row. ``needs`` names the models besides the policy that must run: reference, critic, teacher."""

    name: str
    advantages: AdvantageFunction
    loss: LossFunction
    needs: frozenset[str] = frozenset()


ALGORITHMS: dict[str, Algorithm] = {
    row.name: row for row in (Algorithm(name="grpo", advantages=trajectory_advantages, loss=clipped_loss),)
}


def find(name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
        ConfigError: there is none; names the nearest names.
    """
    check_name(name)
    return ALGORITHMS[name]
