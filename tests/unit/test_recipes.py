"""What an algorithm's name sets, and what it does not let anybody set otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from areal_hpc.algorithms.advantages import AdvantageInputs
from areal_hpc.algorithms.losses import cispo_loss, clipped_loss, gspo_loss, sapo_loss, sft_loss
from areal_hpc.algorithms.preferences import bradley_terry_loss, dpo_loss
from areal_hpc.algorithms.table import find
from areal_hpc.config.algorithm import AlgorithmConfig, KlConfig, Level, Metric, OverlongConfig
from areal_hpc.config.keys import keys, value_of
from areal_hpc.config.recipes import READ_BY_SOME, RECIPES, Data, is_offline
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config, ModelConfig, PromptsConfig, RolloutConfig, SamplingConfig, TrainerConfig
from areal_hpc.errors import ConfigError

PAPERS: dict[str, dict[str, Any]] = {
    "grpo": {"reward_norm.mean": Level.GROUP, "reward_norm.std": Level.GROUP},
    "dr_grpo": {"reward_norm.mean": Level.GROUP, "reward_norm.std": Level.NONE, "length_normaliser": 512},
    "rloo": {"reward_norm.mean": Level.GROUP, "reward_norm.std": Level.NONE, "reward_norm.leave_one_out": True},
    "lite_ppo": {"reward_norm.mean": Level.GROUP, "reward_norm.std": Level.BATCH},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_low": 1.0},
    "sapo": {"sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05, "decoupled": False, "proximal": "behaviour"},
    "m2po": {"m2_threshold": 0.04, "decoupled": True},
    "icepop": {"rejection_sampling.lower": 0.5, "rejection_sampling.upper": 5.0},
    "kpop": {"rejection_sampling.metric": Metric.BINARY_KL, "rejection_sampling.upper": 2.0},
    "reinforce_pp": {"adv_norm.mean": Level.BATCH, "adv_norm.std": Level.BATCH, "kl.place": "reward"},
    "reinforce_pp_baseline": {"reward_norm.mean": Level.GROUP, "adv_norm.std": Level.BATCH, "kl.estimator": "k2"},
    "distillation": {"kl.coef": 1.0, "kl.place": "reward", "kl.estimator": "k1", "gae.lam": 0.0},
    "sft": {"decoupled": False},
    "dpo": {"dpo.beta": 0.1, "dpo.loss": "sigmoid"},
    "reward_model": {"decoupled": False},
    "ppo": {"critic.value_clip": 0.5, "gae.lam": 0.95, "reward_norm.mean": Level.NONE},
}


def config(**algorithm: Any) -> Config:
    if algorithm.get("name") == "dapo":
        algorithm["overlong"] = OverlongConfig(tokens=64)
    if algorithm.get("name") == "distillation":
        algorithm.setdefault("kl", KlConfig(reference="models/teacher"))
    made = AlgorithmConfig(**algorithm)
    return Config(
        name="small",
        model=ModelConfig(path="models/tiny"),
        prompts=PromptsConfig(train="train.jsonl"),
        rollout=RolloutConfig(reward="" if is_offline(made) else "tasks:reward"),
        trainer=TrainerConfig(total_steps=10),
        algorithm=made,
    )


@pytest.mark.parametrize("name", RECIPES)
def test_a_name_alone_is_the_algorithm_of_its_paper(name: str) -> None:
    resolved = resolve(config(name=name))
    for key, value in PAPERS[name].items():
        assert value_of(resolved, f"algorithm.{key}") == value, key


@pytest.mark.parametrize("name", RECIPES)
def test_what_was_resolved_resolves_to_itself(name: str) -> None:
    """A run reads the configuration that it was started with; every key of it is stated."""
    resolved = resolve(config(name=name))
    assert resolve(resolved, keys()) == resolved


def test_dr_grpos_divisor_is_the_longest_answer_unless_somebody_wrote_one() -> None:
    """Liu et al. (2025), listing 1: the masked sum over a constant, the budget of generated tokens."""
    sampling = SamplingConfig(max_new_tokens=77)
    longer = replace(config(name="dr_grpo"), rollout=RolloutConfig(reward="tasks:reward", sampling=sampling))
    assert resolve(longer).algorithm.length_normaliser == 77
    assert resolve(longer, {"algorithm.length_normaliser"}).algorithm.length_normaliser == 0  # written, though usual
    assert resolve(config(name="dr_grpo", length_normaliser=5)).algorithm.length_normaliser == 5


def test_what_is_usual_gives_way_and_what_is_fixed_does_not() -> None:
    assert resolve(config(name="cispo", clip_high=2.0)).algorithm.clip_high == 2.0
    stated = {"algorithm.clip_high"}  # the default, written by somebody
    assert resolve(config(name="cispo"), stated).algorithm.clip_high == 0.2
    changed = config(name="rloo")
    norm = replace(changed.algorithm.reward_norm, std=Level.BATCH)
    with pytest.raises(ConfigError, match=r"algorithm\.reward_norm\.std: batch disagrees with algorithm\.name rloo"):
        resolve(replace(changed, algorithm=replace(changed.algorithm, reward_norm=norm)))
    with pytest.raises(ConfigError, match=r"algorithm\.decoupled: True disagrees with algorithm\.name sapo"):
        resolve(config(name="sapo"), {"algorithm.decoupled"})


def test_dapo_samples_until_groups_have_variance() -> None:
    changed = config(name="dapo")
    keep = replace(changed.rollout.filter, zero_variance=False)
    with pytest.raises(ConfigError, match=r"rollout\.filter\.zero_variance: False disagrees"):
        resolve(replace(changed, rollout=replace(changed.rollout, filter=keep)))


@pytest.mark.parametrize("name", [name for name in RECIPES if not is_offline(AlgorithmConfig(name=name))])
def test_groups_of_equal_rewards_are_left_out_only_where_nothing_follows_from_them(name: str) -> None:
    """Two groups, the first with equal rewards: whether any of its advantages (less KL, before a critic) is not 0."""
    resolved = resolve(config(name=name))
    groups = np.array([0, 0, 1, 1])
    inputs = AdvantageInputs(
        rewards=np.array([1.0, 1.0, 0.0, 1.0]),
        groups=groups,
        generated=np.array([5, 5, 5, 5]),
        truncated=np.zeros(4, dtype=np.bool_),
        episodes=np.array([0, 1, 0, 1]),
        max_new_tokens=512,
    )
    learned = bool(find(name).outcomes(inputs, resolved.algorithm)[groups == 0].any())
    from_teacher = name == "distillation"
    assert resolved.rollout.filter.zero_variance is not (learned or from_teacher)
    kept = replace(resolved.rollout.filter, zero_variance=True)
    if learned:  # whoever writes it has it, as DAPO's dynamic sampling for PPO
        stated = replace(config(name=name), rollout=replace(resolved.rollout, filter=kept))
        assert resolve(stated, {"rollout.filter.zero_variance"}).rollout.filter.zero_variance


def test_recipes_name_keys_that_there_are_and_leave_alone_what_they_do_not_read() -> None:
    for recipe in RECIPES.values():
        assert set(recipe.fixed) | set(recipe.usual) <= set(keys())
        assert not set(recipe.fixed) & set(recipe.usual)
        assert set(recipe.reads) <= set(READ_BY_SOME)
        set_here = {key.split(".")[1] for key in {**recipe.fixed, **recipe.usual} if key.startswith("algorithm.")}
        assert not (set_here & set(READ_BY_SOME)) - set(recipe.reads)


def test_each_loss_belongs_to_its_name() -> None:
    special = {"gspo": gspo_loss, "cispo": cispo_loss, "sapo": sapo_loss, "sft": sft_loss}
    assert {name: find(name).loss for name in RECIPES} == {name: special.get(name, clipped_loss) for name in RECIPES}
    assert [name for name in RECIPES if find(name).token_level] == ["reinforce_pp", "ppo", "distillation"]
    assert [name for name in RECIPES if find(name).critic] == ["ppo"]
    pair_losses = {name: find(name).pair_loss for name in RECIPES if find(name).data is Data.PAIRS}
    assert pair_losses == {"dpo": dpo_loss, "reward_model": bradley_terry_loss}
    assert [name for name in RECIPES if find(name).data.is_offline] == ["sft", "dpo", "reward_model"]
