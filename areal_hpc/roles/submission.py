"""``areal-hpc submit``: a run handed to Slurm once, from any directory, and never twice at the same time.

run directory/slurm/
  submission-0001.json     who submits; then the job's id, and that of the array of satellites
  config-0001.yaml         what was submitted: later edits of the configuration do not reach a queued job
  1234.log                 the batch script's output, over all requeues of job 1234
  1234/                    the script as sbatch got it, and submitit's files
  satellites-0001.sbatch   the script of each satellite; satellites/1235_1.log is the output of one, and
  satellites/task-1        which job has come in the place of the first, where a site does not requeue
  satellites/joined-9_1    a job, or a task of an array, that has had engines for the run
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.buffer.epochs import newest_epoch
from areal_hpc.cluster.components import components_of, engines_of_node, require_slurm, satellite_of, seats
from areal_hpc.cluster.containers import python_of_launcher, python_on_nodes
from areal_hpc.cluster.executor import Launch, submit
from areal_hpc.cluster.hetjob import job_of
from areal_hpc.cluster.jobs import cancel, submit_script
from areal_hpc.cluster.owner import Owner
from areal_hpc.cluster.satellites import array_options, join_command, render_satellite, satellite_job
from areal_hpc.config.cluster import Shape
from areal_hpc.config.describe import dump
from areal_hpc.config.paths import anchored
from areal_hpc.config.schema import Config
from areal_hpc.errors import RunDirError, SubmissionError
from areal_hpc.fs import RunDir, create_exclusive, make_private_directory, publish, publish_json, read_json
from areal_hpc.roles.job import SUBMISSION, JobView, batch_log, look, satellites_dir, submitted_satellites
from areal_hpc.roles.supervisor import roles_of


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job in Slurm's queue."""

    job_id: str
    run: RunDir
    log: Path
    satellites: str = ""
    """The array of jobs beside it, in the shape ``satellites``."""

    def lines(self) -> list[str]:
        """What ``areal-hpc submit`` prints."""
        beside = [f"satellites {self.satellites}"] if self.satellites else []
        return [f"job {self.job_id}", *beside, f"run {self.run.root}", f"log {self.log}"]


def submit_run(config: Config, main: Callable[[Sequence[str]], int], options: Sequence[str] = ()) -> Submitted:
    """Have Slurm run ``config``; returns when it is in the queue.

    Args:
        main: the command line, which the job calls with ``run``, the configuration and ``options``.

    Raises:
        ConfigError: the shape needs no Slurm, or the processes do not fit on the nodes.
        RunDirError: a job of this run is in the queue already, or somebody submits it at the same moment.
        SubmissionError: Slurm refused; says why.
    """
    require_slurm(config)
    require_room(config)
    config = anchored(config, Path.cwd())
    run = RunDir.create(Path(config.run_root) / config.name)
    room = make_private_directory(run.slurm)
    before = _refuse_queued(run)
    number = _next_submission(room)
    record = room / f"submission-{number:04d}.json"
    owner = Owner.this_process().record()
    if not create_exclusive(record, b"{}"):
        raise RunDirError(f"{run.root} is being submitted by another process; wait for it, or set another `name`")
    copy = room / f"config-{number:04d}.yaml"
    publish(copy, dump(config).encode())
    log = batch_log(run, "%j")
    python = shlex.join([*shlex.split(config.cluster.prefix), python_of_launcher(config.cluster)])
    try:
        job_id = submit(
            job_of(config, log=str(log), directory=Path.cwd(), room=str(room)),
            Launch(main, ("run", str(copy), *options)),
            room,
            python=python,
        )
    except BaseException:
        record.unlink()
        raise
    told = {"job_id": job_id, "satellites": "", "submitter": owner}
    publish_json(record, told)  # from here on the job is there, whatever becomes of its satellites
    try:
        satellites = _submit_satellites(config, run, number, job_id, before)
    except SubmissionError:
        record.unlink()  # the job is cancelled again
        raise
    if satellites:
        publish_json(record, {**told, "satellites": satellites})
    return Submitted(job_id, run, batch_log(run, job_id), satellites)


def _submit_satellites(config: Config, run: RunDir, number: int, job_id: str, before: JobView | None) -> str:
    """Hand in the array of satellites and return its id; those of an earlier submission that are still there will do.

    Raises:
        SubmissionError: Slurm refused; the run's job ``job_id`` is cancelled again.
    """
    if config.cluster.shape is not Shape.SATELLITES:
        return ""
    if before is not None and before.satellites:
        return submitted_satellites(run)
    logs = make_private_directory(satellites_dir(run))
    job = satellite_job(config, log=str(logs / "%A_%a.log"), directory=Path.cwd(), room=str(logs))
    python = shlex.quote(python_on_nodes(config.cluster))
    # They may start before the run's new attempt has, and must not take an old one's end for that of the run.
    past = ["--after", str(newest_epoch(run)), "--wait", f"{config.limits.rejoin_s:g}"]
    script = run.slurm / f"satellites-{number:04d}.sbatch"
    command = join_command(config, python, shlex.join([str(run.root), *past]))
    publish(script, render_satellite(job, command).encode())
    try:
        return submit_script(script, array_options(config, job_id))
    except SubmissionError:
        cancel(job_id)
        raise


def require_room(config: Config) -> None:
    """Raise ConfigError unless every process has a seat."""
    nodes = {one.name: [f"node {number}" for number in range(one.request.nodes)] for one in components_of(config)}
    seats(config, nodes, roles_of(config))
    if config.cluster.shape is Shape.SATELLITES:
        engines_of_node(config, satellite_of(config).gpus)


def _refuse_queued(run: RunDir) -> JobView | None:
    """The run's last job, which has ended; None if there was none.

    Raises:
        RunDirError: a job of the run is in Slurm's queue.
        SubmissionError: that cannot be known.
    """
    view = look(run)
    if view is None or view.is_over:
        return view
    if view.queued is None:
        raise SubmissionError(f"{run.root} was job {view.job_id}, and nobody can say whether it lives: {view.problem}")
    raise RunDirError(
        f"{run.root} is job {view.job_id} in Slurm's queue ({view.queued.state}); stop it with `areal-hpc stop "
        f"{run.root}` or `scancel {view.job_id}`, or set another `name`"
    )


def _next_submission(room: Path) -> int:
    """The number of the next one.

    Raises:
        RunDirError: one is under way.
    """
    numbers = sorted(int(match[1]) for name in os.listdir(room) if (match := SUBMISSION.fullmatch(name)))
    if not numbers:
        return 1
    before = room / f"submission-{numbers[-1]:04d}.json"
    record: dict[str, Any] = read_json(before)
    if "job_id" not in record:
        raise RunDirError(f"{before} tells of a submission under way; remove it if nobody is submitting")
    return numbers[-1] + 1
