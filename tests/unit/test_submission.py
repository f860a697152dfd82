"""A submission: refused before Slurm is asked where it cannot go well, and recorded once. sbatch is a stand-in here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.cluster.hetjob import Job
from areal_hpc.cluster.jobs import Queued
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError, RunDirError, SubmissionError
from areal_hpc.roles import job as roles_job
from areal_hpc.roles import submission

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"


class Slurm:
    """Takes jobs and knows which are in its queue."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Job, Any, str]] = []
        self.states: dict[str, str] = {}
        self.refuses = ""

    def submit(self, job: Job, launch: Any, folder: Path, *, python: str) -> str:
        if self.refuses:
            raise SubmissionError(self.refuses)
        self.jobs.append((job, launch, python))
        job_id = str(len(self.jobs))
        self.states[job_id] = "PENDING"
        (folder / job_id).mkdir()  # as submitit does
        return job_id

    def queued(self, job_id: str) -> Queued | None:
        return Queued(state=self.states[job_id]) if self.states[job_id] else None


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm()
    monkeypatch.setattr(submission, "submit", made.submit)
    monkeypatch.setattr(roles_job, "queued", made.queued)
    monkeypatch.setattr(roles_job, "accounted", lambda _: [])
    return made


def config_of(root: Path, *words: str) -> Config:
    return resolve(load([QUICKSTART], ["cluster.shape=het", f"run_root={root}", *words]))


def test_A4_what_is_submitted_is_a_copy_with_absolute_paths(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = config_of(Path("runs"))
    made = submission.submit_run(given, print, ["--resume"])
    job, launch, _ = slurm.jobs[0]
    copy = tmp_path / "runs/quickstart/slurm/config-0001.yaml"
    assert launch.arguments == ("run", str(copy), "--resume")
    assert load([copy], []).run_root == str(tmp_path / "runs")
    assert f"--chdir={tmp_path}" in job.options
    assert made.log == tmp_path / "runs/quickstart/slurm/1.log"
    assert copy.stat().st_mode & 0o077 == 0


def test_a_run_in_the_queue_is_not_submitted_again_and_one_that_left_it_is(slurm: Slurm, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    submission.submit_run(config, print)
    with pytest.raises(RunDirError, match=r"is job 1 in Slurm's queue \(PENDING\); stop it with"):
        submission.submit_run(config, print)
    slurm.states["1"] = ""
    assert submission.submit_run(config, print).job_id == "2"


def test_a_chained_successor_in_the_queue_counts_as_the_run(slurm: Slurm, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    submission.submit_run(config, print)
    (tmp_path / "quickstart/slurm/7").mkdir()  # as the batch script does
    slurm.states |= {"1": "", "7": "PENDING"}
    with pytest.raises(RunDirError, match="is job 7 in Slurm's queue"):
        submission.submit_run(config, print)


def test_where_nobody_can_say_whether_a_job_lives_no_second_one_is_made(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    submission.submit_run(config, print)

    def away(_: str) -> None:
        raise SubmissionError("squeue does not answer")

    monkeypatch.setattr(roles_job, "queued", away)
    with pytest.raises(SubmissionError, match="was job 1, and nobody can say whether it lives: squeue does not answer"):
        submission.submit_run(config, print)


def test_two_at_the_same_moment_make_one_job(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "_next_submission", lambda _: 1)  # both have looked before either has written
    monkeypatch.setattr(submission, "look", lambda _: None)
    config = config_of(tmp_path)
    submission.submit_run(config, print)
    with pytest.raises(RunDirError, match="is being submitted by another process"):
        submission.submit_run(config, print)
    assert len(slurm.jobs) == 1


def test_what_slurm_refuses_can_be_submitted_again(slurm: Slurm, tmp_path: Path) -> None:
    config, slurm.refuses = config_of(tmp_path), "Invalid account"
    with pytest.raises(SubmissionError, match="Invalid account"):
        submission.submit_run(config, print)
    slurm.refuses = ""
    assert submission.submit_run(config, print).job_id == "1"
    (record,) = [name for name in os.listdir(tmp_path / "quickstart/slurm") if name.endswith(".json")]
    assert json.loads((tmp_path / "quickstart/slurm" / record).read_text())["job_id"] == "1"


def test_what_cannot_be_never_reaches_slurm(slurm: Slurm, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="5 GPUs are needed"):
        submission.submit_run(config_of(tmp_path, "generation.replicas=5", "cluster.all.gpus=4"), print)
    with pytest.raises(ConfigError, match="areal-hpc run"):
        submission.submit_run(config_of(tmp_path, "cluster.shape=local"), print)
    assert slurm.jobs == []
    assert list(tmp_path.iterdir()) == []
