"""A satellite watches its own engines: one that the run has given up ends, so that its devices are free for another.

look()            each second, from the satellite's watchdog
  seat is held    nothing
  given up        the engine sees that itself and leaves; one that is stopped, or hangs, does not
  for limit_s     it is killed; the satellite's supervisor then starts another one in its place
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Mapping

from areal_hpc.liveness import seats
from areal_hpc.liveness.seats import Seat
from areal_hpc.liveness.stacks import Process
from areal_hpc.run_dir import AttemptDir

log = logging.getLogger(__name__)

LOOK_S = 1.0


class Eviction:
    """Kills engines that stay on after their seat was given up.

    Args:
        limit_s: longest time from when a seat was given up to the end of its engine: it may leave in order meanwhile.
    """

    def __init__(self, attempt: AttemptDir, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._attempt, self._limit_s, self._clock = attempt, limit_s, clock
        self._since: dict[Seat, float] = {}
        self._next_look = clock()

    def look(self, own: Mapping[int, Seat], running: Mapping[tuple[str, int], Process]) -> None:
        """Judge this satellite's engines.

        Args:
            own: their seats, by index.
            running: their processes, by role and index.
        """
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        held = set(seats.newest(self._attempt).values())
        self._since = {seat: self._since.get(seat, now) for seat in own.values() if seat not in held}
        for seat, since in self._since.items():
            if now - since > self._limit_s and ("generator", seat.index) in running:
                log.warning(
                    "%s was given up and has not ended in %.0f s (limits.stop_s): it is killed, and its place is free",
                    seat.name,
                    now - since,
                )
                running["generator", seat.index].send_signal(signal.SIGKILL)
                self._since[seat] = math.inf  # once is enough, also where the kernel takes its time
