"""The shape ``local``: every role a process of this machine, started and ended by pid.

launcher (areal-hpc run)
├── generator-0 ...   own session each, so that Ctrl-C in a terminal reaches the launcher alone
├── rollout-0 ...     SIGTERM is the request to stop, SIGKILL the end of patience
├── trainer-0 ...
└── evaluator-0       each of them stops by itself, in the same order, when its launcher is gone (roles/process.py)
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from areal_hpc.accelerator import REPRODUCIBLE
from areal_hpc.cluster.components import Placement
from areal_hpc.cluster.environment import node_here
from areal_hpc.config.derived import threads_of
from areal_hpc.config.schema import Config
from areal_hpc.privacy import open_private
from areal_hpc.run_dir import AttemptDir, RunDir
from areal_hpc.signing import signing_variables

log = logging.getLogger(__name__)

Process = subprocess.Popen[bytes]
Key = tuple[str, int]
"""A role and an index."""

LAST_LINES = 15
LAST_BYTES = 1 << 16
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GROUPED = ("trainer", "generator", "part")
"""Roles whose processes form groups, by sockets that ask for the run's secret (signing.py)."""
LOOPBACK = "127.0.0.1"
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
NO_OWN_VARIABLES: Mapping[Key, Mapping[str, str]] = MappingProxyType({})
KILL_RESERVE_S = 2.0
KILLED_S = 10.0
"""Longest time that processes which were killed are waited for: one that hangs in the kernel ends when it can."""
POLL_S = 0.1


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
    """Implements ``Launcher``: starts roles, tells which have ended, ends exactly those that it started.

    Args:
        threads: CPU threads of each role; 1 where a role is not named.
        variables: what every role's environment has besides.
        own_variables: what that of one process has besides: it binds the process to its devices.
        host: address of this machine under which the run's processes reach each other.
    """

    def __init__(
        self,
        run: RunDir,
        epoch: int,
        threads: Mapping[str, int],
        variables: Mapping[str, str] = NO_VARIABLES,
        host: str = LOOPBACK,
        *,
        own_variables: Mapping[Key, Mapping[str, str]] = NO_OWN_VARIABLES,
    ) -> None:
        self.run = run
        self.attempt: AttemptDir = run.attempt(epoch)
        self.threads = threads
        self.variables = variables
        self.own_variables = own_variables
        self.host = host
        self.running: dict[Key, Process] = {}
        self.num_starts = Counter[Key]()

    @classmethod
    def of(
        cls,
        config: Config,
        run: RunDir,
        epoch: int,
        host: str = LOOPBACK,
        *,
        own_variables: Mapping[Key, Mapping[str, str]] = NO_OWN_VARIABLES,
    ) -> LocalLauncher:
        """The launcher of a run's processes on this machine."""
        threads = threads_of(config, len(os.sched_getaffinity(0)))
        variables = REPRODUCIBLE if config.deterministic else NO_VARIABLES
        return cls(run, epoch, threads, variables, host, own_variables=own_variables)

    def start(self, role: str, index: int, variables: Mapping[str, str] = NO_VARIABLES) -> None:
        """Start one role, again if need be; its output joins what its log file holds.

        ``variables``: what its environment alone has, such as its devices.
        """
        command = [
            sys.executable,
            "-m",
            "areal_hpc.roles",
            role,
            str(index),
            str(self.run.root),
            str(self.attempt.epoch),
            str(self.num_starts[role, index]),
            str(os.getpid()),
            self.host,
        ]
        self.num_starts[role, index] += 1
        fd = open_private(self.attempt.log(role, index), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            process = subprocess.Popen(  # noqa: S603  our own module, no shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=subprocess.STDOUT,
                env={**self._environment(role), **self.own_variables.get((role, index), {}), **variables},
                start_new_session=True,
            )
        finally:
            os.close(fd)
        self.running[role, index] = process

    def _environment(self, role: str) -> dict[str, str]:
        """The caller's, with thread pools sized for the role: an idle pool that spins starves the other processes; and
        with what signs the role's sockets."""
        threads = str(self.threads.get(role, 1))
        pools = dict.fromkeys(THREAD_VARIABLES, threads)
        signing = signing_variables(self.attempt.signing, self.run.token, os.environ) if role in GROUPED else {}
        return {**os.environ, **pools, "TOKENIZERS_PARALLELISM": "false", **signing, **self.variables}

    def died(self) -> list[Ended]:
        """The processes that have ended since the last call."""
        codes = {key: process.poll() for key, process in self.running.items()}
        ended = [Ended(role, index, code) for (role, index), code in codes.items() if code is not None]
        for process in ended:
            del self.running[process.role, process.index]
        return ended

    def placement_of(self, role: str, index: int) -> Placement:
        """Where a process of the run is, or was."""
        del role, index
        return Placement(node=node_here(os.environ))

    def last_lines(self, role: str, index: int) -> str:
        """The end of a role's log, for the message that says why the run ended."""
        return last_lines(self.attempt.log(role, index))

    def stop(self, timeout_s: float, at_once: Callable[[], bool] = lambda: False) -> list[Ended]:
        """End everything within ``timeout_s`` seconds, in the order of ``end_in_order``; what then hangs in the kernel
        is waited for ``KILLED_S`` longer.

        ``at_once`` is asked all the while; when it says so, whatever still runs is killed.
        """
        ended: list[Ended] = []

        def end(keys: Sequence[Key], deadline: float) -> None:
            for key in keys:
                self.running[key].send_signal(signal.SIGTERM)
            codes = _wait_or_kill([self.running[key] for key in keys], deadline, at_once)
            for key, code in zip(keys, codes, strict=True):
                ended.append(Ended(*key, code))
                del self.running[key]

        end_in_order(self.running, end, timeout_s)
        return ended


def end_in_order(running: Mapping[Key, object], end: Callable[[Sequence[Key], float], None], timeout_s: float) -> None:
    """End what runs within ``timeout_s`` seconds: trainers first, since they still write a checkpoint.

    The engines and workers stay up until the trainers are gone, so that a weight update under way can end well, and
    have ``KILL_RESERVE_S`` at least.

    Args:
        running: by role and index; ``end`` takes out what has ended.
        end: ends these, asking first and by force from a deadline on, in seconds of ``time.monotonic``.
    """
    deadline = time.monotonic() + timeout_s
    end([key for key in running if key[0] == "trainer"], deadline - KILL_RESERVE_S)
    end(list(running), deadline)


def last_lines(log: Path) -> str:
    """The end of a log file, however long it is."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-LAST_LINES:])


def _wait_or_kill(processes: Sequence[Process], deadline: float, at_once: Callable[[], bool]) -> list[int]:
    """The exit code of each. Those that are left at the deadline are killed all at once: one that hangs keeps no other
    from its end, and of many the last is waited for no longer than the first."""
    for process in processes:
        while process.poll() is None and time.monotonic() < deadline and not at_once():
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # of a session of its own: what it started there goes with it
    last = time.monotonic() + KILLED_S
    return [_killed(process, last) for process in processes]


def _killed(process: Process, deadline: float) -> int:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        log.critical(
            "process %d was killed and has not ended in %g s: it hangs in the kernel, in a call to a device or a file "
            "system that does not answer, and ends with that; until then its node is not free",
            process.pid,
            KILLED_S,
        )
        return -signal.SIGKILL
