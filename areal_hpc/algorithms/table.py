"""The menu: an algorithm is its recipe (what its settings are), its advantages and its loss.

A new algorithm is a new recipe, and a new loss if it needs one; one of your own is ``algorithm.loss``, no row at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from areal_hpc.algorithms.advantages import (
    AdvantageInputs,
    Float64Array,
    given_rewards,
    no_rewards,
    shaped_rewards,
    trajectory_advantages,
)
from areal_hpc.algorithms.losses import cispo_loss, clipped_loss, gspo_loss, sapo_loss, sft_loss
from areal_hpc.algorithms.objective import LossInputs, LossOutput
from areal_hpc.algorithms.preferences import PairLoss, bradley_terry_loss, dpo_loss
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.recipes import Data, Recipe, recipe_of

AdvantageFunction = Callable[[AdvantageInputs, AlgorithmConfig], Float64Array]
LossFunction = Callable[[LossInputs, AlgorithmConfig], LossOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row.

    ``outcomes`` gives one number for each trajectory: its advantage, which all its tokens share, or with
    ``token_level`` its shaped reward, from which token advantages follow once the batch has been through the models.
    """

    outcomes: AdvantageFunction
    loss: LossFunction
    """The loss of tokens; not used where there is a loss of pairs."""
    pair_loss: PairLoss | None
    token_level: bool
    critic: bool
    data: Data


LOSSES: Mapping[str, LossFunction] = {
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "sft": sft_loss,
}
"""Losses of the names that do not have the clipped one."""
PAIR_LOSSES: Mapping[str, PairLoss] = {"dpo": dpo_loss, "reward_model": bradley_terry_loss}


def find(name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
        ConfigError: there is none; names the nearest names.
    """
    recipe = recipe_of(name)
    return Algorithm(
        outcomes=_outcomes_of(recipe),
        loss=LOSSES.get(name, clipped_loss),
        pair_loss=PAIR_LOSSES.get(name),
        token_level=recipe.token_level,
        critic=recipe.critic,
        data=recipe.data,
    )


def _outcomes_of(recipe: Recipe) -> AdvantageFunction:
    if recipe.data.is_offline:
        return given_rewards
    if not recipe.outcome:
        return no_rewards
    return shaped_rewards if recipe.token_level else trajectory_advantages
