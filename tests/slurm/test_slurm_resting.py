"""Satellites whose run is out, as Slurm has them: held, released once, and gone with the run. The run never comes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cluster import SlurmCluster, wait_for
from launched import arguments
from slurm_runs import PATHS

from areal_hpc.cluster.satellites import join_command, render_satellite, satellite_job
from areal_hpc.config.describe import dump
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.fs import make_private_directory, publish
from areal_hpc.liveness.job import satellite_jobs
from areal_hpc.liveness.resting import resting
from areal_hpc.run_dir import RunDir

HELD = "PD:0"
LAUNCHER = """\
import sys
from pathlib import Path
from areal_hpc.liveness.resting import Recall, dismiss
from areal_hpc.run_dir import RunDir
run = RunDir(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("requeue", ["true", "false"])
def test_who_rests_is_held_let_go_once_and_over_with_the_run(
    slurm: SlurmCluster, home: Path, model: Path, requeue: str
) -> None:
    file, *words = arguments(home, model)
    words += [
        "cluster.shape=satellites",
        f"cluster.requeue={requeue}",
        f"cluster.job_name={home.name}",  # of this try alone, should the test be run again
        "cluster.all.cpus=1",
    ]
    config = resolve(load([Path(file)], words))
    run = RunDir.create(home / "run")
    publish(run.config, dump(config).encode())
    room = make_private_directory(make_private_directory(run.slurm) / "satellites")
    script = run.slurm / "satellites-0001.sbatch"
    job = satellite_job(config, log=str(room / "%A_%a.log"), directory=home, room=str(room))
    publish(script, render_satellite(job, join_command(config, sys.executable, f"{run.root} --wait 1")).encode())
    done = slurm.run("sbatch", "--parsable", "--array=1-2", script, env=PATHS, cwd=home)
    array = done.stdout.strip()

    def queue() -> dict[str, str]:
        """The satellites that there are, with state and priority: one about to be held still ends on its node."""
        lines = slurm.call("squeue", "-hr", "-n", job.name, "-o", "%i %t:%Q").splitlines()
        return dict(line.split() for line in lines)

    def do(what: str) -> None:
        """As the run's launcher does it, where Slurm's commands are."""
        done = slurm.run(sys.executable, "-c", f"{LAUNCHER}{what}", run.root, env=PATHS)
        assert done.returncode == 0, done.stderr

    def rest() -> list[str]:
        held = sorted(one for one, place in queue().items() if place == HELD)
        return held if len(held) == 2 and held == resting(run) and held == sorted(queue()) else []

    first = wait_for("both to rest", rest, poll_s=0.5)
    assert (first == [f"{array}_1", f"{array}_2"]) == (requeue == "true"), first
    for before, epoch in ((first, 0), ([], 1)):  # an attempt that is not for them, and a later one
        do(f"Recall(run, {epoch}).round()")
        assert [one for one in first if queue().get(one) == HELD] == before
    again = wait_for("both to rest again", lambda: count_of(room) == 4 and rest(), poll_s=0.5)
    assert (again == first) == (requeue == "true")
    do("dismiss(run)")
    wait_for("an empty queue", lambda: not queue(), poll_s=0.5)
    assert resting(run) == []
    assert len(satellite_jobs(run)) == (1 if requeue == "true" else 3)


def count_of(room: Path) -> int:
    """How often one has gone to rest, as their logs tell."""
    return sum(path.read_text(encoding="utf-8").count("and rests in the queue until") for path in room.glob("*.log"))
