"""A satellite's engines whose seats were given up: those that cannot leave by themselves are killed, and no others."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from areal_hpc.liveness import seats
from areal_hpc.roles.eviction import Eviction
from areal_hpc.run_dir import AttemptDir, RunDir

STOP_S = 20.0


@dataclass
class Engine:
    pid: int = 7
    signals: list[int] = field(default_factory=list)

    def send_signal(self, number: int, /) -> None:
        self.signals.append(number)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    return RunDir.create(tmp_path / "run").attempt(1).create()


def test_fault_41_one_that_was_given_up_and_does_not_end_is_killed_and_nobody_else(
    attempt: AttemptDir, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    eviction = Eviction(attempt, STOP_S, lambda: now)
    own = {seat.index: seat for seat in (seats.take(attempt, 1, {}) for _ in range(3))}
    engines = {("generator", index): Engine() for index in own}
    own[1].leave()  # by the run's launcher
    own[2].leave()
    for now in (1.0, 10.0, 20.9):  # noqa: B007  the clock
        eviction.look(own, engines)
    assert [engine.signals for engine in engines.values()] == [[], [], []], "it may leave in order"
    del engines["generator", 2]  # it has
    for now in (22.0, 60.0):  # noqa: B007
        eviction.look(own, engines)
    assert {key: engine.signals for key, engine in engines.items()} == {
        ("generator", 1): [signal.SIGKILL],
        ("generator", 3): [],
    }
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("generator-1 was given up and has not ended in 21 s (limits.stop_s): it is killed")


def test_who_sits_on_a_seat_that_was_used_before_has_his_own_time(attempt: AttemptDir) -> None:
    now = 0.0
    eviction = Eviction(attempt, STOP_S, lambda: now)
    before = seats.take(attempt, 1, {})
    before.leave()
    eviction.look({1: before}, {("generator", 1): Engine()})
    after, engine = seats.take(attempt, 1, {}), Engine()
    for now in (15.0, 30.0, 100.0):  # noqa: B007  the clock
        eviction.look({1: after}, {("generator", 1): engine})
    assert engine.signals == []
    after.leave()
    for now in (101.0, 120.0):  # noqa: B007
        eviction.look({1: after}, {("generator", 1): engine})
    assert engine.signals == []
    now = 122.0
    eviction.look({1: after}, {("generator", 1): engine})
    assert engine.signals == [signal.SIGKILL]
