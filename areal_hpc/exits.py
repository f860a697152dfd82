"""Exit codes: of ``areal-hpc``, of the processes of a run, and what the batch script of a Slurm job goes by.

The numbers are those that other programs know: 2 as of a shell's usage errors, 69 to 71 and 75 of sysexits.h, 130 as of
a shell whose command was interrupted.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Final

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_USER_ERROR: Final = 2
EXIT_UNNEEDED: Final = 69  # EX_UNAVAILABLE: of what this would serve
EXIT_STALLED: Final = 70  # EX_SOFTWARE
EXIT_ELSEWHERE: Final = 71  # EX_OSERR
EXIT_STOPPED: Final = 75  # EX_TEMPFAIL: start me again
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT

MEANINGS: Final[Mapping[int, str]] = {
    EXIT_DONE: "done",
    EXIT_FAILED: "failed, or ended by force, or (ledger) violated; the last lines say why",
    EXIT_USER_ERROR: "a mistake to mend; the message says how",
    EXIT_UNNEEDED: "(join --rest) the run is out; the job is to rest until it is there again",
    EXIT_STALLED: "nobody got on for limits.stall_s; the message says who waited for whom",
    EXIT_ELSEWHERE: "a node has lost its devices; in a Slurm job, it goes on without that node",
    EXIT_STOPPED: "stopped on request, in order; the same command with --resume goes on",
    EXIT_INTERRUPTED: "interrupted before a run was begun",
}
"""What each tells whoever started the command."""


def signal_name(number: int) -> str:
    """The name of a signal, as in ``kill -l``: Python has none of its own for most of the real-time signals."""
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"SIGRTMIN{number - signal.SIGRTMIN:+d}")


def exit_lines() -> list[str]:
    """The table as ``areal-hpc --help`` shows it."""
    return [f"  {code:>3}  {meaning}" for code, meaning in MEANINGS.items()]
