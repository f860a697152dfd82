"""How often a file is looked at, on a clock of the test's."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.buffer.pace import Pace, poll_pause_s


def looks(shortest_s: float, longest_s: float, news_at: set[float], until_s: float) -> list[float]:
    """When somebody who asks each 10 ms is told to look."""
    now, found = 0.0, []
    pace = Pace(shortest_s, longest_s, clock=lambda: now)
    for tick in range(int(100 * until_s)):
        now = tick / 100
        if pace.due():
            pace.looked(news=any(now - 0.01 < at <= now for at in news_at))
            found.append(now)
    return found


def test_silence_makes_it_rarer_up_to_the_longest_pause_and_news_makes_it_frequent_again() -> None:
    times = looks(0.2, 1.0, {10.0}, 12.0)
    pauses = {one: round(other - one, 2) for one, other in pairwise(times)}
    assert pauses[0.0] == pauses[times[1]] == 0.2  # the floor, until a quarter of the silence is longer
    assert max(pauses.values()) == 1.0
    assert len([time for time in times if time <= 10.0]) < 10 / 0.2 / 2


@given(st.floats(0.02, 0.5), st.floats(0.5, 5.0))
def test_nobody_waits_a_quarter_longer_than_the_silence_lasted(shortest_s: float, longest_s: float) -> None:
    times = looks(shortest_s, longest_s, set(), 20.0)
    for one, other in pairwise(times):
        assert shortest_s - 0.011 <= other - one <= max(shortest_s, min(longest_s, 0.25 * one)) + 0.011


def test_zero_is_always() -> None:
    assert len(looks(0.0, 1.0, set(), 1.0)) == 100


def test_who_commits_at_once_is_not_looked_at_without_end() -> None:
    assert (poll_pause_s(0.0), poll_pause_s(0.2)) == (0.02, 0.2)
    assert poll_pause_s(0.2, served=True) == 1.0
