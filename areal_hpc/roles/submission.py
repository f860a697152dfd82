"""``areal-hpc submit``: a run handed to Slurm once, from any directory, and never twice at the same time.

run directory/slurm/
  submission-0001.json     who submits; then the job's id, and that of the array of satellites
  config-0001.yaml         what was submitted: later edits of the configuration do not reach a queued job
  1234.log                 the batch script's output, over all requeues of job 1234
  1234/                    the script as sbatch got it, and submitit's files
  satellites-0001.sbatch   the script of each satellite; satellites/1235_1.log is the output of one, and
  satellites/task-1        which job has come in the place of the first, where a site does not requeue
  satellites/resting-9_1   a job that is held while the run is out (resting.py)
  satellites/joined-9_1    a job, or a task of an array, that has had engines for the run
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.buffer.epochs import newest_epoch
from areal_hpc.cluster.components import components_of, engines_of_node, placements, require_slurm, satellite_of
from areal_hpc.cluster.containers import python_of_launcher, python_on_nodes
from areal_hpc.cluster.executor import Launch, submit
from areal_hpc.cluster.hetjob import job_of
from areal_hpc.cluster.jobs import cancel, submit_script
from areal_hpc.cluster.owner import Owner, whence
from areal_hpc.cluster.satellites import array_options, join_command, render_satellite, satellite_job
from areal_hpc.cluster.site import require_startable
from areal_hpc.config.cluster import Shape, SignSockets
from areal_hpc.config.describe import dump
from areal_hpc.config.paths import anchored
from areal_hpc.config.schema import Config
from areal_hpc.errors import RunDirError, SubmissionError
from areal_hpc.fs import create_exclusive, make_private_directory, publish, publish_json
from areal_hpc.liveness.job import (
    JobView,
    Submission,
    batch_log,
    ended_with,
    newest_submission,
    refuse_queued,
    satellites_of,
    submission_of,
    submitted_satellites,
    works_outside,
)
from areal_hpc.liveness.stopping import refuse_living_owner
from areal_hpc.privacy import umask_of
from areal_hpc.roles.launcher import check_resume
from areal_hpc.roles.supervisor import roles_of
from areal_hpc.run_dir import RunDir
from areal_hpc.signing import provide

if TYPE_CHECKING:
    from areal_hpc.cluster.submitted import SubmittedJob


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job in Slurm's queue."""

    job: SubmittedJob
    """submitit's, to wait for, ask and cancel from a program or a notebook (``cluster.submitted``)."""
    run: RunDir
    log: Path
    satellites: str = ""
    """The array of jobs beside it, in the shape ``satellites``."""

    @property
    def job_id(self) -> str:
        return str(self.job.job_id)

    def lines(self) -> list[str]:
        """What ``areal-hpc submit`` prints."""
        beside = [f"satellites {self.satellites}"] if self.satellites else []
        return [f"job {self.job_id}", *beside, f"run {self.run.root}", f"log {self.log}"]


def submit_run(config: Config, main: Callable[[Sequence[str]], int], options: Sequence[str] = ()) -> Submitted:
    """Have Slurm run ``config``; returns when it is in the queue.

    Args:
        main: the command line, which the job calls with ``run``, the configuration and ``options``.

    Raises:
        ConfigError: the shape needs no Slurm, the processes do not fit on the nodes, or this site starts no such job.
        RunDirError: a job of this run is in the queue already, it is at work on some machine, somebody submits it at
            the same moment, or the job would refuse to go on with it.
        SubmissionError: Slurm refused; says why.
    """
    require_slurm(config)
    require_room(config)
    require_startable(config)
    config = anchored(config, Path.cwd())
    run = RunDir.create(Path(config.run_root) / config.name, config.run_group)
    room = make_private_directory(run.slurm)
    this = _next_submission(run)  # before Slurm is asked: a submission that comes to its end meanwhile has this number
    before = refuse_queued(run, takeover="--takeover" in options)
    if "--takeover" not in options and works_outside(run):
        refuse_living_owner(run, newest_epoch(run))
    if "--resume" in options and ended_with(run, before):
        options = (*options, "--takeover")
    check_resume(run, newest_epoch(run), config, "--resume" in options)  # the job would, after days in the queue
    python = shlex.join([*shlex.split(config.cluster.prefix), python_of_launcher(config.cluster)])
    job = job_of(config, log=str(batch_log(run, "%j")), directory=Path.cwd(), room=str(room))
    record, newest = this.path, newest_epoch(run)
    if not create_exclusive(record, b"{}"):
        raise RunDirError(f"{run.root} is being submitted by another process; wait for it, or set another `name`")
    try:
        publish(this.config, dump(config).encode())
        if config.cluster.sign_sockets is not SignSockets.NEVER:
            provide(run.signing, SignSockets.AUTO)  # nodes may have no compiler; the job says what it lacks
        with umask_of(config.run_group):  # of submitit's files, and of the job's output
            submitted = submit(job, Launch(main, ("run", str(this.config), *options)), room, python=python)
    except BaseException:
        record.unlink()
        raise
    submitter = Owner.this_process().record() | whence()
    job_id = str(submitted.job_id)
    told = {"job_id": job_id, "satellites": "", "submitter": submitter, "after": newest}
    publish_json(record, told)  # from here on the job is there, whatever becomes of its satellites
    try:
        satellites = _submit_satellites(config, run, this.number, job_id, before)
    except SubmissionError:
        record.unlink()  # the job is cancelled again
        raise
    if satellites:
        publish_json(record, {**told, "satellites": satellites})
    return Submitted(submitted, run, submitted.paths.stdout, satellites)


def _submit_satellites(config: Config, run: RunDir, number: int, job_id: str, before: JobView | None) -> str:
    """Hand in the array of satellites and return its id; those of an earlier submission that are still there will do.

    Raises:
        SubmissionError: Slurm refused; the run's job ``job_id`` is cancelled again.
    """
    if config.cluster.shape is not Shape.SATELLITES:
        return ""
    if before is not None and set(before.satellites) & set(satellites_of(run)):
        return submitted_satellites(run)
    logs = make_private_directory(run.satellites)
    job = satellite_job(config, log=str(logs / "%A_%a.log"), directory=Path.cwd(), room=str(logs))
    python = shlex.quote(python_on_nodes(config.cluster))
    # They may start before the run's new attempt has, and must not take an old one's end for that of the run.
    past = ["--after", str(newest_epoch(run)), "--wait", f"{config.limits.rejoin_s:g}"]
    script = run.slurm / f"satellites-{number:04d}.sbatch"
    command = join_command(config, python, shlex.join([str(run.root), *past]))
    publish(script, render_satellite(job, command).encode())
    try:
        with umask_of(config.run_group):  # of their output
            return submit_script(script, array_options(config, job_id))
    except SubmissionError:
        cancel([job_id])
        raise


def require_room(config: Config) -> None:
    """Raise ConfigError unless every process has a place."""
    nodes = {one.name: [f"node {number}" for number in range(one.request.nodes)] for one in components_of(config)}
    placements(config, nodes, roles_of(config))
    if config.cluster.shape is Shape.SATELLITES:
        engines_of_node(config, satellite_of(config).gpus)


def _next_submission(run: RunDir) -> Submission:
    """The one to be made.

    Raises:
        RunDirError: one is under way.
    """
    before = newest_submission(run)
    if before is not None and "job_id" not in before.record:
        raise RunDirError(f"{before.path} tells of a submission under way; remove it if nobody is submitting")
    return submission_of(run, before.number + 1 if before else 1)
