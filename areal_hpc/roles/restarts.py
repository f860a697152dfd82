"""How often what died is started again: pure functions of the history.

a generator, part, rollout worker, evaluator   replaced in the running attempt     limits.restarts in restart_window_s
a trainer rank                                 the next attempt of the whole run   limits.attempts without progress
anything, with exit code 2                     a person's mistake: never
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0
"""Before the second and the last restart of a process within one window; the first comes at once."""


def pause_before_restart(deaths: Sequence[float], limit: int, window_s: float) -> float | None:
    """Seconds to wait before a process is replaced; None when it has died too often.

    Args:
        deaths: when it died, in seconds of one clock, the newest last: that is the death in question.
        limit: replacements within ``window_s`` seconds.
    """
    recent = sum(deaths[-1] - death < window_s for death in deaths)
    if recent > limit:
        return None
    return 0.0 if recent == 1 else min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (recent - 2))


def attempts_in_vain(progress: Sequence[bool]) -> int:
    """How many attempts in a row, the last included, committed no new step.

    Args:
        progress: of each attempt, the oldest first, whether it committed one.
    """
    return next((number for number, moved in enumerate(reversed(progress)) if moved), len(progress))


def goes_on(progress: Sequence[bool], limit: int) -> bool:
    """Whether another attempt follows the one that failed last; ``limit`` 0 never lets one follow."""
    return limit > 0 and attempts_in_vain(progress) < limit
