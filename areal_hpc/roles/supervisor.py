"""One attempt's processes, from their start to their end.

start       generators (with their parts on further nodes, where engines span several), rollout workers, trainer ranks,
            evaluator: all at once, each finds the others by endpoint
watch       a generator, part, rollout worker or evaluator that dies is replaced, within limits.restarts;
            a trainer rank that dies ends the attempt; so does anybody's mistake in the configuration, and a node
            without the devices that a process was given there
end         trainers first (they commit), then the rest, within limits.stop_s, by pid
"""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_hpc.cluster.components import num_parts
from areal_hpc.cluster.local import Ended, LocalLauncher
from areal_hpc.cluster.remote import RemoteLauncher
from areal_hpc.config.recipes import is_offline
from areal_hpc.config.schema import Config, LimitsConfig
from areal_hpc.errors import AttemptFailed, NodeLost, RoleDied
from areal_hpc.exits import EXIT_DONE, EXIT_ELSEWHERE, EXIT_STOPPED, EXIT_USER_ERROR, signal_name
from areal_hpc.liveness.stacks import Process
from areal_hpc.roles.restarts import pause_before_restart

WATCH_S = 0.25
FINISHING = ("trainer", "evaluator")
"""Roles that end by themselves when the run is done."""


def roles_of(config: Config) -> dict[str, int]:
    """How many processes of each role a run has; a replay or an offline algorithm trains and does nothing else, and
    `areal-hpc eval` does not train.

    Raises:
        ConfigError: see ``nodes_of_engine``.
    """
    if config.evaluation.checkpoint:
        return {**_engines(config), "evaluator": 1}
    if config.replay.run or is_offline(config.algorithm):
        return {"trainer": config.trainer.ranks}
    return {
        **_engines(config),
        "rollout": config.rollout.workers,
        "trainer": config.trainer.ranks,
        "evaluator": 1 if config.evaluation.every_steps else 0,
    }


def _engines(config: Config) -> dict[str, int]:
    parts = num_parts(config)
    return {"generator": config.generation.replicas, **({"part": parts} if parts else {})}


