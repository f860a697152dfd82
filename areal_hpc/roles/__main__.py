"""``python -m areal_hpc.roles ROLE INDEX RUN_DIR EPOCH``: one process of a run. Started by a launcher, not by hand."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from areal_hpc.roles.process import EXIT_STOPPED, StopRequested, enter

ROLES = ("trainer", "generator", "rollout", "evaluator")


def main(arguments: list[str]) -> int:
    role, index, root, epoch = arguments
    assert role in ROLES, role
    process = enter(role, int(index), Path(root), int(epoch))
    module = importlib.import_module(f"areal_hpc.roles.{role}")
    try:
        code: int = module.main(process)
    except StopRequested:
        code = EXIT_STOPPED
    finally:
        process.recorder.close()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
