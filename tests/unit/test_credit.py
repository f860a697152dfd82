"""What follows from the models' words for the tokens of a step, with models that say what a test wants."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from areal_hpc.config.algorithm import (
    AlgorithmConfig,
    GaeConfig,
    KlConfig,
    KlEstimator,
    KlPlace,
    Level,
    NormConfig,
    ProximalMethod,
)
from areal_hpc.training.credit import assess
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import Batch

CASES = json.loads((Path(__file__).parents[1] / "data" / "algorithms.json").read_text(encoding="utf-8"))
NONE = NormConfig(mean=Level.NONE, std=Level.NONE)
RETURNS = AlgorithmConfig(name="reinforce_pp", reward_norm=NONE)
KL_REWARD = replace(RETURNS, kl=KlConfig(coef=0.1, place=KlPlace.REWARD, estimator=KlEstimator.K1))
PPO = AlgorithmConfig(name="ppo", reward_norm=NONE)


class Models:
    """A backend of three models whose answers are given, for one batch; notes who was asked."""

    def __init__(
        self, *, proximal: Any = None, reference: Any = None, values: Any = None, bootstrap: Any = None
    ) -> None:
        self.said = {"proximal": proximal, "reference": reference, "values": values, "bootstrap": bootstrap}
        self.asked: list[str] = []
        self.kl_coef = 0.1

    def _say(self, name: str) -> NDArray[np.float32]:
        self.asked.append(name)
        return np.array(self.said[name], dtype=np.float32)

    def logprobs(self, batch: Batch) -> NDArray[np.float32]:
        return batch.behaviour if self.said["proximal"] is None else self._say("proximal")

    def reference_logprobs(self, batch: Batch) -> NDArray[np.float32]:
        return self._say("reference")

    def values(self, batch: Batch) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return self._say("values"), self._say("bootstrap")


def batch(masks: Sequence[Sequence[int]], behaviour: Sequence[Sequence[float]] | None = None, **fields: Any) -> Batch:
    flat = np.array([m for mask in masks for m in mask], dtype=np.bool_)
    logprobs = np.zeros(flat.size) if behaviour is None else np.array([x for row in behaviour for x in row])
    settings = {"truncated": np.zeros(len(masks), dtype=np.bool_), **fields}
    return Batch(
        token_ids=np.zeros(flat.size, dtype=np.int32),
        loss_mask=flat,
        behaviour=logprobs.astype(np.float32),
        versions=np.where(flat, 0, -1).astype(np.int32),
        advantages=flat.astype(np.float32),
        boundaries=np.cumsum([0, *map(len, masks)], dtype=np.int32),
        **settings,
    )


def one(batch: Batch, outcomes: Sequence[float], models: Models, config: AlgorithmConfig) -> Batch:
    (found,) = assess([batch], [np.array(outcomes, dtype=np.float64)], models, config, Ranks())
    return found


def test_a_kl_in_the_reward_agrees_with_recorded_numbers() -> None:
    """Index t of the recorded arrays is token t + 1: they are already shifted to next-token prediction."""
    case = CASES["kl_reward"]
    reference = [[0.0, *row[:-1]] for row in case["rolled_reference"]]
    expected = np.array([[0.0, *row[:-1]] for row in case["rolled_advantages"]]).reshape(-1)
    models = Models(reference=np.array(reference).reshape(-1))
    found = one(batch(case["mask"], case["behaviour"]), case["rewards"], models, KL_REWARD)
    np.testing.assert_allclose(found.advantages[found.loss_mask], expected[found.loss_mask], atol=1e-5)
    assert not found.advantages[~found.loss_mask].any()


def test_without_a_kl_nobody_asks_a_reference_model() -> None:
    """The recorded system has a coefficient of 0.1 by default, takes 0 for the missing reference, and so rewards
    entropy. Here no coefficient stands without a model, and none is the default."""
    assert AlgorithmConfig().kl.coef == 0.0
    models = Models()
    found = one(batch([[0, 1, 1]], [[0.0, -0.5, -1.0]]), [1.0], models, RETURNS)
    assert found.advantages.tolist() == [0.0, 1.0, 1.0]
    assert models.asked == []
    assert found.reference is None


def test_E23_a_kl_counts_on_trainable_tokens_only_and_a_broken_one_not_at_all() -> None:
    reference = [9.0, -1.5, 9.0, math.nan, -math.inf, -1.0]
    found = one(
        batch([[0, 1, 0, 1, 1, 1]], [[0.0, -1.0, 0.0, -1.0, -1.0, -1.0]]), [1.0], Models(reference=reference), KL_REWARD
    )
    # 0.1 * (-1.0 + 1.5) on the first; what the reference cannot say costs nothing.
    np.testing.assert_allclose(found.advantages, [0.0, 0.95, 0.0, 1.0, 1.0, 1.0], atol=1e-6)


def test_the_coefficient_is_the_backends_which_adapts() -> None:
    models = Models(reference=[0.0, -2.0])
    models.kl_coef = 0.5
    assert one(batch([[0, 1]], [[0.0, -1.0]]), [1.0], models, KL_REWARD).advantages.tolist() == [0.0, 0.5]


def test_a_critic_gives_values_and_what_it_is_to_learn() -> None:
    config = replace(PPO, gae=GaeConfig(lam=0.5))
    models = Models(values=[0, 0.25, 0.5, 0, 0.75], bootstrap=[0.5, 0.5])
    masks = [[0, 1, 1], [0, 1]]
    found = one(batch(masks, truncated=np.array([False, True])), [1.0, 0.0], models, config)
    # The first ended: 1 - 0.5, then 0.5 - 0.25 + 0.5 * 0.5. The second was cut: 0 + 0.5 - 0.75.
    np.testing.assert_allclose(found.advantages, [0, 0.5, 0.5, 0, -0.25], atol=1e-7)
    assert found.returns is not None
    np.testing.assert_allclose(found.returns, [0, 0.75, 1.0, 0, 0.5], atol=1e-7)
    assert found.values is not None
    assert found.values.tolist() == [0, 0.25, 0.5, 0, 0.75]


def test_E9_each_branch_of_an_episode_has_credit_on_its_own_tokens() -> None:
    """A branch is a sequence with a mask of its own; what the last one trains on says nothing of the others."""
    found = one(batch([[0, 1, 1, 0], [0, 0, 0, 1]]), [1.0, 1.0], Models(), RETURNS)
    assert found.advantages.tolist() == [0, 1, 1, 0, 0, 0, 0, 1]


def test_token_advantages_are_normalised_over_all_minibatches() -> None:
    config = replace(RETURNS, adv_norm=NormConfig(mean=Level.BATCH, std=Level.BATCH))
    parts = [batch([[0, 1, 1]]), batch([[0, 1]]), batch([])]
    outcomes = [np.array([1.0]), np.array([4.0]), np.array([])]
    found = assess(parts, outcomes, Models(), config, Ranks())
    values = np.array([1.0, 1.0, 4.0])
    expected = (values - 2.0) / (values.std(ddof=1) + 1e-5)
    np.testing.assert_allclose([*found[0].advantages[1:], *found[1].advantages[1:]], expected, atol=1e-6)
    assert found[2].advantages.size == 0
    shifted = assess(parts, [outcome + 100.0 for outcome in outcomes], Models(), config, Ranks())
    np.testing.assert_allclose(shifted[0].advantages, found[0].advantages, atol=1e-5)


@pytest.mark.parametrize("name", CASES["m2po"])
def test_m2po_agrees_with_recorded_numbers(name: str) -> None:
    case, tokens = CASES["m2po"][name], CASES["tokens"]
    config = AlgorithmConfig(name="m2po", m2_threshold=case["threshold"])
    whole = batch([tokens["mask"][:4], tokens["mask"][4:]], [tokens["behaviour"]])
    found = one(whole, [0.0, 0.0], Models(proximal=tokens["proximal"]), config)
    assert found.eligible is not None
    assert found.eligible.astype(int).tolist() == case["kept"]
    assert found.num_trainable == sum(tokens["mask"])  # the divisor


def test_E6_m2po_leaves_out_what_is_not_finite_and_keeps_two_policies_that_agree() -> None:
    config = AlgorithmConfig(name="m2po", m2_threshold=0.04)
    inf = math.inf
    whole = batch([[0, 1, 1, 1, 1]], [[0.0, -1.0, -inf, -inf, -1.0]])
    found = one(whole, [0.0], Models(proximal=[0.0, -1.0, -inf, -1.0, math.nan]), config)
    assert found.eligible is not None
    assert found.eligible.tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("method", ProximalMethod)
def test_the_policy_is_asked_only_where_the_method_needs_it(method: ProximalMethod) -> None:
    models = Models(proximal=[0.0, -1.0])
    found = one(batch([[0, 1]]), [1.0], models, AlgorithmConfig(proximal=method))
    assert (models.asked, found.proximal is None) == (
        (["proximal"], False) if method is ProximalMethod.RECOMPUTE else ([], True)
    )