class Supervisor:
    """Starts, watches and replaces the processes of one attempt.

    Args:
        irreplaceable: roles whose death ends the attempt.
        finishing: roles that end by themselves; when none of them is left, there is nothing more to watch.
        stop: whether somebody asked for a stop.
        show: called several times a second.
        record: takes ``("restart", values)`` for each process that is replaced.
        watchdog: looks at those that run, and raises Stalled when they have got nowhere for too long.
        check_fence: raises Fenced when a newer attempt owns the run; asked before anything is started again.
    """

    def __init__(
        self,
        launcher: LocalLauncher | RemoteLauncher,
        limits: LimitsConfig,
        *,
        irreplaceable: Sequence[str] = ("trainer",),
        finishing: Sequence[str] = FINISHING,
        stop: Callable[[], bool],
        show: Callable[[], None],
        record: Callable[[str, Mapping[str, Any]], None],
        check_fence: Callable[[], None],
        watchdog: Callable[[Mapping[tuple[str, int], Process]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launcher, self._limits = launcher, limits
        self._irreplaceable, self._finishing = irreplaceable, finishing
        self._stop, self._show, self._record, self._check_fence = stop, show, record, check_fence
        self._watchdog, self._clock = watchdog, clock
        self._deaths: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._due: dict[tuple[str, int], float] = {}  # who is started again, and when

    def start(self, roles: Mapping[str, int]) -> None:
        for role, count in roles.items():
            for index in range(count):
                if not self._stop():
                    self._launcher.start(role, index)

    def watch(self) -> str:
        """Watch until trainers and evaluator are done ("finished") or a stop is asked for ("stopped").

        Raises:
            AttemptFailed: an irreplaceable one ended too early; another attempt may go on.
            RoleDied: somebody ended too early who is not to be started again.
            NodeLost: somebody found that its node has lost its devices.
            Fenced: a newer attempt owns the run.
            Stalled: nobody gets on any more; another attempt may.
        """
        while not self._stop():
            self.judge(self._launcher.died())
            self._watchdog(self._launcher.running)
            self._start_due()
            self._show()
            if not any(role in self._finishing for role, _ in [*self._launcher.running, *self._due]):
                return "finished"
            time.sleep(WATCH_S)
        return "stopped"

    def judge(self, ended: Sequence[Ended]) -> None:
        """A trainer or evaluator may be done; whatever else ends is replaced, or ends the attempt.

        Of several that ended together, one that a signal killed is the likelier cause.

        Raises:
            AttemptFailed, RoleDied, NodeLost, Fenced: as ``watch``.
        """
        early = [one for one in ended if not (one.role in self._finishing and one.code == EXIT_DONE)]
        if not early:
            return
        if lost := next((one for one in early if one.code == EXIT_ELSEWHERE), None):
            raise node_lost(self._launcher, lost)
        for one in early:
            if one.code == EXIT_USER_ERROR:
                raise RoleDied(obituary(self._launcher, one))
        if any(one.role in self._irreplaceable for one in early):
            raise AttemptFailed(obituary(self._launcher, min(early, key=lambda one: one.code >= 0)))
        self._check_fence()
        for one in early:
            self._replace(one)

    def _replace(self, ended: Ended) -> None:
        """Have it started again, at once or after a pause.

        Raises:
            RoleDied: it has died too often.
        """
        limits, now = self._limits, self._clock()
        deaths = self._deaths[ended.role, ended.index]
        deaths.append(now)
        pause = pause_before_restart(deaths, limits.restarts, limits.restart_window_s)
        if pause is None and limits.restarts:
            often = f"more often than limits.restarts = {limits.restarts} allows in {limits.restart_window_s:g} s"
            raise RoleDied(f"{ended.name} died {often}: {obituary(self._launcher, ended)}")
        if pause is None:
            raise RoleDied(obituary(self._launcher, ended))
        self._due[ended.role, ended.index] = now + pause
        self._record("restart", {"process": ended.name, "reason": fate(ended), "pause_s": pause})

    def _start_due(self) -> None:
        for key in [key for key, when in self._due.items() if when <= self._clock()]:
            del self._due[key]
            self._launcher.start(*key)


def judge_stopped(launcher: LocalLauncher | RemoteLauncher, ended: Sequence[Ended]) -> None:
    """Nothing if the trainer that commits stopped, or had not begun yet (SIGTERM found no handler).

    Raises:
        RoleDied: it did not, so there may be no checkpoint of the last steps.
    """
    for one in ended:
        if (one.role, one.index) != ("trainer", 0) or one.code in (EXIT_DONE, EXIT_STOPPED, -signal.SIGTERM):
            continue
        if one.code == -signal.SIGKILL:
            raise RoleDied(
                f"{one.name} did not end within limits.stop_s and was killed; the run goes on from its last checkpoint "
                "with --resume. Raise limits.stop_s if a checkpoint takes longer"
            )
        raise RoleDied(obituary(launcher, one))


def fate(ended: Ended) -> str:
    """Who ended, and how."""
    if ended.code >= 0:
        return f"{ended.name} ended with exit code {ended.code}"
    return f"{ended.name} ended with signal {-ended.code} ({signal_name(-ended.code)})"


def node_lost(launcher: LocalLauncher | RemoteLauncher, ended: Ended) -> NodeLost:
    """What a process has found that ended with EXIT_ELSEWHERE."""
    place = launcher.placement_of(ended.role, ended.index)
    which = f"device {', '.join(map(str, place.devices))}" if place.devices else "the devices"
    return NodeLost(
        f"node {place.node} has lost {which} of {ended.name}; {_last_words(launcher, ended)}",
        place.node,
    )


def obituary(launcher: LocalLauncher | RemoteLauncher, ended: Ended) -> str:
    """Who ended, how, and the last lines of its log."""
    return f"{fate(ended)}; {_last_words(launcher, ended)}"


def _last_words(launcher: LocalLauncher | RemoteLauncher, ended: Ended) -> str:
    log_path = launcher.attempt.log(ended.role, ended.index)
    lines = launcher.last_lines(ended.role, ended.index)
    return f"its log {log_path} " + (f"ends with:\n{lines}" if lines else "is empty")
