"""Runs on a cluster of the tests' own, as a person on the login node has them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from cluster import LIMIT_S, SlurmCluster, wait_for
from launched import environment

from areal_hpc.fs import read_json
from areal_hpc.report import prove_run
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import RecordReader

OVER = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "PREEMPTED")
PATHS = {"PYTHONPATH": environment()["PYTHONPATH"], "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
NOTHING: Mapping[str, str] = MappingProxyType({})
LONGEST_S = 240.0
"""Of a job: far more than any takes on a busy machine."""
STEPS = 30
LONG = (
    f"trainer.total_steps={STEPS}",
    "checkpoint.every_steps=4",
    "rollout.reward=tiny_task:paced",
    "rollout.reward_workers=1",
    "cluster.all.cpus=4",
    "limits.stop_s=20",
)
"""Half a second a step at least, so that a run can be disturbed in the middle also on a quick machine."""


def areal(
    slurm: SlurmCluster, directory: Path, *words: str | Path, env: Mapping[str, str] = NOTHING
) -> subprocess.CompletedProcess[str]:
    """``areal-hpc`` on the login node."""
    return slurm.run(sys.executable, "-m", "areal_hpc", *words, env={**PATHS, **env}, cwd=directory)


def submit(
    slurm: SlurmCluster, directory: Path, *words: str, env: Mapping[str, str] = NOTHING
) -> tuple[str, RunDir, Path]:
    """A run's job, its directory and its log."""
    done = areal(slurm, directory, "submit", *words, env=env)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    return said["job"], RunDir(Path(said["run"])), Path(said["log"])


def status(slurm: SlurmCluster, run: RunDir) -> dict[str, str]:
    """What ``areal-hpc status`` says, by its first words."""
    done = areal(slurm, run.root, "status", run.root)
    assert done.returncode == 0, done.stderr
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in done.stdout.splitlines())


def typed(
    slurm: SlurmCluster,
    directory: Path,
    script: Path,
    options: list[str],
    *words: str,
    env: Mapping[str, str] = NOTHING,
) -> tuple[str, Path]:
    """A job of a script that was handed to sbatch as it is, and its log."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = slurm.run("sbatch", *options, script, *words, env={**PATHS, "PATH": path, **env}, cwd=directory)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]
    return job, directory / f"areal-hpc-{job}.log"


def wait_for_step(run: RunDir, step: int, limit_s: float = LIMIT_S) -> None:
    def reached() -> bool:
        attempt = run.newest_attempt() if run.attempts.is_dir() else None
        records = RecordReader(attempt.telemetry).poll() if attempt is not None and attempt.telemetry.is_dir() else []
        return any(record.kind == "step" and (record.number("step") or 0) >= step for record in records)

    wait_for(f"step {step}", reached, limit_s, poll_s=0.2)


def assert_finished_in_two_attempts(slurm: SlurmCluster, job: str, run: RunDir, log: Path) -> None:
    state = slurm.wait_for_state(job, *OVER, limit_s=LONGEST_S)
    text = log.read_text(encoding="utf-8")
    assert state == "COMPLETED", text
    assert_proven_in_two_attempts(run, text)


def assert_secret_is_nowhere(slurm: SlurmCluster, job: str, run: RunDir) -> None:
    """Neither in what Slurm shows of the job to everybody, nor in any other file of the run."""
    token = run.token.read_text(encoding="ascii").strip()
    assert len(token) > 16
    shown = slurm.call("scontrol", "show", "job", "-d", job) + slurm.call("scontrol", "write", "batch_script", job, "-")
    assert token not in shown
    files = [path for path in run.root.rglob("*") if path.is_file() and path.parent != run.secrets]
    assert run.config in files
    assert [path for path in files if token.encode() in path.read_bytes()] == []


def directory_of(cluster: SlurmCluster, request: pytest.FixtureRequest, name: str) -> Path:
    """A directory of the test's own that all nodes see; a new one where the test runs again."""
    again = getattr(request.node, "execution_count", 1)
    path = cluster.dir / "home" / f"{name}{again if again > 1 else ''}"
    path.mkdir(parents=True)
    return path


def assert_proven_in_two_attempts(run: RunDir, text: str, steps: int = STEPS) -> None:
    proof = prove_run(run)
    assert proof.proven, proof.facts()
    assert len(run.all_attempts()) == 2
    assert read_json(run.summary)["last_step"] == steps, text
