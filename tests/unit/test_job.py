"""A run's job: found in its files, asked about once, and ended with the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_hpc.cluster.jobs import Queued, parse_accounts
from areal_hpc.cluster.owner import Owner
from areal_hpc.errors import RunDirError, SubmissionError
from areal_hpc.fs import publish_json
from areal_hpc.liveness import job as roles_job
from areal_hpc.liveness import seats
from areal_hpc.liveness.job import JobView, jobs_of, look, stop_submitted
from areal_hpc.report import status_lines
from areal_hpc.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose job 12 was submitted."""
    made = RunDir.create(tmp_path / "run")
    (made.slurm / "12").mkdir(parents=True)
    (made.slurm / "config-0001.yaml").touch()
    return made


def attempt(run: RunDir, epoch: int, state: str, job_id: str = "12") -> None:
    made = run.attempt(epoch).create()
    publish_json(made.state, {"state": state, "host": "n1", "pid": 7, "boot": "b", "start_ticks": 1})
    publish_json(made.job, {"job_id": job_id})


def pending(reason: str) -> JobView:
    return JobView(job_id="12", queued=Queued(state="PENDING", reason=reason))


RUNNING = JobView(job_id="12", queued=Queued(state="RUNNING", starts="2026-11-30T05:00:00"))
ENDED = JobView(
    job_id="12",
    is_over=True,
    ended=parse_accounts("12|NODE_FAIL|0:0|0:0|a|b|1||\n12.batch|CANCELLED|0:15||a|b|1||\n12.0|FAILED|7:0||a|a|1||"),
)


def rows(run: RunDir, view: JobView | None) -> dict[str, str]:
    lines = status_lines(run, watch=lambda _: {"trainer-0": "alive"}, ask=lambda _: view)
    return dict(line.split(maxsplit=1) for line in lines)


def test_the_newest_job_is_the_highest_number_whoever_made_it(run: RunDir) -> None:
    (run.slurm / "9").mkdir()
    assert jobs_of(run) == ["9", "12"]
    attempt(run, 1, "running", "101")  # of a script that somebody typed
    assert jobs_of(run) == ["9", "12", "101"]


def test_a_run_that_waits_in_the_queue_is_shown_before_it_has_a_configuration(run: RunDir) -> None:
    with pytest.raises(RunDirError, match="not a run directory"):
        RunDir.open(run.root)
    assert RunDir.open(run.root, waiting=True) == run
    shown = rows(run, pending("Priority"))
    assert shown["state"] == "not started: its job waits in the queue"
    assert shown["job"].startswith("12 PENDING: Priority: jobs with a higher priority come first; nothing to do")


def test_a_job_that_ended_before_the_run_began_says_where_to_look(run: RunDir) -> None:
    shown = rows(run, ENDED)
    assert shown["state"] == f"not started: its job has ended; look into {run.slurm}/12.log"
    assert shown["job"] == "12 NODE_FAIL at b; the first step that failed is 12.0 with exit code 7"


def test_J20_a_run_whose_job_is_gone_is_dead_and_one_whose_job_waits_goes_on(run: RunDir) -> None:
    attempt(run, 1, "running")
    assert rows(run, RUNNING)["state"] == "running, process 7 on n1 (attempt 1)"
    assert rows(run, RUNNING)["job"] == "12 RUNNING since 2026-11-30T05:00:00"
    dead = rows(run, ENDED)
    assert dead["state"].startswith("dead: process 7 on n1 went with its job; `areal-hpc resume`")
    assert "processes" not in dead
    assert rows(run, pending("BeginTime"))["state"].startswith("waiting: process 7 on n1 went with its job, which will")
    assert rows(run, None)["state"] == "running, process 7 on n1 (attempt 1)"


def test_a_slurm_that_does_not_answer_hides_nothing_that_the_files_tell(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: object) -> None:
        raise SubmissionError("squeue does not answer")

    monkeypatch.setattr(roles_job, "queued", away)
    attempt(run, 1, "running")
    shown = dict(line.split(maxsplit=1) for line in status_lines(run, watch=lambda _: {}))
    assert shown["state"] == "running, process 7 on n1 (attempt 1)"
    assert shown["job"] == "12; squeue does not answer"
    monkeypatch.setattr(roles_job, "queued", lambda _: None)
    monkeypatch.setattr(roles_job, "accounted", away)
    view = look(run)
    assert view is not None
    assert view.is_over
    assert view.text() == "12 has left the queue; how it ended is not known: squeue does not answer"


