"""Satellites as sbatch sees them: an array of small jobs, each of which joins the run, leaves it, and comes again.

    text = render_satellite(satellite_job(config, log=...), join_command(config, [RUN]))
    sbatch --array=1-8 SCRIPT        or, typed:        sbatch --array=1-8 sbatch/satellites.sbatch RUN

Pure functions, as in ``hetjob``; ``sbatch/satellites.sbatch`` is their golden file. Slurm warns every process of the
job before its time limit and when it pre-empts it, and the engines leave. What is pre-empted Slurm requeues by itself;
where a site does not requeue it is gone. At its time limit the script sees to it that a satellite comes again: in the
same job or, where a site does not requeue, in a new one.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from areal_hpc.cluster.components import satellite_of
from areal_hpc.cluster.hetjob import PATIENTLY, Job, options_of, umask_of
from areal_hpc.cluster.steps import on_each_node
from areal_hpc.config.derived import leave_lead_s
from areal_hpc.config.schema import Config
from areal_hpc.exits import EXIT_STOPPED

SCRIPT = """\
# Slurm tells every process of the job when to leave; this shell only when it ends the job, whatever the reason.
ended=""
trap 'ended=yes' TERM
{command} &
run=$!
while kill -0 "$run" 2>/dev/null; do sleep 1; done
wait "$run"
code=$?

if [ "$code" -eq {stopped} ] && [ -z "$ended" ]; then  # its time is over, and the run goes on
{again}
fi

exit "$code"
"""
REQUEUE = """\
  # By the numbers of array and task: the last task's own number is that of the whole array.
  me=$SLURM_JOB_ID
  [ -z "${SLURM_ARRAY_JOB_ID:-}" ] || me=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  patiently scontrol requeue "$me" && sleep 60  # Slurm ends the script meanwhile
"""
SUBMIT = """\
  patiently sbatch --parsable ${SLURM_ARRAY_TASK_ID:+--array=$SLURM_ARRAY_TASK_ID} "$0" "$@" && code=0
"""


def satellite_job(config: Config, *, log: str, directory: Path | None = None) -> Job:
    """What each satellite of the run asks of Slurm; the arguments are those of ``hetjob.job_of``."""
    cluster = config.cluster
    options = [f"--output={log}", "--open-mode=append", f"--signal=TERM@{leave_lead_s(config)}"]
    options += ["--requeue" if cluster.requeue else "--no-requeue"]
    options += [f"--chdir={directory}"] if directory else []
    return Job(
        name=f"{cluster.job_name or config.name}-satellite",
        components=(satellite_of(config).request,),
        options=tuple(options),
        setup=cluster.setup,
        requeue=cluster.requeue,
        umask=umask_of(config),
    )


def join_command(config: Config, python: str, arguments: str) -> str:
    """The shell command that has every node of a satellite join the run; a node that cannot keeps no other from it.

    Args:
        python: the interpreter, a shell word.
        arguments: of ``areal-hpc join``, as they stand in the script.
    """
    container, words = on_each_node(config, satellite_of(config).gpus, [])
    options = "--ntasks-per-node=1 --kill-on-bad-exit=0 --overlap --mpi=none --cpu-bind=none"
    before = shlex.join([*container, *words])
    return " ".join(filter(None, ["srun", options, before, python, "-u -m areal_hpc join", arguments]))


def render_satellite(job: Job, command: str) -> str:
    """The batch script of each satellite.

    Args:
        command: exit code ``EXIT_STOPPED`` means that it was told to leave a run that goes on.
    """
    head = "#!/bin/bash\n" + "\n".join(f"#SBATCH {option}" for option in options_of(job, 0))
    setup = ["\n".join(job.setup)] if job.setup else []
    again = (REQUEUE if job.requeue else SUBMIT).rstrip()
    script = SCRIPT.format(command=command, stopped=EXIT_STOPPED, again=again).rstrip()
    return "\n\n".join([head, f"umask {job.umask}", PATIENTLY.rstrip(), *setup, script]) + "\n"


def array_options(config: Config, trainer_job: str) -> Sequence[str]:
    """What sbatch is told besides the script: how many, and that none is to start before the trainer's job does."""
    return [
        f"--array=1-{config.cluster.satellites}",
        f"--dependency=after:{trainer_job}",
        "--kill-on-invalid-dep=yes",  # else they wait for ever for a job that was cancelled before it began
    ]
