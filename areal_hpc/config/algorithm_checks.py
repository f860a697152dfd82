"""Combinations of an algorithm's settings that cannot work, or that silently do nothing, are refused before a run.

That each number by itself lies in its range is the configuration's own check. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from areal_hpc.config.algorithm import (
    Aggregation,
    AlgorithmConfig,
    KlConfig,
    KlEstimator,
    KlPlace,
    Level,
    Metric,
    NormConfig,
    OverlongConfig,
    ProximalMethod,
    RejectionAction,
    RejectionConfig,
    RejectionLevel,
)
from areal_hpc.config.recipes import READ_BY_SOME, RECIPES, Recipe, recipe_of
from areal_hpc.errors import ConfigError


def check_algorithm(config: AlgorithmConfig, group_size: int, max_staleness: int) -> None:
    """Refuse what no single field can know to be wrong.

    Raises:
        ConfigError: names the keys and says what to set instead.
    """
    recipe = recipe_of(config.name)
    _check_reads(config, recipe)
    _check_teacher(config, recipe)
    _check_kl(config, recipe)
    _check_gae(config, recipe)
    _check_rewards(config)
    _check_norm("algorithm.reward_norm", config.reward_norm)
    _check_norm("algorithm.adv_norm", config.adv_norm)
    _check_signal(config, group_size)
    _check_correction(config, max_staleness)
    check_rejection(config.rejection_sampling)


def check_rejection(config: RejectionConfig) -> None:
    """Refuse combinations that do nothing, and bands that keep nothing or leave out tokens on which policies agree.

    Raises:
        ConfigError: names the keys and says what to set instead.
    """
    key = "algorithm.rejection_sampling"
    signed = config.metric is Metric.KL_K1
    if config.lower is not None and config.lower < 0 and not signed:
        raise ConfigError(f"{key}.lower is {config.lower}, but {config.metric} is never negative; set it to null")
    if config.upper is None and (config.lower is None or (config.lower == 0 and not signed)):
        raise ConfigError(f"{key} has no bound that can reject anything; set {key}.upper")
    agreement = 1.0 if config.metric is Metric.RATIO else 0.0
    lower = -math.inf if config.lower is None else config.lower
    upper = math.inf if config.upper is None else config.upper
    if not lower <= agreement <= upper:
        raise ConfigError(
            f"{key}.lower = {config.lower} and {key}.upper = {config.upper} leave out {config.metric} = {agreement}, "
            "where both policies agree; choose bounds around it"
        )
    if config.action is RejectionAction.CLAMP and config.metric is not Metric.RATIO:
        raise ConfigError(f"{key}.action = clamp needs {key}.metric = ratio; for {config.metric} set action to mask")
    if config.level is RejectionLevel.TOKEN and config.agg is not Aggregation.MEAN:
        raise ConfigError(f"{key}.agg does nothing at {key}.level = token; remove it, or set level to sequence")


def _check_reads(config: AlgorithmConfig, recipe: Recipe) -> None:
    """A knob that the algorithm does not read does nothing. What a loss of one's own reads, nobody here knows."""
    default = AlgorithmConfig()
    for name in READ_BY_SOME:
        if name in recipe.reads or (config.loss and name not in ("gae", "critic")):
            continue
        if getattr(config, name) != getattr(default, name):
            readers = [other for other, row in RECIPES.items() if name in row.reads]
            raise ConfigError(
                f"algorithm.{name} does nothing with algorithm.name = {config.name}; remove it, or set "
                f"algorithm.name to {' or '.join(readers)}"
            )


def _check_teacher(config: AlgorithmConfig, recipe: Recipe) -> None:
    """What learns from a teacher alone needs one, and reads no reward."""
    if recipe.outcome:
        return
    if not config.kl.reference or config.kl.coef == 0:
        raise ConfigError(
            f"algorithm.name = {config.name} learns from a teacher: set algorithm.kl.reference to the teacher's "
            "checkpoint directory, and algorithm.kl.coef above 0"
        )
    default = AlgorithmConfig()
    for name in ("reward_scale", "reward_bias", "reward_clip", "overlong"):
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(
                f"algorithm.{name} does nothing with algorithm.name = {config.name}, which does not learn from "
                "rewards; remove it"
            )


def _check_kl(config: AlgorithmConfig, recipe: Recipe) -> None:
    kl, key = config.kl, "algorithm.kl"
    if kl.coef == 0:
        if idle := sorted(_set_by_hand(config, recipe)):
            raise ConfigError(f"{', '.join(idle)} does nothing with {key}.coef = 0; remove it, or set {key}.coef")
        return
    if kl.target is None and kl.horizon != KlConfig().horizon:
        raise ConfigError(f"{key}.horizon does nothing without {key}.target; remove it, or set {key}.target")
    if kl.place is KlPlace.REWARD and not recipe.token_level:
        levels = [name for name, row in RECIPES.items() if row.token_level]
        raise ConfigError(
            f"{key}.place = reward needs an advantage for each token, and algorithm.name = {config.name} has one for "
            f"each trajectory; set {key}.place to loss, or algorithm.name to {' or '.join(levels)}"
        )
    if kl.place is KlPlace.LOSS and kl.estimator is KlEstimator.K1:
        raise ConfigError(
            f"{key}.estimator = k1 has a gradient of mean 0 as a loss, so it holds nothing; set it to k2 or k3"
        )


