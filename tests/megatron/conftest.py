"""Tests of the Megatron trainer need the extra of that name; without it they say so, or fail where it must be there."""

from __future__ import annotations

import os

import pytest

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
