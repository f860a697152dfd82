"""A run whose only engines are satellites: real jobs that join it, are ended in every way there is, and come again."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cluster import SlurmCluster, wait_for
from launched import REPOSITORY, arguments
from slurm_runs import OVER, areal, status, submit, typed

from areal_hpc.fs import read_json
from areal_hpc.liveness import seats
from areal_hpc.liveness.job import jobs_of, satellite_jobs, satellites_of
from areal_hpc.liveness.resting import resting
from areal_hpc.report import prove_run
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import RecordReader

STEPS = 60
ROUNDS = 10
SATELLITES = 2
LIMIT_S = 600.0
WORDS = (
    f"trainer.total_steps={STEPS}",
    "trainer.optimizer.lr=1e-4",
    "rollout.reward=tiny_task:held",
    "rollout.reward_timeout_s=600",
    "rollout.group_size=4",
    "cluster.all.cpus=2",
    "limits.stop_s=20",
    "limits.engine_s=25",
    "cluster.trainer.time='60'",
)
"""So low a learning rate that two runs have the same rewards, but for chance."""
WITHOUT_REQUEUE = (
    "cluster.requeue=false",
    "cluster.trainer.partition=preempt",
    "cluster.trainer.nodelist=n1",
    "cluster.generation.exclude=n1",
    "cluster.generation.gres=gpu:1",
    "trainer.total_steps=8",
)
QUICK = "rollout.reward=tiny_task:spread"
"""The same rewards at once."""


class World:
    """The run, and the satellites of the moment."""

    def __init__(self, slurm: SlurmCluster, home: Path, model: Path, *more: str) -> None:
        words = [*arguments(home, model), *WORDS, "generation.replicas=0", "cluster.shape=satellites", *more]
        options = [f"cluster.satellites={SATELLITES}", "cluster.generation.partition=preempt"]
        self.slurm, self.home, self.hold = slurm, home, home / "hold"
        self.hold.touch()  # so that no step is made while satellites start
        self.job, self.run, self.log = submit(slurm, home, *words, *options)
        self.array = read_json(self.run.slurm / "submission-0001.json")["satellites"]
        slurm.wait_for_state(self.job, "RUNNING")
        self.trainer_node = slurm.job(self.job)[0]["NodeList"]

    def told(self, kind: str) -> list[dict[str, object]]:
        records = RecordReader(self.run.attempt(1).telemetry, ["trainer"]).poll()
        return [dict(record.values) for record in records if record.kind == kind]

    def num_joined(self) -> int:
        """How many engines have come up so far: each one's incarnations are counted up."""
        last: dict[str, int] = {}
        for name in (
            os.listdir(self.run.attempt(1).root / "seats") if (self.run.attempt(1).root / "seats").is_dir() else []
        ):
            if name.endswith(".up"):
                index, incarnation, _ = name.split(".")
                last[index] = max(int(incarnation) + 1, last.get(index, 0))
        return sum(last.values())

    def step(self) -> int:
        return max((int(str(record["step"])) for record in self.told("step")), default=0)

    def join(self) -> None:
        """Another array, of the script as it is."""
        options = [f"--array=1-{SATELLITES}", "-p", "preempt", "-c1", f"--exclude={self.trainer_node}"]
        script = REPOSITORY / "sbatch/satellites.sbatch"
        self.array, _ = typed(self.slurm, self.home, script, options, str(self.run.root))

    def let_train(self, step: int) -> None:
        self.hold.unlink()
        wait_for(f"step {step}", lambda: self.step() >= step, LIMIT_S, 0.05)

    def holders(self) -> list[tuple[str, int]]:
        """Host and pid of each process that has brought engines."""
        told = (seat.holder() for seat in seats.present(self.run.attempt(1)).values())
        return [(str(holder["host"]), int(holder["pid"])) for holder in told]

    def wait_until_nobody_is_there(self) -> None:
        wait_for("all seats to be left", lambda: not seats.newest(self.run.attempt(1)), LIMIT_S, 0.2)


def cancel(world: World) -> None:
    world.slurm.call("scancel", world.array)


def kill(world: World) -> None:
    """SIGKILL to what has brought the engines, which see that and leave; Slurm takes the job for failed."""
    for host, pid in world.holders():
        world.slurm.call("kill", "-KILL", str(pid), where=host)


def pre_empt(world: World) -> None:
    """What was pre-empted comes again by itself, unless somebody cancels it."""
    take_nodes(world)
    world.slurm.call("scancel", world.array)


def take_nodes(world: World) -> None:
    """Pre-empt without grace."""
    options = [f"--exclude={world.trainer_node}", "-N2", "--exclusive", "-o", "/dev/null"]
    rival = world.slurm.call("sbatch", "-p", "gpu", *options, "--wrap", "sleep 1").split()[-1]
    world.slurm.wait_for_state(rival, "COMPLETED")