def test_slurm_is_asked_once_for_each_command(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(roles_job, "queued", calls.append)
    monkeypatch.setattr(roles_job, "accounted", lambda jobs: calls.append(jobs) or [])
    attempt(run, 1, "running")
    status_lines(run, watch=lambda _: {})
    assert calls == ["12", ["12"]]


def stopped(run: RunDir, view: JobView | None) -> tuple[str, list[str]]:
    """What a stop says, and what it has done."""
    done: list[str] = []

    def stop(_: RunDir, timeout_s: float) -> str:
        done.append(f"asked for {timeout_s:g} s")
        return "stopped"

    return stop_submitted(run, 5.0, ask=lambda _: view, end=done.extend, stop=stop), done


def test_what_waits_in_the_queue_leaves_it(run: RunDir) -> None:
    assert stopped(run, pending("Priority")) == ("job 12 was waiting in the queue and is cancelled", ["12"])
    attempt(run, 1, "stopped")  # requeued since
    assert stopped(run, pending("BeginTime"))[1] == ["12"]


def test_what_works_is_asked_and_writes_a_checkpoint(run: RunDir) -> None:
    attempt(run, 1, "running")
    assert stopped(run, RUNNING) == ("stopped", ["asked for 5 s"])
    assert stopped(run, None) == ("stopped", ["asked for 5 s"])  # on one machine
    silent = JobView(job_id="12", problem="squeue does not answer")
    assert stopped(run, silent) == ("stopped", ["asked for 5 s"])


def test_between_two_attempts_there_is_nothing_to_save_and_the_job_is_cancelled(run: RunDir) -> None:
    assert stopped(run, RUNNING)[1] == ["12"]
    attempt(run, 1, "stopped")
    assert stopped(run, RUNNING) == ("job 12 was between two attempts and is cancelled", ["12"])
    attempt(run, 2, "running", "11")  # of the job before
    assert stopped(run, RUNNING)[1] == ["12"]


@pytest.mark.parametrize("state", ["finished", "failed"])
def test_a_job_that_is_about_to_end_is_left_to_write_its_report(run: RunDir, state: str) -> None:
    attempt(run, 1, state)
    assert stopped(run, RUNNING) == (state, [])


def test_what_is_over_is_said_to_be(run: RunDir) -> None:
    said, done = stopped(run, ENDED)
    assert said.startswith("over; job 12 NODE_FAIL")
    assert done == []


def test_a_run_that_somebody_went_on_with_on_one_machine_is_no_jobs_any_more(run: RunDir) -> None:
    attempt(run, 1, "stopped")
    run.attempt(2).create()
    publish_json(run.attempt(2).state, {"state": "running", **Owner.this_process().record()})
    assert stopped(run, ENDED) == ("stopped", ["asked for 5 s"])
    shown = rows(run, ENDED)
    assert shown["state"].startswith("running, process")
    assert "job" not in shown


def test_a_local_run_has_no_job(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.attempt(1).create()
    publish_json(run.attempt(1).state, {"state": "finished", **Owner.this_process().record()})
    assert look(run) is None


def test_satellites_are_shown_and_leave_the_queue_with_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_json(run.slurm / "submission-0001.json", {"job_id": "12", "satellites": "13"})
    publish_json(run.slurm / "submission-0002.json", {})  # of somebody who submits right now
    asked = []

    def beside(job_id: str, array_ids: list[str]) -> tuple[Queued, dict[str, dict[str, int]]]:
        asked.append((job_id, array_ids))
        return Queued(state="RUNNING"), {"13": {"PENDING": 5, "RUNNING": 2}}

    monkeypatch.setattr(roles_job, "queued_beside", beside)
    attempt(run, 1, "running")
    seat = seats.take(run.attempt(1), 0, {"host": "n7", "job": "13_2"})
    assert rows(run, look(run))["satellites"] == "array 13: 5 PENDING, 2 RUNNING"
    seat.come_up()
    shown = rows(run, look(run))["satellites"]
    assert shown == "joined: generator-0 (n7, job 13_2); array 13: 5 PENDING, 2 RUNNING"
    assert asked == [("12", ["13"])] * 2
    assert stopped(run, look(run)) == ("stopped", ["asked for 5 s", "13"])
    seat.leave()
    assert "joined" not in rows(run, look(run))["satellites"]


def test_what_satellites_have_submitted_in_their_place_is_asked_about_and_ends_with_the_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_json(run.slurm / "submission-0001.json", {"job_id": "12", "satellites": "13"})
    run.satellites.mkdir()
    for name, text in {"task-1": "15\n", "task-2": "9\n", "task-3": "", "task-4": "15\n", "13_1.log": "14"}.items():
        (run.satellites / name).write_text(text, encoding="ascii")
    assert roles_job.satellites_of(run) == ["13", "15"], "9 is of an earlier submission, and one is being written"
    tasks = {"13": {"RUNNING": 1}, "15": {"PENDING": 2}}
    monkeypatch.setattr(roles_job, "queued_beside", lambda job, arrays: (Queued(state="RUNNING"), tasks))
    attempt(run, 1, "running")
    assert rows(run, look(run))["satellites"] == "array 13: 1 RUNNING; array 15: 2 PENDING"
    assert stopped(run, look(run)) == ("stopped", ["asked for 5 s", "13", "15"])


def test_every_job_that_has_brought_engines_is_known(run: RunDir) -> None:
    assert roles_job.satellite_jobs(run) == []
    for job in ("13_1", "9_1", "101", "13_2", "13_1"):
        roles_job.note_satellite(run, job)
    (run.satellites / "15_1.log").touch()
    assert roles_job.satellite_jobs(run) == ["9", "13", "101"]


def test_an_engine_that_has_left_is_no_silent_process(run: RunDir) -> None:
    attempt(run, 1, "running")
    seat = seats.take(run.attempt(1), 0, {})
    lines = status_lines(run, watch=lambda _: {"generator-0": "silent", "trainer-0": "alive"}, ask=lambda _: RUNNING)
    assert "generator-0 silent" in lines[-1]
    seat.leave()
    lines = status_lines(run, watch=lambda _: {"generator-0": "silent", "trainer-0": "alive"}, ask=lambda _: RUNNING)
    assert "generator-0" not in lines[-1]
