"""What each process of an attempt says in its heartbeat, as ``picture`` wants it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from areal_hpc.cluster.owner import HANGING, STOPPED, Owner
from areal_hpc.liveness.heartbeat import Pulse, read_heartbeats
from areal_hpc.liveness.picture import Seen
from areal_hpc.run_dir import AttemptDir
from areal_hpc.waits import Achieved, Wait


class Observer:
    """Looks at the heartbeats of an attempt again and again.

    Args:
        silent_s: a process whose heartbeat has not changed for so long counts as silent.
        start_s: longest time until a process has a heartbeat.
        at_once: also believe the kernel of this host, which knows at once that a process is gone or stopped. Without,
            one that is being replaced has ``silent_s`` to come back.
    """

    def __init__(
        self,
        attempt: AttemptDir,
        *,
        silent_s: float,
        start_s: float,
        at_once: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempt, self._silent_s, self._start_s, self._at_once = attempt, silent_s, start_s, at_once
        self._clock = clock
        self._pulses: dict[str, Pulse] = {}

    def look(self, names: Collection[str]) -> list[Seen]:
        """The processes ``names`` as they are now."""
        return [self._judge(name, beat) for name, beat in read_heartbeats(self._attempt, names).items()]

    def _judge(self, name: str, beat: dict[str, Any] | None) -> Seen:
        pulse = self._pulses.setdefault(name, Pulse(self._clock))
        pulse.see(beat)
        silent_s = pulse.silent_s()
        if beat is None:
            starting = Wait(what="coming up, no heartbeat yet", seconds=silent_s, limit_s=self._start_s)
            return Seen(name=name, waits=(starting,))
        if beat["ended"]:
            return Seen(name=name, ended=True)
        return replace(last_words(name, beat, silent_s), absent=self._absence(beat, silent_s))

    def _absence(self, beat: Mapping[str, Any], silent_s: float) -> str:
        owner = Owner.from_record(beat)
        state, process = owner.kernel_state(), f"process {owner.pid} on {owner.host}"
        if self._at_once and owner.is_gone():
            return f"is gone: {process} ended without a word"
        if silent_s < self._silent_s and not (self._at_once and state == STOPPED):
            return ""
        reasons = {
            STOPPED: f"; {process} is stopped by a signal: `kill -CONT {owner.pid}` lets it go on",
            HANGING: f"; {process} hangs in the kernel: a disk or file system does not answer",
        }
        return f"has given no sign of life for {silent_s:.0f} s{reasons.get(state, f'; {process}')}"

    def has_proof(self, one: Seen) -> bool:
        """Whether more looks would not tell better if it lives: its heartbeat was seen to change, or it is away."""
        return one.ended or bool(one.absent) or self._pulses[one.name].moved


def last_words(name: str, beat: Mapping[str, Any], since_s: float = 0.0) -> Seen:
    """What a process said of itself ``since_s`` seconds ago."""
    waits = (Wait.from_record(record) for record in beat["waits"])
    achieved = {what: Achieved(**record) for what, record in beat["achieved"].items()}
    return Seen(
        name=name,
        waits=tuple(replace(wait, seconds=wait.seconds + since_s) for wait in waits),
        achieved={what: replace(one, seconds=one.seconds + since_s) for what, one in achieved.items()},
    )
