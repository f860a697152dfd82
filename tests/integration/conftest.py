"""What whole runs share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as small as one can be that every real loader reads; its weights are random."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(path, "qwen3", 1, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    return path