def _set_by_hand(config: AlgorithmConfig, recipe: Recipe) -> Iterator[str]:
    """Keys of the KL section that differ from their default and are not of the recipe."""
    for field in fields(KlConfig):
        name = f"algorithm.kl.{field.name}"
        if name not in recipe.usual and getattr(config.kl, field.name) != getattr(KlConfig(), field.name):
            yield name


def _check_gae(config: AlgorithmConfig, recipe: Recipe) -> None:
    gae = config.gae
    if gae.alpha is not None and gae.lam not in (1.0, recipe.usual.get("algorithm.gae.lam")):
        raise ConfigError("algorithm.gae.lam does nothing with algorithm.gae.alpha, which makes lambda; remove either")
    if recipe.token_level and config.adv_norm.leave_one_out:
        raise ConfigError(
            f"algorithm.adv_norm.leave_one_out leaves out trajectories, and algorithm.name = {config.name} normalises "
            "tokens; remove it"
        )


def _check_rewards(config: AlgorithmConfig) -> None:
    if config.reward_scale == 0:
        raise ConfigError("algorithm.reward_scale = 0 makes every reward equal; set another number")
    overlong = config.overlong
    if overlong.tokens == 0 and overlong.factor != OverlongConfig().factor:
        raise ConfigError("algorithm.overlong.factor does nothing while algorithm.overlong.tokens is 0; set tokens")
    if config.name == "dapo" and overlong.tokens == 0:
        raise ConfigError(
            "algorithm.name = dapo penalises long answers: set algorithm.overlong.tokens, such as a fifth of "
            "rollout.sampling.max_new_tokens; without a penalty, it is grpo with algorithm.clip_high = 0.28"
        )
    if overlong.tokens > 0 and overlong.factor == 0:
        raise ConfigError("algorithm.overlong.factor = 0 penalises nothing; raise it, or remove algorithm.overlong")


def _check_norm(key: str, config: NormConfig) -> None:
    if config.leave_one_out and config.mean is Level.NONE:
        raise ConfigError(f"{key}.leave_one_out does nothing with {key}.mean = none; set mean to group or batch")
    default = NormConfig()
    if config.std is Level.NONE and (config.unbiased, config.eps) != (default.unbiased, default.eps):
        raise ConfigError(f"{key}.unbiased and {key}.eps do nothing with {key}.std = none; remove them or set std")


def _check_signal(config: AlgorithmConfig, group_size: int) -> None:
    """Normalising over one sample gives 0: such a run trains on nothing without a word."""
    levels = {config.reward_norm.mean, config.reward_norm.std}
    if group_size < 2 and Level.GROUP in levels:
        raise ConfigError(
            f"rollout.group_size = {group_size} with algorithm.reward_norm over the group makes every advantage 0; "
            "set rollout.group_size to 2 or more, or reward_norm.mean and std to batch or none"
        )
    if group_size * config.groups_per_step < 2 and Level.BATCH in levels | {config.adv_norm.mean, config.adv_norm.std}:
        raise ConfigError(
            "a batch of one episode normalised over the batch makes every advantage 0; raise "
            "rollout.group_size or algorithm.groups_per_step"
        )
    if Level.GROUP in (config.adv_norm.mean, config.adv_norm.std):
        raise ConfigError("algorithm.adv_norm is over all trainable tokens; set its mean and std to batch or none")


def _check_correction(config: AlgorithmConfig, max_staleness: int) -> None:
    """Off-policy data needs a correction; a correction that is set needs the switch that uses it."""
    if config.decoupled and config.proximal is ProximalMethod.BEHAVIOUR:
        raise ConfigError(
            "algorithm.proximal = behaviour makes every behaviour weight of algorithm.decoupled 1; set decoupled to "
            "false (plain PPO around the behaviour policy), or proximal to recompute"
        )
    if config.m2_threshold is not None and config.proximal is not ProximalMethod.RECOMPUTE:
        raise ConfigError(
            "algorithm.m2_threshold chooses tokens before the step, by recomputed log-probs; set algorithm.proximal to "
            "recompute"
        )
    if config.dual_clip is not None and config.proximal is ProximalMethod.REUSE:
        raise ConfigError(
            "algorithm.dual_clip does nothing with algorithm.proximal = reuse, where the ratio is always 1; remove it"
        )
    if config.decoupled:
        return
    if max_staleness > 0 and config.proximal is not ProximalMethod.BEHAVIOUR:
        raise ConfigError(
            f"buffer.max_staleness = {max_staleness} trains on tokens of older weights, which algorithm.decoupled = "
            "false does not correct for; set algorithm.decoupled to true or buffer.max_staleness to 0"
        )
    if config.rejection_sampling != RejectionConfig():
        raise ConfigError("algorithm.rejection_sampling does nothing with algorithm.decoupled = false; set it to true")
    if config.proximal is ProximalMethod.REUSE and config.minibatches > 1:
        raise ConfigError(
            "algorithm.proximal = reuse without algorithm.decoupled corrects nothing from the second of "
            f"{config.minibatches} minibatches on; set decoupled to true, proximal to recompute, or minibatches to 1"
        )
