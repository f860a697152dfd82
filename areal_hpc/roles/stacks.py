"""What every thread of a process is doing, on request and from outside, also where Python cannot run.

    role process                               launcher
    ------------                               --------
    dump_on_request(attempt.stack(...))        request(pid)       every thread's Python stack joins the file

The signal is SIGQUIT, by which other runtimes dump theirs; Slurm and people use USR1 and USR2 for other things. The
handler is C code: it needs no interpreter, so that a process shows its stacks while it hangs in a collective or in a
call that keeps the interpreter for itself. A stopped process shows them when it goes on.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path

from areal_hpc.fs import PRIVATE_FILE


def dump_on_request(path: Path) -> None:
    """From here on a request makes this process append its stacks to ``path``. Do this before the first heartbeat."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE)  # open as long as the process lives
    faulthandler.register(signal.SIGQUIT, file=fd, all_threads=True)


def request(pid: int, *, wake: bool = False) -> None:
    """Ask a process for its stacks; one that has not said ``dump_on_request`` ends by it.

    Args:
        wake: let a stopped process go on, so that it answers; that is, where it was stopped.
    """
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGQUIT)
        if wake:
            os.kill(pid, signal.SIGCONT)
