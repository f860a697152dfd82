"""What only the model's own directory can tell, before a run exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import make_model

from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError
from areal_hpc.roles.wiring.preflight import check_made

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
REPLAY = ["model.routing_replay=true", "trainer.backend=megatron", "generation.backend=sglang"]


def config_of(model: Path) -> Config:
    return resolve(load([QUICKSTART], [f"model.path={model}", *REPLAY]))


def test_routing_is_replayed_where_there_is_any(tmp_path: Path) -> None:
    make_model(tmp_path / "dense", "qwen3", 0)
    make_model(tmp_path / "mixture", "qwen3_moe", 0, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    check_made(config_of(tmp_path / "mixture"))
    with pytest.raises(ConfigError, match=r"model\.routing_replay: .*/dense has no experts .*; set it to false"):
        check_made(config_of(tmp_path / "dense"))
