"""The order in which a launcher ends what it started; the processes themselves are in contract/test_launchers.py."""

from __future__ import annotations

import time
from collections.abc import Sequence

from areal_hpc.cluster.local import KILL_RESERVE_S, Key, end_in_order


def test_trainers_end_first_and_leave_the_others_time() -> None:
    running: dict[Key, None] = dict.fromkeys([("generator", 0), ("trainer", 1), ("rollout", 0), ("trainer", 0)])
    calls: list[tuple[list[Key], float]] = []

    def end(keys: Sequence[Key], deadline: float) -> None:
        calls.append((list(keys), deadline))
        for key in keys:
            del running[key]

    before = time.monotonic()
    end_in_order(running, end, 30.0)
    (trainers, first), (others, last) = calls
    assert trainers == [("trainer", 1), ("trainer", 0)]
    assert others == [("generator", 0), ("rollout", 0)]
    assert last - first == KILL_RESERVE_S
    assert before + 30.0 <= last <= time.monotonic() + 30.0
