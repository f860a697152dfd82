"""The quickstart, with fewer steps, in each shape through sbatch: pre-empted in the middle, requeued, and finished with
nothing lost and nothing trained twice."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from cluster import SlurmCluster, wait_for
from launched import REPOSITORY
from quickstart_model import quickstart_model
from slurm_runs import LONGEST_S, OVER, PATHS, areal, submit, wait_for_step

from areal_hpc.fs import read_json
from areal_hpc.report import prove_run
from areal_hpc.run_dir import RunDir

STEPS = 24
QUICKSTART = [
    str(REPOSITORY / "configs/quickstart.yaml"),
    f"trainer.total_steps={STEPS}",
    "checkpoint.every_steps=3",
    "evaluation.every_steps=12",
    "evaluation.num_prompts=16",
    "cluster.all.partition=preempt",
    "cluster.all.cpus=4",
]
LAST_WEEK_S = 7 * 86400


def waits_in_the_queue_for_a_week(slurm: SlurmCluster, job: str, run: RunDir) -> None:
    """As far as files can tell: nothing may count the time since the submission."""
    slurm.wait_for_state(job, "PENDING")
    for path in run.root.rglob("*"):
        status = path.stat()
        os.utime(path, (status.st_atime - LAST_WEEK_S, status.st_mtime - LAST_WEEK_S))
    for component in slurm.job(job):
        slurm.run("scontrol", "release", component["JobId"])


HELD = {"satellites": ("generation.replicas=0", "cluster.trainer.raw=['--hold']")}
"""Satellites do not start before the trainer's job does, anyhow."""


def start(slurm: SlurmCluster, home: Path, shape: str, words: list[str]) -> tuple[str, RunDir, Path]:
    if shape != "local":
        job, run, log = submit(slurm, home, *words, *HELD.get(shape, ("cluster.all.raw=['--hold']",)))
        waits_in_the_queue_for_a_week(slurm, job, run)
        return job, run, log
    log = home / "local.log"
    command = shlex.join([sys.executable, "-m", "areal_hpc", "run", *words, "--resume", "--takeover"])
    options = ["-p", "preempt", "--requeue", "-c", "4", "--open-mode=append", "-o", log]
    said = slurm.run("sbatch", *options, "--wrap", f"exec {command}", env=PATHS, cwd=home)
    assert said.returncode == 0, said.stderr
    return said.stdout.split()[-1], RunDir(home / "quickstart"), log


@pytest.mark.long
@pytest.mark.parametrize("shape", ["het", "split", "satellites", "local"])
def test_A11_the_quickstart_waits_long_in_the_queue_is_pre_empted_in_the_middle_and_finishes(
    slurm: SlurmCluster, home: Path, request: pytest.FixtureRequest, shape: str
) -> None:
    assert request.config.cache is not None
    model = slurm.dir / "quickstart-model"
    if not model.is_symlink():
        model.symlink_to(quickstart_model(request.config.cache))
    words = [*QUICKSTART, f"run_root={home}", f"model.path={model}", f"cluster.shape={shape}"]
    job, run, log = start(slurm, home, shape, words)
    wait_for_step(run, 4)
    everything = [f"-N{len(slurm.nodes)}", "--exclusive", "-o", "/dev/null"]
    rival = slurm.call("sbatch", "-p", "gpu", *everything, "--wrap", "true").split()[-1]
    slurm.wait_for_state(rival, "COMPLETED")
    wait_for("its second start", lambda: len(run.all_attempts()) == 2, LONGEST_S)
    assert slurm.wait_for_state(job, *OVER, limit_s=LONGEST_S) == "COMPLETED", log.read_text(encoding="utf-8")
    proof = prove_run(run)
    assert proof.proven, proof.facts()
    assert len(run.all_attempts()) == 2
    summary = read_json(run.summary)
    assert (summary["last_step"], len(summary["evaluations"])) == (STEPS, 3), summary
    assert "each once, of 2 attempts" in areal(slurm, home, "ledger", run.root).stdout
