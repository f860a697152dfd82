"""A run that has no engine: what its launcher makes of that, with a queue that the test writes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from started import leave

from areal_hpc.cluster.jobs import Place, Queued
from areal_hpc.errors import SubmissionError
from areal_hpc.fs import make_private_directory, publish_json, read_json
from areal_hpc.liveness import seats
from areal_hpc.liveness.alone import ASK_S, NOT_ASKED, Alone, Lookout, alone
from areal_hpc.liveness.job import JobView, note_satellite
from areal_hpc.liveness.resting import rest
from areal_hpc.report import status_lines
from areal_hpc.run_dir import RunDir

SINCE = 1_700_000_000.0
WAITS = Place(state="PENDING", is_held=False, reason="Priority")
RUNS = Place(state="RUNNING", is_held=False)


class World:
    """An attempt, Slurm's queue and a clock; a round is made where a thread would be started."""

    def __init__(self, directory: Path, *, alone_s: float = 0.0) -> None:
        self.run = RunDir.create(directory / "run")
        leave(self.run, "running")
        self.attempt = self.run.attempt(1)
        self.queue: dict[str, Place] = {}
        self.away = False
        self.asked: list[list[str]] = []
        self.now = 0.0
        self.lookout = Lookout(self.run, 1, alone_s, ask=self.ask, clock=lambda: self.now, now=lambda: SINCE + self.now)

    def ask(self, jobs: Sequence[str]) -> Mapping[str, Place]:
        self.asked.append(list(jobs))
        if self.away:
            raise SubmissionError("squeue does not answer; try again")
        return self.queue

    def look(self, after_s: float = 0.0) -> Alone | None:
        self.now += after_s
        self.lookout.look()
        if (thread := self.lookout._rounds._thread) is not None:
            thread.join(30)
        self.now += 1.0
        self.lookout.look()
        return alone(self.attempt)


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    make_private_directory(made.run.slurm)
    publish_json(made.run.slurm / "submission-0001.json", {"job_id": "12", "satellites": "13"})
    return made


def test_the_satellites_that_a_run_was_submitted_with_are_known_before_any_has_been_there(world: World) -> None:
    world.queue = {"13_1": WAITS, "13_2": WAITS}
    told = world.look()
    assert told == Alone(since=SINCE, waits={"13_1": "Priority", "13_2": "Priority"})
    assert told.is_in_the_queue()
    assert told.text().startswith("13_1, 13_2 in Slurm's queue: Priority: jobs with a higher priority come first; ")
    assert world.asked == [["13"]]


def test_slurm_is_asked_rarely(world: World) -> None:
    for _ in range(int(ASK_S) + 2):
        world.look()
    assert len(world.asked) == 2


def test_before_it_has_answered_there_may_be_some(world: World) -> None:
    answers = threading.Event()

    def slow(jobs: Sequence[str]) -> Mapping[str, Place]:
        assert answers.wait(30)
        return {}

    lookout = Lookout(world.run, 1, 0.0, ask=slow, now=lambda: SINCE)
    lookout.look()
    told = alone(world.attempt)
    answers.set()
    assert told == Alone(since=SINCE, problem=NOT_ASKED)
    assert told.is_in_the_queue()


def test_what_has_started_or_has_left_is_not_in_the_queue(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    world.queue = {"13_1": WAITS, "13_2": RUNS}
    assert (world.look() or Alone(since=0)).waits == {"13_1": "Priority"}
    world.queue = {"13_1": RUNS}
    told = world.look(ASK_S)
    assert told == Alone(since=SINCE)
    assert not told.is_in_the_queue()
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("no engine is there: 13_1 in Slurm's queue: Priority: ")
    assert second.startswith("no engine is there: no satellite waits in Slurm's queue that the run knows")


def test_one_that_rests_for_a_later_attempt_is_not_waited_for(world: World) -> None:
    note_satellite(world.run, "13_1")
    note_satellite(world.run, "20")  # somebody has typed it
    held = Place(state="PENDING", is_held=True, reason="JobHeldUser")
    world.queue = {"13_1": held, "20": held}
    rest(world.run, "13_1", 1)
    rest(world.run, "20", 0)  # this attempt lets it go
    assert (world.look() or Alone(since=0)).waits == {"20": "JobHeldUser"}
    assert world.asked == [["13", "20"]]


def test_a_controller_that_cannot_be_asked_is_no_reason_to_end_a_run(world: World) -> None:
    world.away = True
    told = world.look()
    assert told == Alone(since=SINCE, problem="squeue does not answer; try again")
    assert told.is_in_the_queue()


def test_a_run_that_knows_of_no_satellite_asks_nobody_and_its_limit_counts(tmp_path: Path) -> None:
    """Such as one on a single machine, that somebody may join by hand."""
    world = World(tmp_path)
    told = world.look()
    assert told is not None
    assert not told.is_in_the_queue()
    assert told.text() == "no satellite waits in Slurm's queue that the run knows; limits.join_s counts"
    assert world.asked == []


def test_it_is_over_with_the_first_engine_and_begins_anew_with_the_loss_of_the_last(world: World) -> None:
    world.queue = {"13_1": WAITS}
    assert world.look() is not None
    seat = seats.take(world.attempt, 0, {"job": "13_1"})
    assert world.look() is not None, "it is still coming up"
    seat.come_up()
    assert world.look() is None
    assert not world.attempt.alone.exists()
    seat.leave()
    world.now = 500.0
    told = world.look()
    assert told is not None
    assert told.since == SINCE + 500.0


def test_a_budget_has_the_run_stop_in_order_and_says_what_it_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, alone_s=3600.0)
    note_satellite(world.run, "13_1")
    world.queue = {"13_1": WAITS}
    world.look()
    world.look(3590.0)
    assert (world.lookout.verdict, world.attempt.stop_request.exists()) == ("", False)
    world.look(10.0)
    assert world.lookout.verdict == "no engine was there for 3600 s (limits.alone_s)"
    assert world.attempt.stop_request.exists()
    assert "so the run stops; `areal-hpc resume` goes on: 13_1 in Slurm's queue: Priority: " in caplog.text


def test_status_says_for_how_long_and_why_while_the_launcher_is_at_work(world: World) -> None:
    world.queue = {"13_1": WAITS}
    publish_json(world.attempt.job, {"job_id": "12"})
    world.look()

    def shown(state: str = "RUNNING") -> dict[str, str]:
        view = JobView(job_id="12", queued=Queued(state=state))
        lines = status_lines(world.run, now=lambda: SINCE + 3723.0, watch=lambda _: {}, ask=lambda _: view)
        return dict(line.split("  ", 1) for line in lines)

    assert shown()["no engine"].strip().startswith("for 1:02:03: 13_1 in Slurm's queue: Priority: jobs with a higher")
    assert "no engine" not in shown("PENDING"), "nobody waits for one while the run's own job does"
    publish_json(world.attempt.state, {**read_json(world.attempt.state), "state": "stopped"})
    assert "no engine" not in shown()
