"""``areal-hpc resume``: what is recorded of a run decides with what, where and from which directory it goes on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from started import QUICKSTART, begin, config_in, end_at_once, start, state_of

from areal_hpc.cli import main
from areal_hpc.cluster.jobs import Queued
from areal_hpc.cluster.submitted import SubmittedJob
from areal_hpc.config.cluster import Shape
from areal_hpc.config.keys import with_value
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.errors import RunDirError, SubmissionError
from areal_hpc.fs import publish_json, read_json
from areal_hpc.liveness import job as roles_job
from areal_hpc.roles import submission
from areal_hpc.roles.resuming import resumption
from areal_hpc.run_dir import RunDir


class Slurm:
    """Takes jobs; what is in its queue is set by the test."""

    def __init__(self) -> None:
        self.arguments: list[Sequence[str]] = []
        self.directories: list[str] = []
        self.queue: dict[str, Queued] = {}

    def submit(self, job: Any, launch: Any, folder: Path, *, python: str) -> SubmittedJob:
        self.arguments.append(launch.arguments)
        self.directories += [option.removeprefix("--chdir=") for option in job.options if "--chdir" in option]
        (folder / str(len(self.arguments))).mkdir()
        return SubmittedJob(folder / "%j", str(len(self.arguments)))


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm()
    monkeypatch.setattr(submission, "submit", made.submit)
    monkeypatch.setattr(submission, "require_startable", lambda _: None)
    monkeypatch.setattr(roles_job, "queued", made.queue.get)
    monkeypatch.setattr(roles_job, "accounted", lambda _: [])
    monkeypatch.setattr("areal_hpc.telemetry.setup_logging", lambda *_: None)
    return made


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    end_at_once(monkeypatch)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a run is begun; what is typed later is typed elsewhere."""
    path = tmp_path / "desk"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


def submitted(desk: Path, *words: str) -> RunDir:
    config = resolve(load([QUICKSTART], [f"run_root={desk}", "name=run", f"model.path={desk}", *words]))
    return submission.submit_run(config, print).run


def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "elsewhere"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


