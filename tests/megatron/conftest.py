"""Tests of the Megatron trainer need the extra of that name; without it they say so, or fail where it must be there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from layouts import Run, pool
from steps import MIXTURE, SIZES, STRETCHED, YARN
from tiny_models import make_model

from areal_hpc.errors import ConfigError
from areal_hpc.training.megatron.requirements import require_megatron


@pytest.fixture(autouse=True, scope="session")
def megatron() -> None:
    try:
        require_megatron()
    except ConfigError as error:
        if "AREAL_HPC_NEED_MEGATRON" in os.environ:
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def run(megatron: None) -> Iterator[Run]:
    with pool() as run:
        yield run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """qwen2 and qwen3 have tied embeddings, the others not; qwen2 has biases, qwen3 and the mixture norms of heads; the
    frequencies of llama3 are stretched as those of Llama 3.1, and those of yarn, a qwen2, as Qwen's for long contexts.
    """
    root = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        make_model(root / family, family, 0, **SIZES, **(MIXTURE if family == "qwen3_moe" else {}))
    make_model(root / "llama3", "llama", 0, **SIZES, rope_parameters=STRETCHED)
    make_model(root / "yarn", "qwen2", 0, **SIZES, rope_parameters=YARN)
    return {path.name: path for path in root.iterdir()}
