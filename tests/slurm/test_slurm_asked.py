"""Whole runs through sbatch that are asked to end: by the clock, by a person, by a job that goes first."""

from __future__ import annotations

import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import strangers
from cluster import SlurmCluster, wait_for
from launched import arguments
from slurm_runs import LONG, OVER, PATHS, areal, assert_finished_in_two_attempts, status, submit, wait_for_step

from areal_hpc.fs import read_json
from areal_hpc.liveness.job import batch_log, jobs_of
from areal_hpc.report import prove_run
from areal_hpc.run_dir import RunDir


@pytest.mark.long
def test_a_heterogeneous_job_is_warned_of_its_end_and_goes_on_where_it_stopped(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    words = [*arguments(home, model), *LONG, "generation.replicas=2", "cluster.shape=het"]
    job, run, log = submit(slurm, home, *words, "cluster.generation.gres=gpu:2")
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
        environ = slurm.call("cat", f"/proc/{pid}/environ", where=generation).split("\0")
        assert f"CUDA_VISIBLE_DEVICES={index}" in environ
    for node in (trainer, generation):  # A28: whatever a run needs after its submission, it is not the internet
        assert "default" not in slurm.call("ip", "route", where=node)
    token = run.token.read_text(encoding="ascii")
    for node in (trainer, generation):
        assert token not in slurm.call("ps", "-eo", "args", where=node)
        listening = [line for line in slurm.call("ss", "-Hltnp", where=node).splitlines() if '(("python' in line]
        assert listening, "of ours"
        address = slurm.call("hostname", "-i", where=node).strip()
        assert {line.split()[3].rpartition(":")[0] for line in listening} <= {address, "127.0.0.1"}, listening
    for name, node in (("trainer", trainer), ("generator", generation)):
        met = slurm.call(sys.executable, strangers.__file__, str(hosts[name, 0]["pid"]), where=node).split()
        assert strangers.SILENT in met, (
            "torch's store and gloo hear who knows the secret, also where nobody asks for it"
        )
        assert strangers.OPEN not in met

    slurm.call("scancel", "--batch", "--signal=USR1", job)
    # scancel does not wait until the controller has handed the signal on.
    wait_for("the signal", lambda: "INFO stopping: " in log.read_text(encoding="utf-8"), poll_s=0.05)
    with slurm.without_controller():
        wait_for("a requeue in vain", lambda: "areal-hpc: scontrol: " in log.read_text(encoding="utf-8"))
    # While Slurm takes it back it is FAILED for an instant, with the exit code of a script that was ended.
    slurm.wait_for_state(job, "PENDING")
    slurm.wait_for_state(job, "RUNNING")
    assert_finished_in_two_attempts(slurm, job, run, log)
    assert "taken back       0 steps" in areal(slurm, home, "ledger", run.root).stdout


@pytest.mark.long
def test_A22_a_cancelled_run_has_stopped_in_order_and_is_continued_from_anywhere(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    job, run, _ = submit(slurm, home, *arguments(home, model), *LONG)
    wait_for_step(run, 3)
    live = areal(slurm, Path("/"), "resume", run.root)
    assert live.returncode == 2
    assert f"is job {job} in Slurm's queue (RUNNING); stop it with" in live.stderr
    slurm.call("scancel", job)
    slurm.wait_for_state(job, "CANCELLED")
    wait_for("the launcher's last word", lambda: read_json(run.attempt(1).state)["state"] == "stopped")
    done = areal(slurm, Path("/"), "resume", run.root)
    assert done.stdout.startswith(f"resume {run.root} as a Slurm job again, from {home}\njob "), done.stderr
    first, second = jobs_of(run)
    assert (first, len(slurm.job(second))) == (job, 2), "heterogeneous, as it is where nobody says otherwise"
    assert_finished_in_two_attempts(slurm, second, run, batch_log(run, second))
    assert re.search(r"resumed from .*/checkpoints/step-", run.attempt(2).log("trainer", 0).read_text(encoding="utf-8"))


@pytest.mark.long
def test_where_a_site_does_not_requeue_a_chain_of_jobs_goes_on_until_a_person_stops_it(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    words = [*arguments(home, model), *LONG, "cluster.shape=het", "cluster.requeue=false", "trainer.total_steps=400"]
    job, run, log = submit(slurm, home, *words)
    wait_for_step(run, 3)
    assert "presently disabled" in slurm.run("scontrol", "requeue", job).stderr
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    slurm.wait_for_state(job, "COMPLETED")
    first, second = jobs_of(run)
    assert first == job
    assert f"job {second} goes on when this one has ended" in log.read_text(encoding="utf-8")
    wait_for("the second attempt", lambda: len(run.all_attempts()) == 2)
    stopped_at = int(status(slurm, run)["checkpoints"].split()[-1])
    wait_for_step(run, stopped_at + 2)
    now = status(slurm, run)
    assert now["state"].startswith("running, process")
    assert now["job"].startswith(f"{second} RUNNING since")
    told = areal(slurm, home, "logs", run.root, "--role", "trainer", "-n", "0").stdout
    assert re.search(r"trainer-0 INFO resumed from .*/checkpoints/step-", told)

    done = areal(slurm, home, "stop", run.root)
    assert done.stdout == f"{run.root}: stopped\n", done.stderr
    assert slurm.wait_for_state(second, *OVER) == "COMPLETED"
    assert jobs_of(run) == [first, second], "a person's stop is no reason to go on"
    wait_for("the accounts", lambda: status(slurm, run)["job"].startswith(f"{second} COMPLETED at "), poll_s=1.0)
    assert status(slurm, run)["state"] == "stopped: `areal-hpc stop` asked for it (attempt 2)"
    proof = prove_run(run)
    assert proof.proven, proof.facts()
    report = areal(slurm, home, "report", run.root).stdout
    for epoch, job_id, why in ((1, first, "Slurm was to end its job"), (2, second, "`areal-hpc stop` asked for it")):
        assert re.search(rf"attempt {epoch} +job {job_id}, 0:\d\d:\d\d, stopped: {why}\n", report), report
    assert re.search(r"node-hours +generation 0\.\d+, trainer 0\.\d+\n", report), report


def test_a_run_that_waits_in_the_queue_is_shown_and_taken_out_of_it_and_a_submission_outlasts_a_controllers_absence(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    words = [*arguments(home, model), "cluster.shape=split", "cluster.all.raw=[--begin=now+1hour]"]
    with ThreadPoolExecutor() as pool:
        with slurm.without_controller():
            submission = pool.submit(areal, slurm, home, "submit", *words)
            # submitit pickles anew for each time that it asks.
            wait_for("the second time", lambda: len(list((home / "run/slurm").glob("*.pkl"))) > 1)
        done = submission.result()
    assert done.returncode == 0, done.stderr
    assert "controller cannot be reached; asking again" in done.stderr
    run = RunDir(home / "run")
    (job,) = jobs_of(run)
    shown = status(slurm, run)
    assert shown["state"] == "not started: its job waits in the queue"
    assert shown["job"].startswith(f"{job} PENDING: BeginTime: its earliest start has not come")
    said = areal(slurm, home, "stop", run.root).stdout
    assert said == f"{run.root}: job {job} was waiting in the queue and is cancelled\n"
    slurm.wait_for_state(job, "CANCELLED")
    assert status(slurm, run)["state"].startswith("not started: its job has ended")


def test_a_site_is_examined_and_a_plan_held_against_it(slurm: SlurmCluster, home: Path, model: Path) -> None:
    words = [*arguments(home, model), "cluster.shape=het"]
    planned = areal(slurm, home, "plan", *words, "cluster.all.gres=gpu:h100:2", "generation.replicas=2")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert re.search(r"^sbatch +Job \d+ to start at", planned.stdout, re.MULTILINE)
    assert re.search(r"^step +at most [\d,]+ tokens, .* on 1 h100 at 40% of 989 TFLOP/s$", planned.stdout, re.MULTILINE)
    refused = areal(slurm, home, "plan", *words, "cluster.all.partition=nowhere")
    assert refused.returncode == 2
    assert "Invalid partition name specified" in refused.stdout

    log = home / "doctor.log"
    doctor = shlex.join([sys.executable, "-m", "areal_hpc", "doctor", *words, "cluster.all.partition=gpu"])
    slurm.run("sbatch", "--wait", "-N2", "-o", log, "--wrap", doctor, env=PATHS, cwd=home)
    found = log.read_text(encoding="utf-8")
    assert found.endswith("nothing is wrong\n"), found
    assert re.search(r"^scheduler +ok +Slurm \d+\.\d+\S* answers$", found, re.MULTILINE)
    assert len(re.findall(r"^node n\d +ok +reaches 10\.99\.0\.1\d, ", found, re.MULTILINE)) == 2, found
    elsewhere = areal(slurm, home, "doctor", *words, "cluster.all.partition=nowhere")
    assert elsewhere.returncode == 1
    assert re.search(r"^partition +wrong +there is no nowhere; there are: cpu, gpu", elsewhere.stdout, re.MULTILINE)
