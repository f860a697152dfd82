"""What signs sockets, for tests. Where it cannot be had they are skipped and say why, unless Slurm's must run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_hpc.config.cluster import SignSockets
from areal_hpc.signing import provide


def library_in(directory: Path) -> Path:
    """A library like that of an attempt, in ``directory``."""
    library = directory / "signing.so"
    why = provide(library, SignSockets.AUTO)
    if why and not os.environ.get("AREAL_HPC_NEED_SLURM"):
        pytest.skip(why)
    assert not why
    return library
