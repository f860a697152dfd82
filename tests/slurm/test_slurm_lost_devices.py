"""Fault 17: a node whose devices are gone. What runs there goes on without it, in every shape, and says so.

The devices are stand-ins anyway; so is their loss: on one node torch is taken for one that is built for devices, and
finds none. An engine of ours, which needs none, looks for them all the same.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster import SlurmCluster, wait_for
from launched import REPOSITORY, arguments
from slurm_runs import (
    LONGEST_S,
    OVER,
    PATHS,
    areal,
    assert_proven_in_two_attempts,
    assert_secret_is_nowhere,
    status,
    submit,
    typed,
)

from areal_hpc.buffer.epochs import claim_epoch
from areal_hpc.cluster.hostlist import expand
from areal_hpc.cluster.owner import Owner
from areal_hpc.cluster.satellites import join_command, render_satellite, satellite_job
from areal_hpc.config.describe import dump
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.fs import make_private_directory, publish, publish_json
from areal_hpc.keys import make_key
from areal_hpc.liveness import seats
from areal_hpc.liveness.job import batch_log, jobs_of, satellite_jobs
from areal_hpc.liveness.resting import resting
from areal_hpc.run_dir import RunDir

STAND_IN = """\
import socket, sys, time
from pathlib import Path
from areal_hpc import accelerator

def has_lost_them():
    while not Path({lost!r}).exists():
        time.sleep(0.05)
    return socket.gethostname() == Path({lost!r}).read_text()

accelerator._is_built_for_devices = has_lost_them
if sys.orig_argv[1:4] == ["-m", "areal_hpc.roles", "generator"]:
    from areal_hpc.roles import generator
    serve = generator.main

    def main(process):
        accelerator.detect_bound()
        return serve(process)

    generator.main = main
