"""Before anything imports torch: one thread a process, since threads that spin for each other starve a busy machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("busy", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("busy")


@pytest.fixture(scope="session")
def quickstart_model(pytestconfig: pytest.Config) -> Path:
    """The tiny model that has the skill to sort and not the habit to box; a directory that no test changes."""
    from tests.quickstart_model import quickstart_model

    assert pytestconfig.cache is not None
    return quickstart_model(pytestconfig.cache)
