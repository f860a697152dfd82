"""One real cluster for all tests of this directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SlurmCluster, unusable
from slurm_runs import directory_of
from tiny_models import make_model

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark these tests. Where no Slurm can be started they are skipped and say why, but not where one was installed."""
    why = unusable()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            if why and not os.environ.get("AREAL_HPC_NEED_SLURM"):
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    assert not unusable(), unusable()
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "c") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def model(slurm: SlurmCluster) -> Path:
    """A model with random weights in a directory that all nodes see."""
    path = slurm.dir / "model"
    make_model(path, "qwen3", 1, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    return path


@pytest.fixture
def home(slurm: SlurmCluster, request: pytest.FixtureRequest) -> Path:
    return directory_of(slurm, request, request.node.name)