"""
STEPS = 4
PINNED = ("cluster.trainer.nodelist=n1", "cluster.generation.exclude=n1")
"""Which each component keeps."""
WORDS = (f"trainer.total_steps={STEPS}", "cluster.all.cpus=4", "cluster.all.gres=gpu:1", "limits.stop_s=20")


class Loss:
    """On which node it is, is said when that is known; who looks for devices waits for it."""

    def __init__(self, home: Path) -> None:
        room = home / "stand-in"
        room.mkdir()
        self._file = room / "lost"
        (room / "sitecustomize.py").write_text(STAND_IN.format(lost=str(self._file)), encoding="utf-8")
        self.env = {"PYTHONPATH": f"{room}:{PATHS['PYTHONPATH']}"}

    def is_on(self, node: str) -> None:
        publish(self._file, node.encode())


def test_fault_17_a_heterogeneous_job_is_requeued_without_a_node_that_has_lost_its_device(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    """And was named already: Slurm took the job back by itself before the script had the node left out."""
    loss = Loss(home)
    job, run, log = submit(slurm, home, *arguments(home, model), *WORDS, *PINNED, "cluster.shape=het", env=loss.env)
    slurm.wait_for_state(job, "RUNNING")
    lost = slurm.job(job)[1]["NodeList"]
    publish(make_private_directory(run.slurm / f"avoided-{job}") / lost, f"{lost}\n".encode())
    loss.is_on(lost)
    slurm.wait_for_state(job, "PENDING")
    what = f"node {lost} has lost device 0 of generator-0"
    shown = status(slurm, run)
    assert shown["state"] == f"stopped: {what} (attempt 1)"
    assert shown["left out"] == f"{lost} by job {job}: without the devices that were asked for"
    assert f"attempt 1: stopped: {what}; this is what was last said" in areal(slurm, home, "why", run.root).stdout
    assert [one["ExcNodeList"] for one in slurm.job(job)] == [lost, f"n1,{lost}"]

    assert slurm.wait_for_state(job, *OVER, limit_s=LONGEST_S) == "COMPLETED", log.read_text(encoding="utf-8")
    assert lost not in {one["NodeList"] for one in slurm.job(job)}
    assert {one["Restarts"] for one in slurm.job(job)} == {"1"}
    assert_secret_is_nowhere(slurm, job, run)
    text = log.read_text(encoding="utf-8")
    assert f"the job goes on without node {lost}\n" in text
    assert f"{lost} was to compute on CUDA_VISIBLE_DEVICES=0, and torch finds no device there" in text
    assert_proven_in_two_attempts(run, text, STEPS)
    report = areal(slurm, home, "report", run.root).stdout
    assert re.search(rf"attempt 1 +job {job}, .*, stopped: {what}\n", report), report
    assert re.search(rf"attempt 2 +job {job}, requeue 1, .*, finished\n", report), report


@pytest.mark.long
def test_fault_17_where_a_site_does_not_requeue_each_component_of_the_next_job_is_told(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    loss = Loss(home)
    words = [*arguments(home, model), *WORDS, *PINNED, "cluster.shape=het", "cluster.requeue=false"]
    job, run, log = submit(slurm, home, *words, env=loss.env)
    slurm.wait_for_state(job, "RUNNING")
    lost = slurm.job(job)[1]["NodeList"]
    loss.is_on(lost)
    assert slurm.wait_for_state(job, *OVER) == "COMPLETED", log.read_text(encoding="utf-8")
    _, second = wait_for("the next job", lambda: len(jobs_of(run)) == 2 and jobs_of(run))
    assert slurm.wait_for_state(second, *OVER, limit_s=LONGEST_S) == "COMPLETED"
    assert [sorted(expand(one["ExcNodeList"])) for one in slurm.job(second)] == [[lost], ["n1", lost]]
    assert_proven_in_two_attempts(run, batch_log(run, second).read_text(encoding="utf-8"), STEPS)


@pytest.mark.long
def test_fault_17_where_a_site_does_not_requeue_the_next_job_is_submitted_without_the_first_node(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    """The script is typed as it is, so what it leaves lies where that was."""
    loss = Loss(home)
    script, options = REPOSITORY / "sbatch/train_chain.sbatch", ["--gres=gpu:1", "--cpus-per-task=4"]
    job, log = typed(slurm, home, script, options, *arguments(home, model), *WORDS, env=loss.env)
    run = RunDir(home / "run")
    slurm.wait_for_state(job, "RUNNING")
    lost = slurm.job(job)[0]["BatchHost"]
    loss.is_on(lost)
    assert slurm.wait_for_state(job, *OVER) == "COMPLETED", log.read_text(encoding="utf-8")
    wait_for("the next job's attempt", lambda: len(run.all_attempts()) == 2, LONGEST_S)
    first, second = wait_for("its job", lambda: len(jobs_of(run)) == 2 and jobs_of(run))
    assert first == job
    assert slurm.wait_for_state(second, *OVER, limit_s=LONGEST_S) == "COMPLETED"
    assert slurm.job(second)[0]["ExcNodeList"] == lost
    assert_proven_in_two_attempts(run, (home / f"areal-hpc-{second}.log").read_text(encoding="utf-8"), STEPS)
    assert [path.name for path in (home / f"areal-hpc-avoided-{second}").iterdir()] == [lost]
    report = areal(slurm, home, "report", run.root).stdout
    assert re.search(rf"attempt 1 +job {job}, .*, stopped: node {lost} has lost device 0 of trainer-0\n", report), (
        report
    )


class Satellites:
    """Of a run that is not at work, but says so."""

    def __init__(self, slurm: SlurmCluster, home: Path, model: Path, *more: str) -> None:
        self.loss, self._slurm = Loss(home), slurm
        file, *words = arguments(home, model)
        words += [*WORDS, "cluster.shape=satellites", "cluster.all.cpus=1", f"cluster.job_name={home.name}", *more]
        config = resolve(load([Path(file)], words))
        self.run = RunDir.create(home / "run")
        publish(self.run.config, dump(config).encode())
        make_key(self.run.token)
        self._owner = Owner.this_process().record()
        self.attempt = self.run.attempt(claim_epoch(self.run, self._owner)).create()
        publish_json(self.attempt.endpoint("trainer", 0), {"host": "10.99.0.1"})
        self.say("running")
        self.room = make_private_directory(make_private_directory(self.run.slurm) / "satellites")
        job = satellite_job(config, log=str(self.room / "%A_%a.log"), directory=home, room=str(self.room))
        self.name, script = job.name, self.run.slurm / "satellites-0001.sbatch"
        publish(script, render_satellite(job, join_command(config, "python", str(self.run.root))).encode())
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        env = {**PATHS, **self.loss.env, "PATH": path}
        said = slurm.run("sbatch", "--parsable", f"--array=1-{config.cluster.satellites}", script, env=env, cwd=home)
        self.array = said.stdout.strip()

    def say(self, state: str) -> None:
        publish_json(self.attempt.state, {"state": state, **self._owner})

    def holders(self, number: int) -> list[Mapping[str, Any]]:
        """Who has brought the engines, when there are so many."""
        wait_for(f"{number} engines", lambda: len(seats.present(self.attempt)) == number, LONGEST_S, 0.5)
        return [seat.holder() for seat in seats.present(self.attempt).values()]

    def said(self) -> str:
        return "".join(path.read_text(encoding="utf-8") for path in self.room.glob("*.log"))

    def __enter__(self) -> Satellites:
        return self

    def __exit__(self, *_: object) -> None:
        self._slurm.call("scancel", "--name", self.name)


@pytest.mark.parametrize("requeue", ["true", "false"])
def test_fault_17_a_satellite_does_not_take_the_same_node_again(
    slurm: SlurmCluster, home: Path, model: Path, requeue: str
) -> None:
    with Satellites(slurm, home, model, f"cluster.requeue={requeue}", "cluster.satellites=2") as satellites:
        slurm.wait_for_state(f"{satellites.array}_1", "RUNNING")
        lost = slurm.job(f"{satellites.array}_1")[0]["NodeList"]
        satellites.loss.is_on(lost)
        holders = satellites.holders(2)
        assert lost not in {holder["host"] for holder in holders}
        number = len(satellite_jobs(satellites.run))
        assert number == (1 if requeue == "true" else 3), "in their own jobs, where a site requeues"
        for holder in holders:
            assert slurm.job(holder["job"])[0]["ExcNodeList"] == lost
            assert f"{lost} by job {holder['job']}" in status(slurm, satellites.run)["left out"]
        text = satellites.said()
        assert text.count(f" comes again without node {lost}\n") == 2, text


def test_of_a_satellite_of_two_nodes_one_that_has_lost_its_device_stays_while_the_other_serves(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    with Satellites(slurm, home, model, "cluster.generation.nodes=2") as satellites:
        job = f"{satellites.array}_1"
        slurm.wait_for_state(job, "RUNNING")
        wait_for("both to have a seat", lambda: len(seats.newest(satellites.attempt)) == 2, LONGEST_S, 0.5)
        lost = slurm.job(job)[0]["BatchHost"]
        satellites.loss.is_on(lost)
        (holder,) = satellites.holders(1)
        assert (holder["job"], holder["host"] != lost) == (job, True)
        stays = f"other nodes of job {job} serve on, and this one stays with them"
        wait_for("the first node to give up", lambda: stays in satellites.said(), LONGEST_S, 0.5)
        assert slurm.job(job)[0]["JobState"] == "RUNNING"
        assert resting(satellites.run) == []
        satellites.say("finished")
        assert slurm.wait_for_state(job, *OVER) == "COMPLETED", satellites.said()
        assert (slurm.job(job)[0]["Restarts"], resting(satellites.run)) == ("0", [])
