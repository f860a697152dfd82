"""Settings that cannot work are refused, with the key's name; settings from the papers are not."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from areal_hpc.algorithms.table import find
from areal_hpc.config.algorithm import (
    Aggregation,
    AlgorithmConfig,
    CriticConfig,
    GaeConfig,
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
from areal_hpc.config.algorithm_checks import check_algorithm, check_rejection
from areal_hpc.errors import ConfigError

NO_NORM = NormConfig(mean=Level.NONE, std=Level.NONE)
DR_GRPO = AlgorithmConfig(reward_norm=NormConfig(mean=Level.GROUP, std=Level.NONE))

GOOD = {
    "defaults": AlgorithmConfig(),
    "dr_grpo": DR_GRPO,
    "rloo": AlgorithmConfig(reward_norm=NormConfig(std=Level.NONE, leave_one_out=True)),
    "lite_ppo": AlgorithmConfig(reward_norm=NormConfig(std=Level.BATCH)),
    "dapo": AlgorithmConfig(clip_high=0.28, overlong=OverlongConfig(tokens=128)),
    "icepop": AlgorithmConfig(rejection_sampling=RejectionConfig(lower=0.5, upper=5.0)),
    "kpop": AlgorithmConfig(rejection_sampling=RejectionConfig(metric=Metric.BINARY_KL, upper=2.0)),
    "batch adv_norm": AlgorithmConfig(adv_norm=NormConfig(mean=Level.BATCH, std=Level.BATCH)),
    "dual clip": AlgorithmConfig(dual_clip=3.0),
    "loglinear": AlgorithmConfig(proximal=ProximalMethod.LOGLINEAR),
}

BAD_ALGORITHM = {
    "algorithm.name": AlgorithmConfig(name="grop"),
    "algorithm.reward_scale": AlgorithmConfig(reward_scale=0.0),
    "algorithm.overlong.factor": AlgorithmConfig(overlong=OverlongConfig(tokens=0, factor=0.5)),
    "algorithm.overlong.factor = 0": AlgorithmConfig(overlong=OverlongConfig(tokens=4, factor=0.0)),
    "algorithm.reward_norm.leave_one_out": AlgorithmConfig(reward_norm=replace(NO_NORM, leave_one_out=True)),
    "algorithm.reward_norm.unbiased": AlgorithmConfig(reward_norm=NormConfig(std=Level.NONE, unbiased=False)),
    "algorithm.adv_norm.eps": AlgorithmConfig(adv_norm=replace(NO_NORM, eps=0.1)),
    "algorithm.adv_norm": AlgorithmConfig(adv_norm=NormConfig(mean=Level.GROUP, std=Level.NONE)),
    "algorithm.dual_clip": AlgorithmConfig(dual_clip=3.0, proximal=ProximalMethod.REUSE),
    "algorithm.rejection_sampling.upper": AlgorithmConfig(rejection_sampling=RejectionConfig(upper=None)),
}

PPO = AlgorithmConfig(name="ppo")
GOOD |= {
    "ppo with a long trace": replace(PPO, gae=GaeConfig(alpha=0.05), critic=CriticConfig(lr_scale=2.0)),
    "grpo with a kl loss": AlgorithmConfig(kl=KlConfig(coef=0.04, target=0.1, horizon=5)),
    "a kl in the reward": AlgorithmConfig(
        name="reinforce_pp", kl=KlConfig(coef=0.1, place=KlPlace.REWARD, estimator=KlEstimator.K1)
    ),
    "reinforce_pp without its kl": AlgorithmConfig(
        name="reinforce_pp", kl=KlConfig(place=KlPlace.REWARD, estimator=KlEstimator.K1)
    ),
    "dapo whole": AlgorithmConfig(name="dapo", clip_high=0.28, overlong=OverlongConfig(tokens=128)),
    "plain ppo on old data": AlgorithmConfig(decoupled=False, proximal=ProximalMethod.BEHAVIOUR),
    "m2po on old data": AlgorithmConfig(name="m2po", m2_threshold=0.04),
    "a loss of one's own may read anything": AlgorithmConfig(loss="a:b", sapo_tau_negative=2.0, m2_threshold=0.1),
}
BAD_ALGORITHM |= {
    "algorithm.sapo_tau_positive": AlgorithmConfig(sapo_tau_positive=2.0),
    "algorithm.m2_threshold": AlgorithmConfig(m2_threshold=0.04),
    "algorithm.m2_threshold chooses": replace(GOOD["m2po on old data"], proximal=ProximalMethod.REUSE),
    "algorithm.decoupled to true": replace(GOOD["m2po on old data"], decoupled=False),
    "algorithm.clip_high": AlgorithmConfig(name="sapo", decoupled=False, clip_high=0.3),
    "algorithm.dual_clip does nothing with algorithm.name = cispo": AlgorithmConfig(name="cispo", dual_clip=3.0),
    "algorithm.gae": AlgorithmConfig(gae=GaeConfig(lam=0.9)),
    "algorithm.critic": AlgorithmConfig(name="reinforce_pp", critic=CriticConfig(lr_scale=2.0)),
    "algorithm.gae does nothing": AlgorithmConfig(loss="a:b", gae=GaeConfig(lam=0.9)),
    "algorithm.gae.lam": replace(PPO, gae=GaeConfig(alpha=0.05, lam=0.5)),
    "algorithm.kl.target": AlgorithmConfig(kl=KlConfig(target=0.1)),
    "algorithm.kl.reference": AlgorithmConfig(kl=KlConfig(reference="models/start")),
    "algorithm.kl.horizon": AlgorithmConfig(kl=KlConfig(coef=0.1, horizon=5)),
    "algorithm.kl.place": AlgorithmConfig(kl=KlConfig(coef=0.1, place=KlPlace.REWARD)),
    "algorithm.kl.estimator": AlgorithmConfig(kl=KlConfig(coef=0.1, estimator=KlEstimator.K1)),
    "algorithm.adv_norm.leave_one_out": replace(PPO, adv_norm=NormConfig(mean=Level.BATCH, leave_one_out=True)),
    "algorithm.overlong.tokens": AlgorithmConfig(name="dapo"),
    "algorithm.proximal": AlgorithmConfig(proximal=ProximalMethod.BEHAVIOUR),
}

KEY = "algorithm.rejection_sampling"
BAD_REJECTION = [
    (f"{KEY}.upper", RejectionConfig(upper=None)),
    (f"{KEY}.upper", RejectionConfig(lower=0.0, upper=None)),
    (f"{KEY}.upper", RejectionConfig(upper=math.nan)),
    (f"{KEY}.lower", RejectionConfig(lower=6.0, upper=5.0)),
    (f"{KEY}.lower", RejectionConfig(lower=-0.5)),
    (f"{KEY}.lower", RejectionConfig(lower=2.0)),
    (f"{KEY}.upper", RejectionConfig(upper=0.9)),
    (f"{KEY}.lower", RejectionConfig(metric=Metric.KL_K3, lower=0.1)),
    (f"{KEY}.upper", RejectionConfig(metric=Metric.KL_K1, lower=-2.0, upper=-1.0)),
    (f"{KEY}.upper", RejectionConfig(metric=Metric.BINARY_KL, upper=-1.0)),
    (f"{KEY}.action", RejectionConfig(metric=Metric.KL_K2, action=RejectionAction.CLAMP)),
    (f"{KEY}.agg", RejectionConfig(level=RejectionLevel.TOKEN, agg=Aggregation.MAX)),
]


@pytest.mark.parametrize("name", GOOD)
def test_settings_of_the_papers_pass(name: str) -> None:
    check_algorithm(GOOD[name], group_size=8, max_staleness=4)


@pytest.mark.parametrize("key", BAD_ALGORITHM)
def test_a_setting_that_cannot_work_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        check_algorithm(BAD_ALGORITHM[key], group_size=8, max_staleness=4)


@pytest.mark.parametrize(("key", "config"), BAD_REJECTION)
def test_a_band_that_does_nothing_or_leaves_agreement_out_is_refused(key: str, config: RejectionConfig) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        check_rejection(config)


@pytest.mark.parametrize("config", [AlgorithmConfig(), DR_GRPO, GOOD["rloo"]])
def test_E14_a_group_of_one_would_train_on_nothing(config: AlgorithmConfig) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.group_size = 1"):
        check_algorithm(config, group_size=1, max_staleness=0)
    check_algorithm(replace(config, reward_norm=NO_NORM), group_size=1, max_staleness=0)


def test_E14_a_batch_of_one_would_train_on_nothing() -> None:
    batch_mean = NormConfig(mean=Level.BATCH, std=Level.NONE)
    for config in (AlgorithmConfig(reward_norm=batch_mean), AlgorithmConfig(reward_norm=NO_NORM, adv_norm=batch_mean)):
        check_algorithm(config, group_size=1, max_staleness=0)
        with pytest.raises(ConfigError, match="groups_per_step"):
            check_algorithm(replace(config, groups_per_step=1), group_size=1, max_staleness=0)


def test_E26_stale_data_without_a_correction_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"buffer\.max_staleness = 1"):
        check_algorithm(AlgorithmConfig(decoupled=False), group_size=8, max_staleness=1)
    check_algorithm(AlgorithmConfig(decoupled=False), group_size=8, max_staleness=0)


def test_a_correction_that_nothing_reads_is_refused() -> None:
    config = AlgorithmConfig(decoupled=False, rejection_sampling=RejectionConfig(upper=2.0))
    with pytest.raises(ConfigError, match=r"algorithm\.rejection_sampling does nothing"):
        check_algorithm(config, group_size=8, max_staleness=0)


def test_reuse_without_a_correction_is_for_one_minibatch() -> None:
    config = AlgorithmConfig(decoupled=False, proximal=ProximalMethod.REUSE, minibatches=2)
    with pytest.raises(ConfigError, match=r"algorithm\.proximal = reuse"):
        check_algorithm(config, group_size=8, max_staleness=0)
    check_algorithm(replace(config, minibatches=1), group_size=8, max_staleness=0)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no 'gropo'; use grpo"):
        find("gropo")


def test_checks_need_no_torch() -> None:
    code = "import sys, areal_hpc.config.algorithm_checks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
