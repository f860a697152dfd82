"""A configuration with which nothing is wrong, and what is said of others."""

from __future__ import annotations

from typing import Any

import pytest

from areal_hpc.config.keys import with_value
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config, ModelConfig, PromptsConfig, RolloutConfig, TrainerConfig
from areal_hpc.errors import ConfigError

GOOD = Config(
    name="good",
    model=ModelConfig(path="models/tiny"),
    prompts=PromptsConfig(train="train.jsonl"),
    rollout=RolloutConfig(reward="tasks:reward"),
    trainer=TrainerConfig(total_steps=100),
)


def changed(**values: Any) -> Config:
    """GOOD with other values; `trainer__ranks=2` stands for the key trainer.ranks."""
    config = GOOD
    for name, value in values.items():
        config = with_value(config, name.replace("__", "."), value)
    return config


def refused(config: Config, written: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(config, written)
    return str(caught.value)
