"""The launcher's eye on engines that have joined the attempt: they are nobody's processes here, and may vanish.

look()        each second, from the launcher's watchdog
  beats       nothing
  silent      for ``limit_s``: its seat is given up, and whoever still sits there sees that and ends
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from areal_hpc.fs import AttemptDir
from areal_hpc.roles import seats
from areal_hpc.roles.heartbeat import Pulse, read_heartbeat
from areal_hpc.roles.seats import Seat

log = logging.getLogger(__name__)


class Attendance:
    """Gives up the seats of those who are silent.

    Args:
        limit_s: longest time without a sign of life, the first one included.
    """

    def __init__(self, attempt: AttemptDir, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._attempt, self._limit_s, self._clock = attempt, limit_s, clock
        self._pulses: dict[Seat, Pulse] = {}

    def look(self) -> None:
        """Judge those who hold a seat now."""
        taken = seats.newest(self._attempt).values()
        self._pulses = {seat: self._pulses.get(seat) or Pulse(self._clock) for seat in taken}
        for seat, pulse in self._pulses.items():
            beat = read_heartbeat(self._attempt, seat.name)
            pulse.see(beat if beat is not None and beat["incarnation"] == seat.incarnation else None)
            if pulse.silent_s() > self._limit_s:
                holder = seat.holder()
                log.warning(
                    "%s on %s has given no sign of life for %.0f s: its seat is free for another engine",
                    seat.name,
                    holder.get("host", "an unknown host"),
                    pulse.silent_s(),
                )
                seat.leave()
