"""Combinations of an algorithm's settings that cannot work, or that silently do nothing, are refused before a run.

That each number by itself lies in its range is the configuration's own check. No torch here.
"""

from __future__ import annotations

import math
from difflib import get_close_matches

from areal_hpc.config.algorithm import (
    Aggregation,
    AlgorithmConfig,
    Level,
    Metric,
    NormConfig,
    OverlongConfig,
    ProximalMethod,
    RejectionAction,
    RejectionConfig,
    RejectionLevel,
)
from areal_hpc.errors import ConfigError

NAMES = ("grpo",)
"""Every name in ``table.ALGORITHMS``."""


def check_algorithm(config: AlgorithmConfig, group_size: int, max_staleness: int) -> None:
    """Refuse what no single field can know to be wrong.

    Raises:
        ConfigError: names the keys and says what to set instead.
    """
    check_name(config.name)
    _check_rewards(config)
    _check_norm("algorithm.reward_norm", config.reward_norm)
    _check_norm("algorithm.adv_norm", config.adv_norm)
    _check_signal(config, group_size)
    _check_correction(config, max_staleness)
    check_rejection(config.rejection_sampling)


def check_name(name: str) -> None:
    """Refuse a name that is not in the table.

    Raises:
        ConfigError: names the nearest names.
    """
    if name not in NAMES:
        near = get_close_matches(name, NAMES, cutoff=0.4) or NAMES
        raise ConfigError(f"algorithm.name: there is no {name!r}; use {' or '.join(near)}")


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


def _check_rewards(config: AlgorithmConfig) -> None:
    if config.reward_scale == 0:
        raise ConfigError("algorithm.reward_scale = 0 makes every reward equal; set another number")
    overlong = config.overlong
    if overlong.tokens == 0 and overlong.factor != OverlongConfig().factor:
        raise ConfigError("algorithm.overlong.factor does nothing while algorithm.overlong.tokens is 0; set tokens")
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
    if config.dual_clip is not None and config.proximal is ProximalMethod.REUSE:
        raise ConfigError(
            "algorithm.dual_clip does nothing with algorithm.proximal = reuse, where the ratio is always 1; remove it"
        )
    if config.decoupled:
        return
    if max_staleness > 0:
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
