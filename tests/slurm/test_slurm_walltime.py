"""The real clock runs out: a time limit of two minutes, which is the shortest that leaves time for a warning."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from cluster import SlurmCluster, wait_for
from launched import arguments
from slurm_runs import LONG, OVER, areal, submit

from areal_hpc.fs import read_json
from areal_hpc.liveness.job import jobs_of, satellites_of
from areal_hpc.report import prove_run
from areal_hpc.run_dir import RunDir

STEPS = 200
"""Of half a second at least: more than fit into a job of two minutes, less than into four."""
LIMIT_S = 900.0


def is_done(run: RunDir) -> bool:
    return run.summary.exists() and read_json(run.summary)["last_step"] == STEPS


def assert_nothing_was_lost(slurm: SlurmCluster, run: RunDir) -> int:
    """The number of attempts: each of them was warned, and wrote a checkpoint in time."""
    proof = prove_run(run)
    assert proof.proven, proof.facts()
    assert "taken back       0 steps" in areal(slurm, run.root, "ledger", run.root).stdout
    attempts = run.all_attempts()
    assert [read_json(attempt.state)["state"] for attempt in attempts] == ["stopped"] * (len(attempts) - 1) + [
        "finished"
    ]
    return len(attempts)


@pytest.mark.long
@pytest.mark.timeout(1800)  # four minutes where the machine has nothing else to do
def test_A19_a_time_limit_of_two_minutes_ends_no_run_whether_its_site_requeues_or_not(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    words = [*arguments(home, model), *LONG, f"trainer.total_steps={STEPS}", "cluster.all.time='2'"]
    job, requeued, log = submit(slurm, home, *words, "cluster.shape=het")
    satellites = ["cluster.shape=satellites", "generation.replicas=0", "cluster.requeue=false"]
    _, chained, _ = submit(slurm, home, *words, "name=chained", *satellites)
    assert slurm.job(job)[0]["TimeLimit"] == "00:02:00"
    for run in (requeued, chained):
        wait_for(f"the end of {run.root.name}", lambda: is_done(run), LIMIT_S, 1.0)  # noqa: B023

    assert slurm.wait_for_state(job, *OVER) == "COMPLETED"
    attempts = assert_nothing_was_lost(slurm, requeued)
    assert attempts > 1
    assert jobs_of(requeued) == [job]
    (restarts,) = {component["Restarts"] for component in slurm.job(job)}
    assert int(restarts) == attempts - 1, "each end was followed by one requeue, from one place"
    text = log.read_text(encoding="utf-8")
    assert text.count("stopping: the step under way") == attempts - 1, "attempts append to one log"

    jobs = jobs_of(chained)
    assert assert_nothing_was_lost(slurm, chained) == len(jobs)
    assert len(jobs) > 1
    for one, successor in pairwise(jobs):
        assert slurm.wait_for_state(one, *OVER) == "COMPLETED"
        said = (chained.slurm / f"{one}.log").read_text(encoding="utf-8")
        assert said.count(f"job {successor} goes on when this one has ended") == 1
    assert slurm.wait_for_state(jobs[-1], *OVER) == "COMPLETED"
    first, newest = satellites_of(chained)
    assert int(newest) > int(first), "and its engines have had the same limit"
