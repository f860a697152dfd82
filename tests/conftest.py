"""Before anything imports torch: one thread a process, since threads that spin for each other starve a busy machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path

import pytest
import real_sglang
from hypothesis import settings
from tiny_models import make_model

settings.register_profile("busy", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("busy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without an environment for SGLang its tests are skipped and say why, but not where they are asked for."""
    why = real_sglang.unusable()
    for item in items:
        if why and not os.environ.get("AREAL_HPC_NEED_SGLANG") and item.get_closest_marker("sglang"):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def sglang_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real SGLang server with a model whose weights nobody changes; its key is "secret"."""
    directory = tmp_path_factory.mktemp("sglang")
    make_model(directory / "model", "llama", seed=5)
    with real_sglang.served(directory / "model", directory / "sglang.log") as server:
        yield server.url


@pytest.fixture(scope="session")
def quickstart_model(pytestconfig: pytest.Config) -> Path:
    """The tiny model that has the skill to sort and not the habit to box; a directory that no test changes."""
    from tests.quickstart_model import quickstart_model

    assert pytestconfig.cache is not None
    return quickstart_model(pytestconfig.cache)
