"""How often a file that another process writes is looked at.

A look costs the metadata server of a shared file system two or three requests (open, attributes, close), whether there
is news or not, and hundreds of processes share that server.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SHORTEST_S = 0.02
"""Also for who commits each group at once: the file is looked at between two of them, too."""
SERVED_RARER = 5.0
"""With 0.2 s between two commits a chain is looked at each second, and half of what is sealed is seen in less."""
LONGEST_S = 1.0
OF_SILENCE = 0.25


def poll_pause_s(commit_s: float, served: bool = False) -> float:
    """How often what is written each ``commit_s`` is worth a look; rarer where a server is asked (``is_served``)."""
    return max(commit_s, SHORTEST_S) * (SERVED_RARER if served else 1.0)


class Pace:
    """``due()`` says when to look, ``looked(news)`` what came of it.

    Never more often than each ``shortest_s``, nor than a quarter of the time that has passed without news: who waits
    for long waits a quarter longer at most, and never more than ``longest_s``. Zero for ``shortest_s`` is always.
    """

    def __init__(
        self, shortest_s: float, longest_s: float = LONGEST_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shortest_s, self._longest_s, self._clock = shortest_s, longest_s, clock
        self._news_at = self._next = clock()

    def due(self) -> bool:
        return self._clock() >= self._next

    def looked(self, news: bool) -> None:
        now = self._clock()
        if news:
            self._news_at = now
        if self._shortest_s:
            rare_s = min(self._longest_s, OF_SILENCE * (now - self._news_at))
            self._next = now + max(self._shortest_s, rare_s)
