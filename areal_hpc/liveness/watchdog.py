"""The launcher's watchdog: names who is stuck, has everybody show what it does, and in the end gives the attempt up.

    look(running)       each WATCH_S or, of many processes, more rarely; from the launcher's loop
        all get on      nothing
        quiet_s         a warning says who waits for whom; every role's stacks are in attempts/N/stacks/
        engine_s        an engine that hangs by itself is killed; the launcher replaces it, its prompts run again;
                        of one that has joined, which is nobody's to kill here, the seat is given up (``attendance``)
        worker_s        the same of a rollout worker; one that even SIGKILL does not end stays stuck, up to stall_s
        stall_s         Stalled: the launcher ends the attempt, with exit code 70

Two things are trouble: a process without a sign of life or in a file call without an end, whoever waits for it; and a
trainer or evaluator, without which no run ends, none of whose waits leads to anybody who gets on. Loading a model, an
evaluation or a checkpoint is neither: it is a named wait within its own limit, or moves a counter. See ``picture``.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from areal_hpc.cluster.owner import STOPPED, Owner
from areal_hpc.config.schema import LimitsConfig
from areal_hpc.errors import Stalled
from areal_hpc.fs import publish
from areal_hpc.liveness import stacks
from areal_hpc.liveness.attendance import Attendance
from areal_hpc.liveness.heartbeat import read_heartbeat
from areal_hpc.liveness.observer import Observer
from areal_hpc.liveness.picture import Explanation, Seen, explain, hung_engines, hung_workers
from areal_hpc.run_dir import AttemptDir

log = logging.getLogger(__name__)

WATCH_S = 1.0
WATCH_EACH_S = 0.01
"""Of more than a hundred processes so many heartbeats a second are read, each of them a request to a file server."""
REPEAT_S = 30.0
"""Shortest time until another root is named: the roots of one stall may change with each look."""


class Watchdog:
    """Watches the roles of one attempt from their heartbeats."""

    def __init__(self, attempt: AttemptDir, limits: LimitsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._attempt, self._limits, self._clock = attempt, limits, clock
        # Half the time without progress makes trouble, half the time in trouble makes it worth a word: between two
        # long phases there is an instant in which nothing has been achieved lately.
        self._half_s = limits.quiet_s / 2
        self._observer = Observer(attempt, silent_s=self._half_s, start_s=limits.start_s, clock=clock)
        self._next_look = clock()
        self._since: float | None = None  # when the trouble began
        self._named, self._told = "", -math.inf
        self._hung: dict[str, float] = {}  # engine or worker -> since when
        self._attendance = Attendance(attempt, limits, clock)

    def look(self, running: Mapping[tuple[str, int], stacks.Process]) -> None:
        """Judge the roles that run.

        Raises:
            Stalled: somebody has been stuck for ``limits.stall_s``.
        """
        now = self._clock()
        if now < self._next_look or not running:
            return
        self._next_look = now + min(max(WATCH_S, WATCH_EACH_S * len(running)), self._half_s)
        processes = {f"{role}-{index}": process for (role, index), process in running.items()}
        seen = self._observer.look(processes)
        self._attendance.look(seen)
        self._end_hung(seen, processes)
        explanation = explain(seen, self._half_s)
        if explanation.trouble:
            self._since = now if self._since is None else self._since
            lasted_s = now - self._since + self._half_s
            if self._tell(explanation, lasted_s):
                self._show_stacks(seen, processes)
            if lasted_s >= self._limits.stall_s:
                self._show_stacks(seen, processes, wake=True)
                self._give_up(explanation, lasted_s)
            return
        if self._named:
            log.warning("the run gets on again")
        self._since, self._named = None, ""

    def _end_hung(self, seen: Sequence[Seen], processes: Mapping[str, stacks.Process]) -> None:
        """Kill the engines and workers that hang for too long: who has died is replaced, whatever it died of."""
        now, limits = self._clock(), self._limits
        engines = hung_engines(seen, self._half_s) if limits.engine_s else {}
        workers = hung_workers(seen, self._half_s) if limits.worker_s else {}
        self._hung = {name: self._hung.get(name, now) for name in (*engines, *workers)}
        for name, sentence in (engines | workers).items():
            key, limit_s = ("engine_s", limits.engine_s) if name in engines else ("worker_s", limits.worker_s)
            if now - self._hung[name] + self._half_s >= limit_s and self._beat_of(name, processes[name]):
                log.warning("%s: longer than limits.%s = %g s, so it is killed and replaced", sentence, key, limit_s)
                processes[name].send_signal(signal.SIGKILL)
                del self._hung[name]

    def _beat_of(self, name: str, process: stacks.Process) -> Mapping[str, Any] | None:
        """The last heartbeat, where this process left it; one that is still coming up may find another's."""
        beat = read_heartbeat(self._attempt, name)
        return None if beat is None or beat["pid"] != process.pid else beat

    def _tell(self, explanation: Explanation, lasted_s: float) -> bool:
        """Say where the waits lead to, unless it has been said or is not worth it yet; whether it was said."""
        news = explanation.root != self._named and (not self._named or self._clock() - self._told >= REPEAT_S)
        if lasted_s < self._limits.quiet_s or not news:
            return False
        self._named, self._told = explanation.root, self._clock()
        text = _text(explanation, lasted_s)
        publish(self._attempt.stall, f"{text}\n".encode())
        log.warning("%s", text.replace("\n", " "))
        log.warning("the stacks of all roles are in %s", self._attempt.stacks)
        return True

    def _give_up(self, explanation: Explanation, lasted_s: float) -> NoReturn:
        text = _text(explanation, lasted_s)
        publish(self._attempt.stall, f"{text}\n".encode())
        raise Stalled(
            f"{text}\nThat is longer than limits.stall_s: the attempt ends here. The stacks of all roles are in "
            f"{self._attempt.stacks}; mend the cause and go on from the last checkpoint with --resume"
        )

    def _show_stacks(
        self, seen: Sequence[Seen], processes: Mapping[str, stacks.Process], *, wake: bool = False
    ) -> None:
        """Have every role append its stacks to its file; one that is stopped does when it goes on.

        Args:
            wake: let it go on, now that all is lost.
        """
        stacks.ask_all(self._attempt)
        for name in (one.name for one in seen if one.absent):
            beat = self._beat_of(name, processes[name])
            if beat is None:
                continue  # one that is still coming up would end by the signal
            if wake or Owner.from_record(beat).kernel_state() != STOPPED:
                stacks.ask_silent(processes[name], wake=wake)


def _text(explanation: Explanation, lasted_s: float) -> str:
    return f"stuck for {lasted_s:.0f} s at {explanation.root}:\n{explanation.text()}"
