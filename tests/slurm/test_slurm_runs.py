"""Whole runs through sbatch, on nodes that share nothing but the file system; each is disturbed in the middle."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from cluster import SlurmCluster, wait_for
from launched import REPOSITORY, arguments, environment

from areal_hpc.fs import RunDir, read_json
from areal_hpc.report import prove_run
from areal_hpc.telemetry import RecordReader

OVER = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
PATHS = {"PYTHONPATH": environment()["PYTHONPATH"], "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
LONG = ("trainer.total_steps=40", "checkpoint.every_steps=5", "generation.replicas=2", "cluster.all.cpus=4")


def areal(slurm: SlurmCluster, directory: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """``areal-hpc`` on the login node."""
    return slurm.run(sys.executable, "-m", "areal_hpc", *words, env=PATHS, cwd=directory)


def submit(slurm: SlurmCluster, directory: Path, *words: str) -> tuple[str, RunDir, Path]:
    """A run's job, its directory and its log."""
    done = areal(slurm, directory, "submit", *words)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    return said["job"], RunDir(Path(said["run"])), Path(said["log"])


def wait_for_step(run: RunDir, step: int) -> None:
    def reached() -> bool:
        attempt = run.newest_attempt() if run.attempts.is_dir() else None
        records = RecordReader(attempt.telemetry).poll() if attempt is not None and attempt.telemetry.is_dir() else []
        return any(record.kind == "step" and (record.number("step") or 0) >= step for record in records)

    wait_for(f"step {step}", reached, poll_s=0.2)


def assert_finished_in_two_attempts(slurm: SlurmCluster, job: str, run: RunDir, log: Path) -> None:
    state = slurm.wait_for_state(job, *OVER, limit_s=240.0)
    text = log.read_text(encoding="utf-8")
    assert state == "COMPLETED", text
    proof = prove_run(run)
    assert proof.proven, proof.facts()
    assert len(run.all_attempts()) == 2
    assert read_json(run.summary)["last_step"] == 40, text


def test_a_heterogeneous_job_is_warned_of_its_end_and_goes_on_where_it_stopped(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    words = [*arguments(home, model), *LONG, "cluster.shape=het", "cluster.generation.gres=gpu:2"]
    job, run, log = submit(slurm, home, *words)
    wait_for_step(run, 3)
    again = areal(slurm, home, "submit", *words)
    assert again.returncode == 2
    assert f"is job {job} in Slurm's queue (RUNNING); stop it with" in again.stderr

    trainer, generation = (component["NodeList"] for component in slurm.job(job))
    assert trainer != generation
    attempt = run.attempt(1)
    hosts = {name: read_json(attempt.endpoint(*name)) for name in [("trainer", 0), ("generator", 0), ("generator", 1)]}
    assert len({endpoint["host"] for endpoint in hosts.values()}) == 2
    for index in range(2):
        pid = hosts["generator", index]["pid"]
        assert f"CUDA_VISIBLE_DEVICES={index}" in slurm.call("cat", f"/proc/{pid}/environ", where=generation).split(
            "\0"
        )
    token = run.token.read_text(encoding="ascii")
    for node in (trainer, generation):
        assert token not in slurm.call("ps", "-eo", "args", where=node)

    slurm.call("scancel", "--batch", "--signal=USR1", job)
    # While Slurm takes it back it is FAILED for an instant, with the exit code of a script that was ended.
    slurm.wait_for_state(job, "PENDING")
    slurm.wait_for_state(job, "RUNNING")
    assert_finished_in_two_attempts(slurm, job, run, log)
    assert "taken back       0 steps" in areal(slurm, home, "ledger", run.root).stdout


def test_the_script_of_a_plain_job_is_typed_as_it_is_and_pre_empted(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    words = [*arguments(home, model), *LONG]
    script = REPOSITORY / "sbatch/train_split.sbatch"
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = slurm.run("sbatch", "-p", "preempt", script, *words, env={**PATHS, "PATH": path}, cwd=home)
    job = done.stdout.split()[-1]
    run, log = RunDir(home / "run"), home / f"areal-hpc-{job}.log"
    wait_for_step(run, 3)
    rival = slurm.call(
        "sbatch", "-p", "gpu", f"-N{len(slurm.nodes)}", "--exclusive", "-o", "/dev/null", "--wrap", "true"
    )
    slurm.wait_for_state(rival.split()[-1], "COMPLETED")
    assert_finished_in_two_attempts(slurm, job, run, log)


def test_a_half_requeued_job_is_healed_when_its_first_node_loses_power(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    job, run, log = submit(slurm, home, *arguments(home, model), *LONG, "cluster.shape=het")
    wait_for_step(run, 7)
    node = slurm.job(job)[0]["NodeList"]
    slurm.crash(node)
    assert_finished_in_two_attempts(slurm, job, run, log)
    slurm.boot(node)


def test_A22_a_cancelled_run_has_stopped_in_order_and_is_continued_from_anywhere(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    words = [*arguments(home, model), *LONG, "cluster.shape=het"]
    job, run, _ = submit(slurm, home, *words)
    wait_for_step(run, 3)
    slurm.call("scancel", job)
    slurm.wait_for_state(job, "CANCELLED")
    wait_for("the launcher's last word", lambda: read_json(run.attempt(1).state)["state"] == "stopped")
    second, run, log = submit(slurm, Path("/"), *words, "--resume")
    assert second != job
    assert_finished_in_two_attempts(slurm, second, run, log)
    assert re.search(r"resumed from .*/checkpoints/step-", run.attempt(2).log("trainer", 0).read_text(encoding="utf-8"))
