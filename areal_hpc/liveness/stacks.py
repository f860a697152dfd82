"""What every thread of a process is doing, on request and from outside, also where Python cannot run.

    launcher                            role process
    --------                            ------------
    ask_all(attempt)                    its heartbeat's thread sees the request and appends the stacks of all threads
    ask_silent(process)                 SIGQUIT: its main thread's stack, written by C code in the signal's handler

A process whose heart beats is asked by a file: to read the frames of threads that run is safe only for who holds the
interpreter, and a crash of one that works would be a high price. One that is silent is stopped, or hangs in C and
keeps the interpreter for itself: the handler needs none, and what it reads stands still. SIGQUIT is the signal by which
other runtimes show their stacks, too; Slurm and people use USR1 and USR2 for other things.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Protocol

from areal_hpc.buffer.control import read_replaced
from areal_hpc.fs import names_in, publish_json
from areal_hpc.privacy import open_private
from areal_hpc.run_dir import AttemptDir

REQUEST = "request.json"
"""How often stacks were asked for, in the directory of the stacks."""


class Process(Protocol):
    """A running role as its launcher holds it, wherever it runs; one that is gone takes a signal without an error."""

    @property
    def pid(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


class Stacks:
    """One process's end; made before its first heartbeat, which says that it knows the signal."""

    def __init__(self, attempt: AttemptDir, role: str, index: int) -> None:
        path = attempt.stack(role, index)
        self._attempt = attempt
        self._fd = open_private(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # open as long as it lives
        self._answered = _asked(attempt)
        faulthandler.register(signal.SIGQUIT, file=self._fd, all_threads=False)

    def answer(self) -> None:
        """Append the stacks of all threads if somebody asked since the last time."""
        if (asked := _asked(self._attempt)) != self._answered:
            self._answered = asked
            os.write(self._fd, f"request {asked}\n".encode())
            faulthandler.dump_traceback(file=self._fd, all_threads=True)


def ask_all(attempt: AttemptDir) -> None:
    """Ask every process of the attempt whose heart beats; each answers with its next beat."""
    publish_json(attempt.stacks / REQUEST, _asked(attempt) + 1)


def ask_silent(process: Process, *, wake: bool = False) -> None:
    """Ask one that is silent. One that has never had a heartbeat would end by it.

    Args:
        wake: let a stopped process go on, so that it answers: that is, where it was stopped.
    """
    process.send_signal(signal.SIGQUIT)
    if wake:
        process.send_signal(signal.SIGCONT)


def _asked(attempt: AttemptDir) -> int:
    listed = REQUEST in names_in(attempt.stacks)
    return int((read_replaced(attempt.stacks / REQUEST) if listed else None) or 0)
