"""The shape ``local``: every role a process of this machine, started and ended by pid.

launcher (areal-hpc run)
├── generator-0 ...   own session each, so that Ctrl-C in a terminal reaches the launcher alone
├── rollout-0 ...     SIGTERM is the request to stop, SIGKILL the end of patience
├── trainer-0 ...     a role whose launcher dies gets SIGTERM from the kernel
└── evaluator-0
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from areal_hpc.fs import PRIVATE_FILE, AttemptDir, RunDir

LAST_LINES = 15
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
KILL_RESERVE_S = 2.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A process of the run that is no more. ``code`` is negative for a signal, as in subprocess."""

    role: str
    index: int
    code: int

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


class LocalLauncher:
    """Implements ``Launcher``: starts roles, tells which have ended, ends exactly those that it started."""

    def __init__(self, run: RunDir, epoch: int, threads: Mapping[str, int]) -> None:
        self.run = run
        self.attempt: AttemptDir = run.attempt(epoch)
        self.threads = threads
        self.running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    def start(self, role: str, index: int) -> None:
        """Start one role; its output goes to its own log file."""
        command = [
            sys.executable,
            "-m",
            "areal_hpc.roles",
            role,
            str(index),
            str(self.run.root),
            str(self.attempt.epoch),
        ]
        fd = os.open(self.attempt.log(role, index), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE)
        try:
            process = subprocess.Popen(  # noqa: S603  our own module, no shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=subprocess.STDOUT,
                env=self._environment(role),
                start_new_session=True,
            )
        finally:
            os.close(fd)
        self.running[role, index] = process

    def _environment(self, role: str) -> dict[str, str]:
        """The caller's, with thread pools sized for the role: an idle pool that spins starves the other processes."""
        threads = str(self.threads.get(role, 1))
        return {**os.environ, **dict.fromkeys(THREAD_VARIABLES, threads), "TOKENIZERS_PARALLELISM": "false"}

    def died(self) -> list[Ended]:
        """The processes that have ended since the last call."""
        codes = {key: process.poll() for key, process in self.running.items()}
        ended = [Ended(role, index, code) for (role, index), code in codes.items() if code is not None]
        for process in ended:
            del self.running[process.role, process.index]
        return ended

    def last_lines(self, role: str, index: int) -> str:
        """The end of a role's log, for the message that says why the run ended."""
        lines = self.attempt.log(role, index).read_bytes().decode(errors="replace").splitlines()
        return "\n".join(lines[-LAST_LINES:])

    def stop(self, timeout_s: float) -> list[Ended]:
        """End everything within ``timeout_s`` seconds: trainers first, since they still write a checkpoint.

        The engines and workers stay up until the trainers are gone, so that a weight update under way can end well.
        """
        deadline = time.monotonic() + timeout_s
        ended = self._end(["trainer"], deadline - KILL_RESERVE_S)
        return ended + self._end(["evaluator", "rollout", "generator"], deadline)

    def _end(self, roles: list[str], deadline: float) -> list[Ended]:
        mine = {key: process for key, process in self.running.items() if key[0] in roles}
        for process in mine.values():
            process.send_signal(signal.SIGTERM)
        ended = []
        for (role, index), process in mine.items():
            ended.append(Ended(role, index, _wait_or_kill(process, deadline)))
            del self.running[role, index]
        return ended


def _wait_or_kill(process: subprocess.Popen[bytes], deadline: float) -> int:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the role leads a session of its own: its pool processes go with it
        return process.wait()
