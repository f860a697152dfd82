"""How often what died is started again: the policy alone, from histories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.roles.restarts import FIRST_PAUSE_S, LAST_PAUSE_S, attempts_in_vain, goes_on, pause_before_restart


@pytest.mark.parametrize(
    ("deaths", "limit", "window_s", "pause"),
    [
        ([5.0], 3, 600.0, 0.0),
        ([5.0, 6.0], 3, 600.0, FIRST_PAUSE_S),
        ([5.0, 6.0, 7.0], 3, 600.0, 2 * FIRST_PAUSE_S),
        ([5.0, 6.0, 7.0, 8.0], 3, 600.0, None),
        ([5.0, 6.0, 7.0, 606.0], 3, 600.0, FIRST_PAUSE_S),  # those at 5 and 6 lie a window back
        ([5.0], 0, 600.0, None),
        ([float(n) for n in range(12)], 20, 600.0, LAST_PAUSE_S),
    ],
)
def test_pauses_and_their_end(deaths: list[float], limit: int, window_s: float, pause: float | None) -> None:
    assert pause_before_restart(deaths, limit, window_s) == pause


@given(
    gaps=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=60),
    limit=st.integers(0, 5),
    window_s=st.floats(1.0, 300.0),
)
def test_never_more_restarts_in_a_window_than_the_limit(gaps: list[float], limit: int, window_s: float) -> None:
    """Whatever the deaths: count the restarts that the policy grants, until it grants none."""
    deaths: list[float] = []
    granted: list[float] = []
    now = 0.0
    for gap in gaps:
        now += gap
        deaths.append(now)
        pause = pause_before_restart(deaths, limit, window_s)
        if pause is None:
            break
        assert 0.0 <= pause <= LAST_PAUSE_S
        granted.append(now)
    for moment in granted:
        assert sum(moment - window_s < other <= moment for other in granted) <= limit


@pytest.mark.parametrize(
    ("progress", "in_vain"),
    [([], 0), ([True], 0), ([False], 1), ([True, False, False], 2), ([False, False, True], 0), ([False] * 4, 4)],
)
def test_attempts_in_vain_are_counted_from_the_last(progress: list[bool], in_vain: int) -> None:
    assert attempts_in_vain(progress) == in_vain
    assert [goes_on(progress, limit) for limit in (0, 1, 2, 3, 5)] == [
        False,
        in_vain < 1,
        in_vain < 2,
        in_vain < 3,
        in_vain < 5,
    ]
