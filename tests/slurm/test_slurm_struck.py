"""Whole runs through sbatch that lose something in the middle: their place, a node, a component, the controller."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import SlurmCluster, wait_for
from launched import REPOSITORY, arguments
from slurm_runs import (
    LONG,
    LONGEST_S,
    OVER,
    STEPS,
    areal,
    assert_finished_in_two_attempts,
    status,
    submit,
    typed,
    wait_for_step,
)

from areal_hpc.fs import read_json
from areal_hpc.report import prove_run
from areal_hpc.run_dir import RunDir


@pytest.mark.long
@pytest.mark.parametrize("partition", ["preempt", "graceful"])
def test_the_script_of_a_plain_job_is_typed_as_it_is_and_pre_empted_with_and_without_grace(
    slurm: SlurmCluster, home: Path, model: Path, partition: str
) -> None:
    words = [*arguments(home, model), *LONG]
    job, log = typed(slurm, home, REPOSITORY / "sbatch/train_split.sbatch", ["-p", partition], *words)
    run = RunDir(home / "run")
    wait_for_step(run, 3)
    everything = [f"-N{len(slurm.nodes)}", "--exclusive", "-o", "/dev/null"]
    rival = slurm.call("sbatch", "-p", "gpu", *everything, "--wrap", "true")
    slurm.wait_for_state(rival.split()[-1], "COMPLETED")
    assert_finished_in_two_attempts(slurm, job, run, log)


@pytest.mark.long
def test_a_half_requeued_job_is_healed_when_its_first_node_loses_power(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    job, run, log = submit(slurm, home, *arguments(home, model), *LONG, "cluster.shape=het")
    wait_for_step(run, 5)
    node = slurm.job(job)[0]["NodeList"]
    slurm.crash(node)
    assert_finished_in_two_attempts(slurm, job, run, log)
    slurm.boot(node)


@pytest.mark.long
def test_A7_a_component_that_somebody_cancels_ends_the_run_and_its_step_is_named(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    words = [*arguments(home, model), *LONG, "cluster.shape=het", "trainer.total_steps=400"]
    job, run, log = submit(slurm, home, *words)
    wait_for_step(run, 3)
    node = slurm.job(job)[1]["NodeList"]
    slurm.call("scancel", str(int(job) + 1))
    assert slurm.wait_for_state(job, *OVER) == "FAILED"
    text = log.read_text(encoding="utf-8")
    assert f"the step on {node} ended with code" in text
    wait_for("the accounts", lambda: f"{job} FAILED" in status(slurm, run)["job"], poll_s=1.0)


@pytest.mark.long
def test_a_component_that_is_killed_costs_an_attempt_and_a_node_of_it_that_fails_a_requeue(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    job, run, log = submit(slurm, home, *arguments(home, model), *LONG, "cluster.shape=het")
    wait_for_step(run, 5)
    node = slurm.job(job)[1]["NodeList"]
    engine = read_json(run.attempt(1).endpoint("generator", 0))["pid"]
    agent = slurm.call("ps", "-o", "ppid=", "-p", str(engine), where=node).strip()
    slurm.call("kill", "-KILL", agent, where=node)
    wait_for("the next attempt, in the same job", lambda: len(run.all_attempts()) == 2)
    wait_for_step(run, 6)
    assert slurm.job(job)[0]["Restarts"] == "0"
    assert read_json(run.attempt(1).state)["about"].startswith(f"the step on {node} ended with code")

    slurm.crash(node)
    state = slurm.wait_for_state(job, *OVER, limit_s=LONGEST_S)
    slurm.boot(node)
    text = log.read_text(encoding="utf-8")
    assert state == "COMPLETED", text
    assert slurm.job(job)[0]["Restarts"] == "1"
    report = areal(slurm, home, "report", run.root).stdout
    assert re.search(rf"attempt 1 +job {job}, .*, the step on {node} ended with code \d+\n", report), report
    assert re.search(rf"attempt 2 +job {job}, .*, cut off: NODE_FAIL\n", report), report
    assert re.search(rf"attempt 3 +job {job}, requeue 1, .*, finished\n", report), report
    proof = prove_run(run)
    assert proof.proven, proof.facts()
    assert read_json(run.summary)["last_step"] == STEPS, text


def test_A8_a_step_that_never_starts_ends_the_job_in_seconds_and_is_named(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    no_module = '[ -z "${SLURM_STEP_NODELIST:-}" ] || { echo "module: no cuda/99" >&2; exit 7; }'
    words = [*arguments(home, model), "cluster.shape=split", f"cluster.setup=['{no_module}']"]
    job, run, log = submit(slurm, home, *words)
    assert slurm.wait_for_state(job, *OVER) == "FAILED"
    text = log.read_text(encoding="utf-8")
    # Of two nodes that fail, one may be ended by srun before its own exit: the step has the higher of both codes.
    assert re.search(r"the step on n\d,n\d ended with code (7|143)", text)
    # What a task said last may be lost where the other node's end ends it; three attempts are made.
    assert any("module: no cuda/99" in said.read_text(encoding="utf-8") for said in run.attempts.glob("*/logs/step-*"))
    wait_for("the accounts", lambda: "FAILED" in status(slurm, run)["job"], poll_s=1.0)
    assert f"the first step that failed is {job}.0 " in status(slurm, run)["job"]
