"""Seats of engines that join: one each, used again, and told by a directory's names alone."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.config.schema import LimitsConfig
from areal_hpc.fs import publish_json
from areal_hpc.liveness import seats
from areal_hpc.liveness.attendance import Attendance
from areal_hpc.liveness.seats import Seat
from areal_hpc.run_dir import AttemptDir, RunDir

FIRST = 2  # the run has two engines of its own


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    return RunDir.create(tmp_path / "run").attempt(1).create()


def take(attempt: AttemptDir) -> Seat:
    return seats.take(attempt, FIRST, {"host": "n1"})


def test_seats_follow_those_of_the_runs_own_engines_and_are_used_again(attempt: AttemptDir) -> None:
    one, two = take(attempt), take(attempt)
    assert [(seat.name, seat.incarnation) for seat in (one, two)] == [("generator-2", 0), ("generator-3", 0)]
    one.leave()
    again = take(attempt)
    assert (again.name, again.incarnation) == ("generator-2", 1)
    assert again.is_held()
    assert not one.is_held()
    assert sorted(os.listdir(attempt.root / "seats")) == ["2.1", "3.0"], "what is told by a later name goes"
    assert again.holder() == {"host": "n1"}


def test_an_engine_is_there_from_when_it_is_up_until_its_seat_is_left(attempt: AttemptDir) -> None:
    seat = take(attempt)
    assert (seats.newest(attempt), seats.present(attempt), seats.vacant(attempt)) == ({2: seat}, {}, set())
    seat.come_up()
    assert seats.present(attempt) == {2: seat}
    seat.leave()
    seat.leave()  # its launcher says so, too
    assert (seats.newest(attempt), seats.present(attempt), seats.vacant(attempt)) == ({}, {}, {"generator-2"})
    take(attempt)
    assert (seats.present(attempt), seats.vacant(attempt)) == ({}, set()), "the next one is not up yet"


def test_a_seat_that_is_free_and_not_wanted_is_left_to_others(attempt: AttemptDir) -> None:
    given_up, _ = take(attempt), take(attempt)
    given_up.leave()  # by the run's launcher; its process still runs here
    seat = seats.take(attempt, FIRST, {}, besides=[given_up.index])
    assert (seat.name, seat.incarnation) == ("generator-4", 0)
    assert [(one.name, one.incarnation) for one in seats.last(attempt)] == [
        ("generator-2", 0),
        ("generator-3", 0),
        ("generator-4", 0),
    ]


def test_one_that_was_given_up_and_wakes_takes_nobodys_seat_away(attempt: AttemptDir) -> None:
    asleep = take(attempt)
    asleep.leave()  # by the run's launcher
    successor = take(attempt)
    successor.come_up()
    asleep.come_up()
    asleep.leave()
    assert successor.is_held()
    assert seats.present(attempt) == {2: successor}


def test_of_many_at_the_same_moment_each_gets_a_seat_of_its_own(attempt: AttemptDir) -> None:
    for seat in [take(attempt) for _ in range(3)]:
        seat.leave()
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(take, [attempt] * 8))
    assert len({seat.index for seat in taken}) == 8
    assert {seat.index for seat in taken} == set(range(FIRST, FIRST + 8))


@settings(max_examples=30)
@given(st.lists(st.integers(-1, 5), max_size=30))
def test_there_are_never_more_seats_than_engines_at_once(
    tmp_path_factory: pytest.TempPathFactory, moves: list[int]
) -> None:
    """-1: one joins; else that one of those who are there leaves."""
    attempt = RunDir.create(tmp_path_factory.mktemp("runs") / "run").attempt(1).create()
    there: list[Seat] = []
    most, ever = 0, set[tuple[int, int]]()
    for move in moves:
        if move >= 0 and there:
            there.pop(move % len(there)).leave()
        elif move < 0:
            there.append(take(attempt))
            assert (there[-1].index, there[-1].incarnation) not in ever, "nobody is ever taken for another"
            ever.add((there[-1].index, there[-1].incarnation))
        most = max(most, len(there))
        assert seats.newest(attempt) == {seat.index: seat for seat in there}
    assert {index for index, _ in ever} == set(range(FIRST, FIRST + most))


def beat(attempt: AttemptDir, seat: Seat, counter: int) -> None:
    told = {"incarnation": seat.incarnation, "counter": counter, "ended": False, "waits": [], "achieved": {}}
    publish_json(attempt.heartbeat("generator", seat.index), told)


def test_a_seat_whose_engine_is_silent_is_given_up_and_only_that(
    attempt: AttemptDir, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    attendance = Attendance(attempt, LimitsConfig(engine_s=120.0), lambda: now)
    alive, cut_off, never = take(attempt), take(attempt), take(attempt)
    beat(attempt, cut_off, 1)
    for second in range(0, 121, 10):
        now = float(second)
        beat(attempt, alive, second)
        attendance.look([])
    assert [seat.is_held() for seat in (alive, cut_off, never)] == [True, True, True]
    for now, held in ((121.0, [True, False, True]), (301.0, [True, False, False])):
        beat(attempt, alive, int(now))
        attendance.look([])
        assert [seat.is_held() for seat in (alive, cut_off, never)] == held, "what comes up has start_s"
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "generator-3 on n1 has given no sign of life for 121 s: its seat is free for another engine"
    assert second.startswith("generator-4 on n1 has given no sign of life for 301 s: ")


def test_the_heartbeat_of_who_sat_there_before_is_nobodys(attempt: AttemptDir) -> None:
    now = 0.0
    attendance = Attendance(attempt, LimitsConfig(engine_s=120.0), lambda: now)
    before = take(attempt)
    before.leave()
    seat = take(attempt)
    for second in (0.0, 100.0, 310.0):
        now = second
        beat(attempt, before, int(second))  # a process that was stopped, and goes on
        attendance.look([])
    assert not seat.is_held()
