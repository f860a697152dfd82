"""Satellites that are long in Slurm's queue, and the shape as a person types it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cluster import SlurmCluster, wait_for
from launched import REPOSITORY, arguments
from slurm_runs import LONGEST_S, OVER, areal, status, submit, typed

from areal_hpc.fs import read_json
from areal_hpc.liveness.alone import alone
from areal_hpc.liveness.heartbeat import read_heartbeat
from areal_hpc.report import prove_run
from areal_hpc.run_dir import AttemptDir, RunDir

STEPS = 4
WORDS = (f"trainer.total_steps={STEPS}", "cluster.all.cpus=4", "cluster.satellites=1", "limits.stop_s=20")
JOIN_S = 2.0


@pytest.mark.long
def test_a_trainer_waits_for_a_satellite_that_is_in_the_queue_for_longer_than_its_limit_and_says_for_what(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    """Its node is another job's."""
    rival = slurm.call("sbatch", "-w", "n2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600").split()[-1]
    slurm.wait_for_state(rival, "RUNNING")
    pinned = ("cluster.trainer.nodelist=n1", "cluster.generation.nodelist=n2", "generation.replicas=0")
    words = [*arguments(home, model), *WORDS, *pinned, "cluster.shape=satellites", f"limits.join_s={JOIN_S:g}"]
    job, run, log = submit(slurm, home, *words)
    array = read_json(run.slurm / "submission-0001.json")["satellites"]

    wait_for("the attempt", lambda: run.attempts.is_dir() and run.newest_attempt(), LONGEST_S, 0.2)
    attempt = run.attempt(1)
    wait_for("Slurm's answer", lambda: (told := alone(attempt)) and told.waits, LONGEST_S, 0.2)
    wait_for("the trainer to wait", lambda: _waits(attempt), LONGEST_S, 0.5)
    time.sleep(3 * JOIN_S)  # nothing happens, which is what is to be seen
    told = alone(attempt)
    assert told is not None
    assert time.time() - told.since > 3 * JOIN_S
    assert list(told.waits) == [f"{array}_1"]
    shown = status(slurm, run)["no engine"]
    assert f": {array}_1 in Slurm's queue: {told.waits[f'{array}_1']}: " in shown, shown
    assert "no engine for 0:00:" in areal(slurm, home, "why", run.root).stdout
    assert slurm.job(job)[0]["JobState"] == "RUNNING"

    slurm.call("scancel", rival)
    assert slurm.wait_for_state(job, *OVER, limit_s=LONGEST_S) == "COMPLETED", log.read_text(encoding="utf-8")
    text = log.read_text(encoding="utf-8")
    assert f"no engine is there: {array}_1 in Slurm's queue: " in text
    assert len(run.all_attempts()) == 1, text
    _assert_all_is_well(run)


def _waits(attempt: AttemptDir) -> bool:
    waits = (read_heartbeat(attempt, "trainer-0") or {"waits": []})["waits"]
    return "an engine to join" in [wait["what"] for wait in waits]


def _assert_all_is_well(run: RunDir) -> None:
    proof = prove_run(run)
    assert proof.proven, proof.facts()
    assert read_json(run.summary)["last_step"] == STEPS


@pytest.mark.long
def test_the_scripts_of_trainer_and_satellites_as_they_are(slurm: SlurmCluster, home: Path, model: Path) -> None:
    script = REPOSITORY / "sbatch/train_satellites.sbatch"
    words = [*arguments(home, model), *WORDS, "generation.replicas=0"]
    job, log = typed(slurm, home, script, ["--cpus-per-task=4"], *words)
    run = RunDir(home / "run")
    wait_for("the run", run.config.exists, LONGEST_S, 0.2)
    array, _ = typed(slurm, home, REPOSITORY / "sbatch/satellites.sbatch", ["--array=1-2"], str(run.root))
    assert slurm.wait_for_state(job, *OVER, limit_s=LONGEST_S) == "COMPLETED", log.read_text(encoding="utf-8")
    for task in (1, 2):
        assert slurm.wait_for_state(f"{array}_{task}", *OVER) == "COMPLETED"
    _assert_all_is_well(run)
