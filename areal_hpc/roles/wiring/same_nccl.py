"""Whether engines in an environment of their own can be in one weight group with the trainer, seen before a run exists.

NCCL refuses ranks of different versions when they first meet, which is after every model has been loaded. torch brings
the version that it was built with as a package of its own; where there is none, as in containers that are built
otherwise, nothing is known, and nothing refused.
"""

from __future__ import annotations

import subprocess
import sys

from areal_hpc.config.schema import Config, TransportName
from areal_hpc.errors import ConfigError

TELLS_NCCL = """
from importlib.metadata import PackageNotFoundError, version
for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
    try:
        print("NCCL", version(name))
        break
    except PackageNotFoundError:
        pass
"""
"""A program that tells which one torch loads in its environment."""
TELL_LIMIT_S = 60.0


def told_nccl(output: str) -> str:
    """The version that such a program has told; empty where none is known."""
    return output.partition("NCCL ")[2].strip()


def check_same_nccl(config: Config, interpreter: str, theirs: str) -> None:
    """Check that trainer and engines have the same version of NCCL, where weights are to be broadcast.

    Args:
        interpreter: of the engines.
        theirs: the version in its environment; empty where it is not known.

    Raises:
        ConfigError: they have not; names both versions.
    """
    broadcast = config.weights.transport is TransportName.BROADCAST and not config.evaluation.checkpoint
    if not (broadcast and theirs) or interpreter == sys.executable:
        return
    ours = told_nccl(
        subprocess.run(  # noqa: S603  this very interpreter
            [sys.executable, "-c", TELLS_NCCL], capture_output=True, text=True, timeout=TELL_LIMIT_S, check=True
        ).stdout
    )
    if ours not in ("", theirs):
        raise ConfigError(
            f"generation.python: {interpreter} has NCCL {theirs}, and the trainer's {sys.executable} has {ours}; only "
            "equal versions can be in one group, so install the same torch in both, or set weights.transport=disk"
        )