def test_a_run_that_was_run_here_goes_on_here_from_where_it_was_begun(
    slurm: Slurm, desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_value(config_in(desk), "cluster.shape", load([QUICKSTART], ["cluster.shape=local"]).cluster.shape)
    run = RunDir(desk / "run")
    monkeypatch.setattr("areal_hpc.roles.attempts.Attempts.supervise", lambda *_: "stopped")
    assert start(config) == 75
    begin(run)
    elsewhere(tmp_path, monkeypatch)
    end_at_once(monkeypatch)
    assert main(["resume", str(run.root), "trainer.total_steps=99"]) == 0
    assert f"resume {run.root} on this machine again, from {desk}\n" in capsys.readouterr().out
    assert (state_of(run, 2), load([run.config]).trainer.total_steps, Path.cwd()) == ("finished", 99, desk)
    assert slurm.arguments == []


def test_a_run_that_was_submitted_is_submitted_again_from_where_it_was_begun(
    slurm: Slurm, desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submitted(desk, "trainer.total_steps=50")
    there = elsewhere(tmp_path, monkeypatch)
    (there / "own.jsonl").touch()
    assert main(["resume", str(run.root), "trainer.total_steps=80"]) == 0
    assert capsys.readouterr().out.startswith(f"resume {run.root} as a Slurm job again, from {desk}\njob 2\nrun ")
    assert slurm.arguments[1] == ("run", str(run.slurm / "config-0002.yaml"), "--resume")
    assert slurm.directories == [str(desk), str(desk)]
    assert load([run.slurm / "config-0002.yaml"]).trainer.total_steps == 80


def test_a_live_run_is_refused_as_submit_refuses_it(
    slurm: Slurm, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submitted(desk)
    slurm.queue["1"] = Queued(state="RUNNING")
    assert main(["resume", str(run.root)]) == 2
    assert "is job 1 in Slurm's queue (RUNNING); stop it with `areal-hpc stop" in capsys.readouterr().err
    assert main(["resume", str(run.root), "cluster.shape=local"]) == 2, "nor does it go on here beside its job"
    assert "is job 1 in Slurm's queue" in capsys.readouterr().err


def test_what_was_submitted_last_counts_until_an_attempt_has_followed(slurm: Slurm, desk: Path) -> None:
    run = submitted(desk, "trainer.total_steps=50")
    assert resumption(run, []).config.trainer.total_steps == 50
    config = with_value(resumption(run, ["cluster.shape=local"]).config, "trainer.total_steps", 70)
    assert start(config) == 0  # an attempt with other words
    begin(run)
    assert resumption(run, ["trainer.total_steps=90"]).config.cluster.shape == "local"
    config = with_value(with_value(config, "cluster.shape", Shape.HET), "trainer.total_steps", 80)
    submission.submit_run(config, print, ["--resume"])
    assert resumption(run, []).config.trainer.total_steps == 80
    assert read_json(run.slurm / "submission-0002.json")["after"] == 1


def test_what_the_job_would_refuse_is_not_queued(slurm: Slurm, desk: Path) -> None:
    run = submitted(desk)
    assert start(resumption(run, ["cluster.shape=local"]).config) == 0
    begin(run)
    with pytest.raises(RunDirError, match="already holds a run; continue it with --resume, or set another `name`"):
        submitted(desk)
    other = resumption(run, ["cluster.shape=het", "trainer.total_steps=99", "seed=9"]).config
    with pytest.raises(RunDirError, match=r"config.yaml: seed \(was 1\) would change within one run"):
        submission.submit_run(other, print, ["--resume"])
    submission.submit_run(with_value(other, "seed", 1), print, ["--resume"])
    assert len(slurm.arguments) == 2, "and none of those that were refused"


def test_an_attempt_whose_job_is_over_is_taken_over_without_asking_and_another_is_not(slurm: Slurm, desk: Path) -> None:
    run = submitted(desk)
    config = resumption(run, ["cluster.shape=local"]).config
    assert start(config) == 0
    begin(run)
    publish_json(run.attempt(1).job, {"job_id": "1"})
    state = read_json(run.attempt(1).state)
    publish_json(run.attempt(1).state, {**state, "state": "running", "host": "n1"})  # the node is gone, with all on it
    assert start(config, resume=True) == 0
    begin(run, 2)
    publish_json(run.attempt(2).state, {**state, "state": "running", "host": "n1"})  # of no job
    with pytest.raises(RunDirError, match=r"in use by process \d+ on n1; stop it"):
        start(config, resume=True)
    with pytest.raises(RunDirError, match=r"in use by process \d+ on n1; stop it"):
        submission.submit_run(resolve(load([run.slurm / "config-0001.yaml"])), print, ["--resume"])
    publish_json(run.attempt(2).job, {"job_id": "1"})
    submission.submit_run(resolve(load([run.slurm / "config-0001.yaml"])), print, ["--resume"])
    assert slurm.arguments[-1][2:] == ("--resume", "--takeover")


def test_what_cannot_go_on_says_why(slurm: Slurm, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = submitted(desk)
    moved = RunDir(run.root.rename(desk / "other"))
    with pytest.raises(RunDirError, match="is the run run under another name; call its directory so again"):
        resumption(moved, [])
    (desk / "moved").mkdir()
    moved = RunDir(moved.root.rename(desk / "moved/run"))
    assert resumption(moved, []).config.run_root == str(desk / "moved")
    (desk / "link").symlink_to(moved.root)
    assert resumption(RunDir(desk / "link"), []).config.run_root == str(desk / "moved")

    config = resumption(moved, ["cluster.shape=local"]).config
    assert start(config) == 0
    with pytest.raises(RunDirError, match=r"has finished its 60 steps; raise trainer\.total_steps to go on"):
        resumption(moved, [])
    gone = desk.with_name("gone")
    desk.rename(gone)
    monkeypatch.chdir(gone)
    with pytest.raises(
        RunDirError,
        match=rf"was begun in {desk}, which is gone, or not yours to enter; type `areal-hpc run .* --resume`",
    ):
        resumption(RunDir(gone / "moved/run"), ["trainer.total_steps=70"])


def test_where_nobody_can_say_whether_a_job_lives_one_may_say_so(
    slurm: Slurm, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(desk)

    def away(_: str) -> None:
        raise SubmissionError("squeue does not answer")

    monkeypatch.setattr(roles_job, "queued", away)
    config = resumption(run, []).config
    with pytest.raises(SubmissionError, match=r"nobody can say whether it lives: squeue does not .*add --takeover"):
        submission.submit_run(config, print, ["--resume"])
    assert submission.submit_run(config, print, ["--resume", "--takeover"]).job_id == "2"
    assert sorted(name for name in os.listdir(run.slurm) if name.endswith(".json")) == [
        "submission-0001.json",
        "submission-0002.json",
    ]
