"""A configuration without generation refuses every key that only generation reads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.config.algorithm import AlgorithmConfig, KlConfig, OverlongConfig
from areal_hpc.config.keys import Key, keys, with_value
from areal_hpc.config.offline_checks import READ, UNREAD
from areal_hpc.config.recipes import RECIPES, reference_of
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config, ModelConfig, PromptsConfig, RolloutConfig, TrainerConfig
from areal_hpc.errors import ConfigError, DataError
from areal_hpc.roles.supervisor import roles_of
from areal_hpc.roles.wiring.preflight import check_vocabulary
from tests.tiny_models import make_tokenizer

OFFLINE = [name for name, recipe in RECIPES.items() if recipe.data.is_offline]


def config(name: str, **algorithm: Any) -> Config:
    return Config(
        name="small",
        model=ModelConfig(path="models/tiny"),
        prompts=PromptsConfig(train="train.jsonl"),
        trainer=TrainerConfig(total_steps=10, ranks=2),
        algorithm=AlgorithmConfig(name=name, **algorithm),
    )


def another(key: Key) -> Any:
    """A value of the key's type that is not its default."""
    if key.name == "layout":
        return "embedded:d1+reference:d2"
    match key.default:
        case bool():
            return not key.default
        case StrEnum():
            return next(choice for choice in type(key.default) if choice is not key.default)
        case int() | float():
            return key.default * 0.5 if isinstance(key.default, float) and key.default else key.default + 1
        case str():
            return key.default + "x"
        case tuple():
            return ("x",)
        case None:
            return 1.5
    return {"x": 1}


@pytest.mark.parametrize("algorithm", OFFLINE)
def test_each_key_of_generation_is_refused_by_name(algorithm: str) -> None:
    """Whatever else is wrong with it; keys that are added later are refused as well."""
    resolve(config(algorithm))
    own = tuple(f"algorithm.{name}" for name in RECIPES[algorithm].reads)
    unread = [name for name in keys() if name.startswith(UNREAD) and not name.startswith((*READ, *own))]
    unread = [name for name in unread if name not in RECIPES[algorithm].fixed]  # saying what it says anyway is allowed
    assert len(unread) > 70
    for name in unread:
        with pytest.raises(ConfigError, match=rf"{name}\b"):
            resolve(with_value(config(algorithm), name, another(keys()[name])), {name})


def test_what_is_the_algorithms_own_is_read() -> None:
    resolved = resolve(with_value(config("dpo"), "algorithm.dpo.beta", 0.5))
    assert resolved.algorithm.dpo.beta == 0.5
    assert resolved.prompts.answer_key == "chosen"
    with pytest.raises(ConfigError, match=r"algorithm.dpo.beta: 0.5 does nothing with algorithm.name = sft"):
        resolve(with_value(config("sft"), "algorithm.dpo.beta", 0.5))
    online = with_value(config("grpo"), "rollout.reward", "tasks:reward")
    with pytest.raises(ConfigError, match=r"algorithm.dpo does nothing with algorithm.name = grpo; .* to dpo"):
        resolve(with_value(online, "algorithm.dpo.beta", 0.5))


@pytest.mark.parametrize("algorithm", OFFLINE)
def test_only_trainers_run(algorithm: str) -> None:
    assert roles_of(resolve(config(algorithm))) == {"trainer": 2}


def test_deterministic_training_needs_no_engine_that_is() -> None:
    resolved = resolve(with_value(config("sft"), "deterministic", True))
    assert resolve(resolved, set(keys())) == resolved


def test_there_is_no_routing_to_replay() -> None:
    with pytest.raises(ConfigError, match=r"model\.routing_replay: algorithm\.name dpo .*, which no engine computed"):
        resolve(with_value(config("dpo"), "model.routing_replay", True))


def test_which_model_is_the_reference() -> None:
    assert reference_of(AlgorithmConfig()) is None
    assert reference_of(AlgorithmConfig(name="sft")) is None
    assert reference_of(AlgorithmConfig(name="dpo")) == ""
    assert reference_of(AlgorithmConfig(kl=KlConfig(coef=0.1, reference="models/start"))) == "models/start"


# A teacher in place of rewards


def distilled(**algorithm: Any) -> Config:
    online = config("distillation", **{"kl": KlConfig(reference="models/teacher"), **algorithm})
    return with_value(online, "rollout", RolloutConfig(reward="tasks:reward", group_size=8))


def test_distillation_needs_a_teacher() -> None:
    resolved = resolve(distilled())
    assert reference_of(resolved.algorithm) == "models/teacher"
    assert resolved.rollout.filter.zero_variance is False
    with pytest.raises(ConfigError, match=r"learns from a teacher: set algorithm.kl.reference"):
        resolve(distilled(kl=KlConfig()))


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """Its log-probs would be those of other words."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "same")
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "other")
    check_vocabulary(str(tmp_path / "ours"), str(tmp_path / "same"))
    with pytest.raises(DataError, match=r"different vocabularies: 1 tokens, such as 'another'; take a model of the"):
        check_vocabulary(str(tmp_path / "ours"), str(tmp_path / "other"))
    with pytest.raises(DataError, match=r"nowhere is not a directory"):
        check_vocabulary(str(tmp_path / "ours"), str(tmp_path / "nowhere"))


def test_distillation_reads_no_reward_and_no_discount() -> None:
    for changes in ({"reward_scale": 2.0}, {"overlong": OverlongConfig(tokens=8)}):
        with pytest.raises(ConfigError, match=r"which does not learn from rewards; remove it"):
            resolve(distilled(**changes))
    with pytest.raises(ConfigError, match=r"algorithm.gae.lam: 0.5 disagrees with algorithm.name distillation"):
        resolve(with_value(distilled(), "algorithm.gae.lam", 0.5))
