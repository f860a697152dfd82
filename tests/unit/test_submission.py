"""A submission: refused before Slurm is asked where it cannot go well, and recorded once. sbatch is a stand-in here."""

from __future__ import annotations

import errno
import grp
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from signed import library_in

from areal_hpc.buffer.epochs import claim_epoch
from areal_hpc.cluster.hetjob import Job
from areal_hpc.cluster.jobs import Queued
from areal_hpc.cluster.submitted import SubmittedJob
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError, RunDirError, SubmissionError
from areal_hpc.liveness import job as roles_job
from areal_hpc.liveness.job import submission_of
from areal_hpc.roles import submission
from areal_hpc.run_dir import RunDir

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"


def umask() -> int:
    """This process's, which sbatch hands on: Slurm makes the file of a job's output by it."""
    os.umask(found := os.umask(0))
    return found


class Slurm:
    """Takes jobs and knows which are in its queue."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Job, Any, str]] = []
        self.states: dict[str, str] = {}
        self.refuses = self.refuses_satellites = ""
        self.arrays: list[tuple[str, list[str]]] = []
        self.tasks: dict[str, int] = {}
        self.cancelled: list[str] = []
        self.umasks: list[int] = []

    def submit(self, job: Job, launch: Any, folder: Path, *, python: str) -> SubmittedJob:
        if self.refuses:
            raise SubmissionError(self.refuses)
        self.umasks.append(umask())
        self.jobs.append((job, launch, python))
        job_id = str(len(self.jobs))
        self.states[job_id] = "PENDING"
        (folder / job_id).mkdir()  # as submitit does
        return SubmittedJob(folder / "%j", job_id)

    def submit_script(self, script: Path, options: Sequence[str]) -> str:
        if self.refuses_satellites:
            raise SubmissionError(self.refuses_satellites)
        self.umasks.append(umask())
        self.arrays.append((script.read_text(encoding="utf-8"), list(options)))
        return f"7{len(self.arrays)}"

    def queued_beside(self, job_id: str, array_ids: Sequence[str]) -> tuple[Queued | None, dict[str, dict[str, int]]]:
        return self.queued(job_id), {one: self.tasks for one in array_ids if self.tasks}

    def queued(self, job_id: str) -> Queued | None:
        return Queued(state=self.states[job_id]) if self.states[job_id] else None


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm()
    monkeypatch.setattr(submission, "submit", made.submit)
    monkeypatch.setattr(submission, "submit_script", made.submit_script)
    monkeypatch.setattr(submission, "cancel", made.cancelled.extend)
    monkeypatch.setattr(roles_job, "queued", made.queued)
    monkeypatch.setattr(roles_job, "queued_beside", made.queued_beside)
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
    assert load([copy], []).model.path == str(tmp_path / "models/tiny")
    assert f"--chdir={tmp_path}" in job.options
    assert made.log == tmp_path / "runs/quickstart/slurm/1.log"
    assert copy.stat().st_mode & 0o077 == 0
    library_in(tmp_path)
    assert RunDir(tmp_path / "runs/quickstart").signing.is_file(), "for nodes without a compiler"


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
    # Both have looked before either has written.
    monkeypatch.setattr(submission, "_next_submission", lambda run: submission_of(run, 1))
    monkeypatch.setattr(submission, "refuse_queued", lambda *_, **__: None)
    config = config_of(tmp_path)
    submission.submit_run(config, print)
    with pytest.raises(RunDirError, match="is being submitted by another process"):
        submission.submit_run(config, print)
    assert len(slurm.jobs) == 1


def test_one_that_comes_to_its_end_while_another_asks_slurm_makes_the_only_job(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)

    def slow(*_: Any, **__: Any) -> None:  # has looked before there was a job, and is not heard until there is one
        monkeypatch.setattr(submission, "refuse_queued", lambda *_, **__: None)
        submission.submit_run(config, print)

    monkeypatch.setattr(submission, "refuse_queued", slow)
    with pytest.raises(RunDirError, match="is being submitted by another process"):
        submission.submit_run(config, print)
    assert len(slurm.jobs) == 1


def test_what_a_plain_job_cannot_be_or_the_disk_cannot_hold_leaves_no_submission_behind(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uneven = ("cluster.shape=split", "cluster.trainer.mem=10G", "cluster.generation.mem=20G")
    with pytest.raises(ConfigError, match=r"cluster\.generation\.mem cannot differ"):
        submission.submit_run(config_of(tmp_path, *uneven), print)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(submission, "publish", full)
        with pytest.raises(OSError, match="No space left"):
            submission.submit_run(config_of(tmp_path), print)
    assert submission.submit_run(config_of(tmp_path), print).job_id == "1"


def test_what_slurm_refuses_can_be_submitted_again(slurm: Slurm, tmp_path: Path) -> None:
    config, slurm.refuses = config_of(tmp_path), "Invalid account"
    with pytest.raises(SubmissionError, match="Invalid account"):
        submission.submit_run(config, print)
    slurm.refuses = ""
    assert submission.submit_run(config, print).job_id == "1"
    (record,) = [name for name in os.listdir(tmp_path / "quickstart/slurm") if name.endswith(".json")]
    assert json.loads((tmp_path / "quickstart/slurm" / record).read_text())["job_id"] == "1"


def test_ctrl_c_while_slurm_is_asked_leaves_no_submission_behind(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)

    def interrupted(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(submission, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            submission.submit_run(config, print)
    assert [name for name in os.listdir(tmp_path / "quickstart/slurm") if name.endswith(".json")] == []
    assert submission.submit_run(config, print).job_id == "1"


def test_what_cannot_be_never_reaches_slurm(slurm: Slurm, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="5 GPUs are needed"):
        submission.submit_run(config_of(tmp_path, "generation.replicas=5", "cluster.all.gpus=4"), print)
    with pytest.raises(ConfigError, match="areal-hpc run"):
        submission.submit_run(config_of(tmp_path, "cluster.shape=local"), print)
    assert slurm.jobs == []
    assert list(tmp_path.iterdir()) == []


SATELLITES = ("cluster.shape=satellites", "cluster.satellites=3", "generation.replicas=0", "limits.rejoin_s=60")


def test_satellites_are_submitted_along_with_the_run_and_join_the_attempts_that_come(
    slurm: Slurm, tmp_path: Path
) -> None:
    claim_epoch(RunDir.create(tmp_path / "quickstart"), {})  # an attempt of an earlier submission
    made = submission.submit_run(config_of(tmp_path, *SATELLITES, "cluster.python=/opt/python"), print)
    ((script, options),) = slurm.arrays
    assert options[:2] == ["--array=1-3", "--dependency=after:1"]
    assert f" /opt/python -u -m areal_hpc join --rest {tmp_path}/quickstart --after 1 --wait 60 &" in script
    assert f"#SBATCH --output={tmp_path}/quickstart/slurm/satellites/%A_%a.log" in script
    assert made.lines()[:2] == ["job 1", "satellites 71"]
    assert f">{tmp_path}/quickstart/slurm/satellites/task-" not in script, "Slurm requeues"
    assert roles_job.satellites_of(made.run) == ["71"]


def test_the_output_of_all_jobs_of_a_run_is_as_private_as_the_run(slurm: Slurm, tmp_path: Path) -> None:
    before = umask()
    submission.submit_run(config_of(tmp_path, *SATELLITES), print)
    group = grp.getgrgid(os.getegid()).gr_name
    submission.submit_run(config_of(tmp_path, *SATELLITES, "name=second", f"run_group={group}"), print)
    assert slurm.umasks == [0o077, 0o077, 0o007, 0o007]
    assert umask() == before


def test_a_job_whose_satellites_could_not_be_written_down_stays_on_record(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(script: Path, options: Sequence[str]) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(submission, "submit_script", full)
        submission.submit_run(config_of(tmp_path, *SATELLITES), print)
    with pytest.raises(RunDirError, match="job 1"):
        submission.submit_run(config_of(tmp_path, *SATELLITES), print)


def test_satellites_that_are_still_there_serve_the_resumed_run(slurm: Slurm, tmp_path: Path) -> None:
    config = config_of(tmp_path, *SATELLITES)
    submission.submit_run(config, print)
    slurm.states["1"], slurm.tasks = "", {"RUNNING": 1, "PENDING": 2}
    assert submission.submit_run(config, print, ["--resume"]).satellites == "71"
    assert len(slurm.arrays) == 1
    slurm.states["2"], slurm.tasks = "", {}
    assert submission.submit_run(config, print, ["--resume"]).satellites == "72"


def test_a_run_whose_satellites_are_refused_is_not_left_without_them(slurm: Slurm, tmp_path: Path) -> None:
    slurm.refuses_satellites = "Invalid partition"
    with pytest.raises(SubmissionError, match="Invalid partition"):
        submission.submit_run(config_of(tmp_path, *SATELLITES), print)
    assert slurm.cancelled == ["1"]


def test_satellites_with_too_few_gpus_never_reach_slurm(slurm: Slurm, tmp_path: Path) -> None:
    words = ("cluster.shape=satellites", "layout=sglang:d1t4+fsdp:d1", "cluster.generation.gpus=2")
    with pytest.raises(ConfigError, match="an engine needs 4 GPUs of one node, and a satellite has 2"):
        submission.submit_run(config_of(tmp_path, *words, "cluster.trainer.gpus=8"), print)
    assert slurm.jobs == []
