"""The launcher's watchdog: names who is stuck, has everybody show what it does, and in the end gives the attempt up.

    look(running)       each WATCH_S, from the launcher's loop
        all get on      nothing
        quiet_s         a warning says who waits for whom; every role's stacks are in attempts/N/stacks/
        stall_s         Stalled: the launcher ends the attempt, with exit code 70

Two things are trouble: a process without a sign of life, whoever waits for it; and a trainer or evaluator, without
which no run ends, none of whose waits leads to anybody who gets on. Loading a model, an evaluation or a checkpoint is
neither: it is a named wait within its own limit, or moves a counter. See ``report.picture``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from areal_hpc.config.schema import LimitsConfig
from areal_hpc.errors import Stalled
from areal_hpc.fs import AttemptDir, publish
from areal_hpc.report.observer import Observer
from areal_hpc.report.picture import Explanation, explain
from areal_hpc.roles import stacks
from areal_hpc.roles.heartbeat import read_heartbeat

log = logging.getLogger(__name__)

WATCH_S = 1.0


class Process(Protocol):
    """What is needed of a running role."""

    @property
    def pid(self) -> int: ...


class Watchdog:
    """Watches the roles of one attempt from their heartbeats."""

    def __init__(self, attempt: AttemptDir, limits: LimitsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._attempt, self._limits, self._clock = attempt, limits, clock
        self._observer = Observer(attempt, silent_s=limits.quiet_s, start_s=limits.start_s, clock=clock)
        self._next_look = clock()
        self._since = clock()
        self._named = ""

    def look(self, running: Mapping[tuple[str, int], Process]) -> None:
        """Judge the roles that run.

        Raises:
            Stalled: somebody has been stuck for ``limits.stall_s``.
        """
        now = self._clock()
        if now < self._next_look or not running:
            return
        self._next_look = now + WATCH_S
        processes = {f"{role}-{index}": process.pid for (role, index), process in running.items()}
        explanation = explain(self._observer.look(processes), self._limits.quiet_s)
        if explanation.trouble:
            self._in_trouble(explanation, processes, now)
        elif self._named:
            log.warning("the run gets on again")
            self._since, self._named = now, ""

    def _in_trouble(self, explanation: Explanation, processes: Mapping[str, int], now: float) -> None:
        """Name whom the waits lead to, once; give up when it has lasted too long."""
        if not self._named:
            self._since = now - self._limits.quiet_s
        lasted_s = now - self._since
        if explanation.root != self._named:
            self._named = explanation.root
            self._show_stacks(processes)
            self._tell(explanation, lasted_s)
        if lasted_s >= self._limits.stall_s:
            self._show_stacks(processes, wake=True)
            raise Stalled(
                f"{explanation.root} has held up the run for {lasted_s:.0f} s, longer than limits.stall_s; its work is "
                f"safe up to the last checkpoint: mend the cause and go on with --resume\n{explanation.text()}"
            )

    def _tell(self, explanation: Explanation, lasted_s: float) -> None:
        text = f"{explanation.root} has held up the run for {lasted_s:.0f} s:\n{explanation.text()}"
        log.warning("%s", text.replace("\n", " "))
        log.warning("the stacks of all roles are in %s", self._attempt.stacks)
        publish(self._attempt.stall, f"{text}\n".encode())

    def _show_stacks(self, processes: Mapping[str, int], *, wake: bool = False) -> None:
        """Have every role that knows how append its stacks to its file; a stopped one does when it goes on."""
        for name, pid in processes.items():
            role, _, index = name.rpartition("-")
            if read_heartbeat(self._attempt, role, int(index)) is not None:
                stacks.request(pid, wake=wake)
