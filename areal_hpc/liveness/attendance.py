"""The launcher's eye on engines that have joined the attempt: they are nobody's processes here, and may vanish.

look(roles)     each second, from the launcher's watchdog
  gets on       nothing
  silent        for ``engine_s``, or ``start_s`` before its first sign of life: its seat is given up
  hangs         its heart beats, but for as long somebody has waited for its answer: the same

Whoever sits on a seat that was given up sees that and ends; one that cannot is killed by its satellite (``eviction``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from areal_hpc.config.schema import LimitsConfig
from areal_hpc.liveness import seats
from areal_hpc.liveness.heartbeat import Pulse, read_heartbeats
from areal_hpc.liveness.observer import last_words
from areal_hpc.liveness.picture import Seen, hung_engines
from areal_hpc.liveness.seats import Seat
from areal_hpc.run_dir import AttemptDir

log = logging.getLogger(__name__)


class Attendance:
    """Gives up the seats of those who do not get on."""

    def __init__(self, attempt: AttemptDir, limits: LimitsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._attempt, self._limits, self._clock = attempt, limits, clock
        self._silence_s = limits.engine_s or limits.stall_s
        self._half_s = limits.quiet_s / 2  # as the watchdog counts it
        self._pulses: dict[Seat, Pulse] = {}
        self._hung: dict[Seat, float] = {}  # since when

    def look(self, roles: Sequence[Seen]) -> None:
        """Judge those who hold a seat now; ``roles``, the run's own processes, may wait for them."""
        taken = seats.newest(self._attempt).values()
        self._pulses = {seat: self._pulses.get(seat) or Pulse(self._clock) for seat in taken}
        beats = read_heartbeats(self._attempt, [seat.name for seat in taken])
        joined: dict[str, tuple[Seat, Seen]] = {}
        for seat, pulse in self._pulses.items():
            beat = beats[seat.name]
            if beat is not None and beat["incarnation"] != seat.incarnation:
                beat = None  # its last holder's; this one is still coming up
            pulse.see(beat)
            silent_s = pulse.silent_s()
            if silent_s > (self._limits.start_s if beat is None else self._silence_s):
                self._give_up(seat, f"has given no sign of life for {silent_s:.0f} s")
            elif beat is not None and not beat["ended"] and silent_s < self._half_s:
                joined[seat.name] = seat, last_words(seat.name, beat, silent_s)
        if self._limits.engine_s:
            self._judge_hung(roles, joined)

    def _judge_hung(self, roles: Sequence[Seen], joined: Mapping[str, tuple[Seat, Seen]]) -> None:
        now = self._clock()
        hung = hung_engines([*roles, *(seen for _, seen in joined.values())], self._half_s)
        sentences = {joined[name][0]: sentence for name, sentence in hung.items() if name in joined}
        self._hung = {seat: self._hung.get(seat, now) for seat in sentences}
        for seat, since in self._hung.items():
            if now - since + self._half_s >= self._limits.engine_s:
                self._give_up(seat, f"hangs: {sentences[seat]}; longer than limits.engine_s")

    def _give_up(self, seat: Seat, why: str) -> None:
        host = seat.holder().get("host", "an unknown host")
        log.warning("%s on %s %s: its seat is free for another engine", seat.name, host, why)
        seat.leave()
