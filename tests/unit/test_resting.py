"""Satellites that rest while their run is out: who is let go when, and what becomes of those who are gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.cluster.jobs import Place
from areal_hpc.errors import SubmissionError
from areal_hpc.liveness.job import note_satellite
from areal_hpc.liveness.resting import LOOK_S, Recall, dismiss, forget, judged, rest, resting
from areal_hpc.run_dir import RunDir

HELD = Place(state="PENDING", is_held=True)
WAITS = Place(state="PENDING", is_held=False)
RUNS = Place(state="RUNNING", is_held=False)
ENDING = Place(state="REQUEUE_HOLD", is_held=True)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.create(tmp_path / "run")
    for job in ("9_1", "9_2", "12"):
        note_satellite(made, job)
    return made


class Slurm:
    """A queue, and what was asked of it."""

    def __init__(self, **queue: Place) -> None:
        self.queue: dict[str, Place] = {name.removeprefix("j"): place for name, place in queue.items()}
        self.released: list[str] = []
        self.asked = 0

    def ask(self, jobs: Sequence[str]) -> Mapping[str, Place]:
        self.asked += 1
        return {job: self.queue[job] for job in jobs if job in self.queue}

    def let_go(self, jobs: Sequence[str]) -> None:
        self.released += jobs
        self.queue |= dict.fromkeys(jobs, WAITS)

    def recall(self, run: RunDir, epoch: int) -> Recall:
        return Recall(run, epoch, ask=self.ask, let_go=self.let_go)


def test_those_that_are_held_are_let_go_once_and_forgotten_when_they_are_on_their_way(run: RunDir) -> None:
    rest(run, "9_1", 0)
    rest(run, "12", 0)
    slurm = Slurm(j9_1=HELD, j12=ENDING)
    recall = slurm.recall(run, 1)
    recall.round()
    assert slurm.released == ["12", "9_1"]
    recall.round()
    assert resting(run) == []
    recall.round()
    assert (slurm.released, slurm.asked) == (["12", "9_1"], 2), "nobody rests, and Slurm is not asked"


def test_a_hold_that_comes_after_the_look_is_seen_in_the_next(run: RunDir) -> None:
    rest(run, "9_1", 0)
    slurm = Slurm(j9_1=RUNS)
    recall = slurm.recall(run, 1)
    recall.round()
    assert (slurm.released, resting(run)) == ([], ["9_1"])
    slurm.queue["9_1"] = HELD
    recall.round()
    assert slurm.released == ["9_1"]


def test_what_has_left_the_queue_is_forgotten(run: RunDir) -> None:
    rest(run, "9_1", 0)
    Slurm().recall(run, 1).round()
    assert resting(run) == []


def test_one_whose_engines_died_too_often_waits_for_the_next_attempt(run: RunDir) -> None:
    rest(run, "9_1", 3)
    slurm = Slurm(j9_1=HELD)
    slurm.recall(run, 3).round()
    assert slurm.asked == 0
    slurm.recall(run, 4).round()
    assert slurm.released == ["9_1"]


def test_a_scheduler_that_does_not_answer_is_asked_again(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    def away(_: Sequence[str]) -> Mapping[str, Place]:
        raise SubmissionError("squeue does not answer; try again")

    rest(run, "9_1", 0)
    with caplog.at_level(logging.WARNING):
        recall = Recall(run, 1, ask=away)
        recall.round()
        recall.round()
    said = "satellites 9_1 rest until Slurm lets them go: squeue does not answer"
    assert caplog.text.count(said) == 1, "once, however long it is away"
    assert resting(run) == ["9_1"]


def test_rounds_are_made_now_and_then_and_never_two_at_once(run: RunDir) -> None:
    rest(run, "9_1", 0)
    now, may_go, asked = [0.0], threading.Event(), threading.Semaphore(0)

    def slow(_: Sequence[str]) -> Mapping[str, Place]:
        asked.release()
        assert may_go.wait(30)
        return {"9_1": RUNS}

    recall = Recall(run, 1, ask=slow, clock=lambda: now[0])
    recall.look()
    assert asked.acquire(timeout=30)
    now[0] = 2 * LOOK_S
    recall.look()  # and returns at once, though the first is still under way
    assert not asked.acquire(blocking=False)
    thread = recall._rounds._thread
    assert thread is not None
    may_go.set()
    thread.join(30)
    recall.look()
    assert asked.acquire(timeout=30)
    recall.look()
    assert not asked.acquire(blocking=False), "it is not time yet"


def test_with_the_run_those_who_rest_for_it_are_over(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []
    dismiss(run, ended.extend)
    assert ended == []
    rest(run, "9_1", 0)
    rest(run, "9_2", 7)
    dismiss(run, ended.extend)
    assert (ended, resting(run)) == (["9_1", "9_2"], [])

    def away(_: Sequence[str]) -> None:
        raise SubmissionError("scancel does not answer")

    rest(run, "9_1", 0)
    with caplog.at_level(logging.WARNING):
        dismiss(run, away)
    assert "satellites may still rest in the queue: `scancel 9_1` ends them" in caplog.text


def test_a_name_that_passes_to_a_new_job_while_the_run_ends_is_seen_as_well(run: RunDir) -> None:
    ended: list[str] = []

    def end(jobs: Sequence[str]) -> None:
        ended.extend(jobs)
        if jobs == ["9_1"]:  # as the script of a satellite does where a site does not requeue
            (run.satellites / "resting-9_1").rename(run.satellites / "resting-77_1")

    rest(run, "9_1", 0)
    dismiss(run, end)
    assert (ended, resting(run)) == (["9_1", "77_1"], [])


def test_one_that_starts_takes_its_name_away(run: RunDir) -> None:
    rest(run, "9_1", 0)
    forget(run, "9_1")
    forget(run, "9_1")
    assert resting(run) == []


@given(
    st.dictionaries(
        st.sampled_from(["1", "2_1", "2_2", "3"]),
        st.builds(
            Place, state=st.sampled_from(["PENDING", "RUNNING", "COMPLETING", "REQUEUED"]), is_held=st.booleans()
        ),
    )
)
def test_each_is_released_or_forgotten_or_left_alone(queue: dict[str, Place]) -> None:
    jobs = ["1", "2_1", "2_2", "3"]
    judgement = judged(jobs, queue)
    assert not set(judgement.release) & set(judgement.forget)
    for job in jobs:
        place = queue.get(job)
        if place is None:
            assert job in judgement.forget
        elif place.state in ("RUNNING", "COMPLETING"):
            assert job not in {*judgement.release, *judgement.forget}
        else:
            assert (job in judgement.release) == place.is_held
            assert (job in judgement.forget) != place.is_held
