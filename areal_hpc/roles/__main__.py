"""``python -m areal_hpc.roles ROLE INDEX RUN_DIR EPOCH INCARNATION PARENT HOST``: one process of a run."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from areal_hpc.errors import DevicesLost, UserError
from areal_hpc.exits import EXIT_ELSEWHERE, EXIT_STOPPED, EXIT_USER_ERROR
from areal_hpc.liveness.heartbeat import BEAT_S, beating
from areal_hpc.privacy import umask_of
from areal_hpc.roles.caches import use_own_caches
from areal_hpc.roles.process import StopRequested, enter
from areal_hpc.signing import require_signing

log = logging.getLogger(__name__)

ROLES = ("trainer", "generator", "part", "rollout", "evaluator")


def main(arguments: list[str]) -> int:
    role, index, root, epoch, incarnation, parent, host = arguments
    assert role in ROLES, role
    process = enter(role, int(index), Path(root), int(epoch), int(incarnation), parent=int(parent), host=host)
    try:
        require_signing()
        use_own_caches(process.run.root, role, process.index)
        umask = umask_of(process.config.run_group)
        beat_s = min(BEAT_S, process.config.limits.quiet_s / 4)
        who = (process.attempt, role, process.index, process.incarnation)
        with umask, beating(*who, beat_s=beat_s, state=process.state):
            code: int = importlib.import_module(f"areal_hpc.roles.{role}").main(process)
    except StopRequested:
        code = EXIT_STOPPED
    except DevicesLost as error:
        log.critical("%s", error)
        code = EXIT_ELSEWHERE
    except UserError as error:
        log.critical("%s", error)
        code = EXIT_USER_ERROR
    finally:
        process.recorder.close()
    return code


def leave(code: int) -> NoReturn:
    """End this process now that all is closed. To take torch apart piece by piece costs most of a second of CPU, which
    a stop may not have, and can wait for a thread of a process group that lost a member."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