def warn(world: World) -> None:
    """As at a time limit: the engines leave, and their job is requeued by its own script."""
    for task in range(1, SATELLITES + 1):
        world.slurm.call("scancel", "--signal=TERM", f"{world.array}_{task}")
    for task in range(1, SATELLITES + 1):
        world.slurm.wait_for_state(f"{world.array}_{task}", "PENDING")
    world.slurm.call("scancel", world.array)


WAYS: tuple[Callable[[World], None], ...] = (cancel, pre_empt, kill, warn)


def rewards(run: RunDir) -> np.ndarray:
    records = RecordReader(run.attempt(1).telemetry, ["trainer"]).poll()
    return np.array([record.values["reward_mean"] for record in records if record.kind == "step"], dtype=np.float64)


@pytest.mark.long
@pytest.mark.timeout(3600)  # three minutes where the machine has nothing else to do
def test_satellites_join_and_leave_twenty_times_and_the_run_is_what_it_would_have_been(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    world = World(slurm, home, model)
    for number in range(ROUNDS):
        if number:
            world.join()
        joined = (number + 1) * SATELLITES
        wait_for(f"{joined} to have joined", lambda: world.num_joined() >= joined, LIMIT_S, 0.2)  # noqa: B023
        if number == 0:
            shown = status(slurm, world.run)["satellites"]
            assert shown.startswith("joined: generator-0 (n")
            assert f"job {world.array}_" in shown
            assert shown.endswith(f"array {world.array}: {SATELLITES} RUNNING")
        world.let_train((number + 1) * STEPS // ROUNDS - 2)
        if number < ROUNDS - 1:
            WAYS[number % len(WAYS)](world)  # in the middle of what they generate
            world.hold.touch()
            world.wait_until_nobody_is_there()
    text = world.log.read_text(encoding="utf-8")
    assert slurm.wait_for_state(world.job, *OVER) == "COMPLETED", text
    assert len(world.run.all_attempts()) == 1, "the trainer was never restarted"
    proof = prove_run(world.run)
    assert proof.proven, proof.facts()
    assert read_json(world.run.summary)["last_step"] == STEPS
    for task in range(1, SATELLITES + 1):  # the run is over, and so are those who served it
        assert slurm.wait_for_state(f"{world.array}_{task}", *OVER) == "COMPLETED"
    assert len(list(world.run.attempt(1).logs.glob("generator-*.log"))) <= 2 * SATELLITES, "seats are used again"

    report = areal(slurm, home, "report", world.run.root).stdout
    assert re.search(r"node-hours +trainer 0\.\d+, satellites 0\.\d+\n", report), report

    _, still, _ = submit(slurm, home, *arguments(home, model), *WORDS, "name=still", "cluster.shape=het", QUICK)
    wait_for("the run without satellites", still.summary.exists, LIMIT_S, 0.5)
    one, other = rewards(world.run), rewards(still)
    assert one.size == other.size == STEPS
    by_chance = math.sqrt(one.var(ddof=1) / STEPS + other.var(ddof=1) / STEPS)
    assert abs(one.mean() - other.mean()) < 4 * by_chance, (one.mean(), other.mean(), by_chance)


@pytest.mark.long
def test_what_is_pre_empted_where_a_site_does_not_requeue_has_one_successor_satellites_and_the_run_alike(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    world = World(slurm, home, model, *WITHOUT_REQUEUE)
    run, first = world.run, world.array
    wait_for("satellites", lambda: world.num_joined() >= SATELLITES, LIMIT_S, 0.2)
    world.let_train(2)
    world.hold.touch()
    take_nodes(world)
    for task in range(1, SATELLITES + 1):
        assert slurm.wait_for_state(f"{first}_{task}", *OVER) == "PREEMPTED"
    _, *successors = satellites_of(run)
    assert len(set(successors)) == SATELLITES
    said = [path.read_text(encoding="utf-8") for path in run.satellites.glob(f"{first}_*.log")]
    for successor in successors:
        assert successor in status(slurm, run)["satellites"]
        assert sum(f"job {successor} serves the run in its place" in text for text in said) == 1, said
    wait_for("their successors", lambda: len(seats.present(run.attempt(1))) == SATELLITES, LIMIT_S, 0.2)
    world.let_train(4)
    assert len(run.all_attempts()) == 1, "of which the trainer has noticed nothing else"

    world.hold.touch()
    rival = slurm.call(
        "sbatch", "-p", "gpu", f"-N{len(slurm.nodes)}", "--exclusive", "-o", "/dev/null", "--wrap", "true"
    )
    slurm.wait_for_state(rival.split()[-1], "COMPLETED")
    assert slurm.wait_for_state(world.job, *OVER) in ("PREEMPTED", "COMPLETED"), world.log.read_text(encoding="utf-8")
    world.hold.unlink()
    assert world.log.read_text(encoding="utf-8").count(" goes on when this one has ended") == 1
    job, second = jobs_of(run)
    assert job == world.job
    assert slurm.wait_for_state(second, *OVER, limit_s=LIMIT_S) == "COMPLETED"
    assert len(run.all_attempts()) == 2
    proof = prove_run(run)
    assert proof.proven, proof.facts()
    assert read_json(run.summary)["last_step"] == 8
    _, *last = satellites_of(run)
    assert len(set(last)) == SATELLITES
    assert not set(last) & set(successors)
    # The run is over, and nobody comes in their place.
    assert {slurm.wait_for_state(one, *OVER) for one in last} == {"COMPLETED"}
    assert satellites_of(run) == [first, *last]

    def held_s() -> int:
        words = ["-DXnP", "-o", "State,ElapsedRaw", "-j", ",".join([first, *successors, *last])]
        rows = [line.split("|") for line in slurm.call("sacct", *words).splitlines()]
        return all(state in OVER for state, _ in rows) and sum(int(elapsed) for _, elapsed in rows)

    satellites_s = wait_for("the accounts", held_s, poll_s=1.0)
    report = areal(slurm, home, "report", run.root).stdout
    assert re.search(r"GPU-hours +satellites 0\.\d+\n", report), report
    usage = read_json(run.summary)["usage"]
    assert usage["node_hours"]["satellites"] == pytest.approx(satellites_s / 3600)
    assert usage["gpu_hours"]["satellites"] == pytest.approx(satellites_s / 3600)


def test_satellites_of_a_run_that_is_stopped_leave_the_queue_with_it(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    words = [*arguments(home, model), *WORDS, "generation.replicas=0", "cluster.shape=satellites"]
    planned = areal(slurm, home, "plan", *words, "cluster.satellites=3")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert "satellites   3 jobs that come and go, each: nodes=1, cpus=2\n" in planned.stdout
    assert planned.stdout.count(" to start at ") == 2, planned.stdout
    job, run, _ = submit(slurm, home, *words, "cluster.trainer.raw=[--begin=now+1hour]")
    array = read_json(run.slurm / "submission-0001.json")["satellites"]
    assert status(slurm, run)["satellites"] == f"array {array}: 1 PENDING"
    said = areal(slurm, home, "stop", run.root).stdout
    assert said == f"{run.root}: job {job} was waiting in the queue and is cancelled\n"
    slurm.wait_for_state(f"{array}_1", "CANCELLED")


def put_out(world: World) -> None:
    """End the run's time, and keep its job in the queue; its satellites notice, and rest."""
    world.slurm.call("scancel", "--batch", "--signal=USR1", world.job)
    world.slurm.wait_for_state(world.job, "PENDING")
    world.slurm.call("scontrol", "hold", world.job)
    tasks = [f"{world.array}_{task}" for task in range(1, SATELLITES + 1)]

    def rests() -> bool:
        told = [world.slurm.job(task)[0] for task in tasks]
        return all((one["JobState"], one["Priority"]) == ("PENDING", "0") for one in told)

    wait_for("its satellites to rest", rests, LIMIT_S, 0.5)
    assert resting(world.run) == tasks
    assert status(world.slurm, world.run)["satellites"].endswith(
        f"{', '.join(tasks)} held until the run is there again"
    )


@pytest.mark.long
@pytest.mark.timeout(900)  # two attempts, and two ends of one; a minute and a half where there is nothing else to do
def test_satellites_whose_run_waits_in_the_queue_give_their_nodes_back_and_come_again_with_it(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    world = World(slurm, home, model, "limits.rejoin_s=3")
    run = world.run
    wait_for("satellites", lambda: world.num_joined() >= SATELLITES, LIMIT_S, 0.2)
    world.let_train(1)
    world.hold.touch()
    put_out(world)
    slurm.call("scontrol", "release", world.job)
    wait_for("the second attempt", lambda: len(run.all_attempts()) == 2, LIMIT_S, 0.2)
    wait_for("them to serve it", lambda: len(seats.present(run.attempt(2))) == SATELLITES, LIMIT_S, 0.2)
    assert resting(run) == []
    assert satellite_jobs(run) == [world.array], "in the jobs that they have always been"
    text = world.log.read_text(encoding="utf-8")
    assert len(re.findall("satellites that rested come again: ", text)) in (1, SATELLITES), text

    put_out(world)
    said = areal(slurm, home, "stop", run.root).stdout
    assert said == f"{run.root}: job {world.job} was waiting in the queue and is cancelled\n"
    for task in range(1, SATELLITES + 1):
        slurm.wait_for_state(f"{world.array}_{task}", "CANCELLED")
