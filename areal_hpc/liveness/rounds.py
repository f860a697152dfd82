"""Work beside a loop that goes on: Slurm may take its time to answer, and who ends the run is to be heard meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Rounds:
    """Has ``work`` done in a thread, time and again and one round at a time.

    Args:
        every_s: seconds from the beginning of one round to that of the next, at least.
    """

    def __init__(
        self, work: Callable[[], None], every_s: float, *, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._work, self._every_s, self._name, self._clock = work, every_s, name, clock
        self._next = clock()
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin a round, if it is time for one and the last one is over."""
        if self._clock() < self._next or (self._thread is not None and self._thread.is_alive()):
            return
        self._next = self._clock() + self._every_s
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()
