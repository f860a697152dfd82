"""Satellites as sbatch sees them: an array of small jobs, each of which joins the run, leaves it, and comes again.

    text = render_satellite(satellite_job(config, log=...), join_command(config, [RUN]))
    sbatch --array=1-8 SCRIPT        or, typed:        sbatch --array=1-8 sbatch/satellites.sbatch RUN

Pure functions, as in ``hetjob``; ``sbatch/satellites.sbatch`` is their golden file. Slurm warns every process of the
job before its time limit and when it pre-empts it, and the engines leave. What is pre-empted Slurm requeues by itself.
Where a site does not requeue, and at the time limit anywhere, the script sees to it that a satellite comes again: in
the same job, or in a new one. So it does with one that nobody needs now, since the run itself is out: that comes again
held, and the run lets it go when it is there again (``resting`` of the roles). Each has one successor at most, and none
once the run has ended, so that there are never more of them than were asked for.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from areal_hpc.cluster.again import render_again
from areal_hpc.cluster.components import satellite_of
from areal_hpc.cluster.hetjob import CODES, CUT_OFF, PATIENTLY, THEN, Job, option, options_of
from areal_hpc.cluster.steps import on_each_node
from areal_hpc.config.derived import leave_lead_s
from areal_hpc.config.schema import Config
from areal_hpc.exits import EXIT_UNNEEDED
from areal_hpc.privacy import umask_for

RECORD = """\
  echo "$asked" >{room}/task-"${{SLURM_ARRAY_TASK_ID:-0}}"
  [ $# -eq 0 ] || mv {room}/resting-"$me" {room}/resting-"$asked${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}" ||
    patiently scancel "$asked"  # the run has ended, and has taken the name away
"""
"""Where status and stop look for the newest job of each task, and the run for those that it is to let go."""
SCRIPT = """\
# Slurm tells every process of the job when to leave; this shell only when it ends the job, and then why it does.
ending=""
ends_now() {{
  ending=term
  patiently scontrol show job -o "$me" | grep -qE ' ({cut_off})' && again
}}
trap ends_now TERM
{command} &
run=$!
while kill -0 "$run" 2>/dev/null; do sleep 1; done
wait "$run"
code=$?
[ -z "$ending" ] && case "$code" in
  # Its time is over, and the run goes on; or it did not hear yet; or its node has failed it.
  {stopped} | {unheard} | {elsewhere}) again && {then} ;;
  # The run is out, and lets it go when it is there again.
  {unneeded}) {rest} && {then} ;;
esac
exit "$code"
"""


def satellite_job(config: Config, *, log: str, directory: Path | None = None, room: str = "") -> Job:
    """What each satellite of the run asks of Slurm.

    Args:
        log, directory: those of ``hetjob.job_of``.
        room: directory that tells of each task's newest job; empty for a script that a person types.
    """
    cluster = config.cluster
    options = [option("output", log), "--open-mode=append", f"--signal=TERM@{leave_lead_s(config)}"]
    options += ["--requeue" if cluster.requeue else "--no-requeue"]
    options += [option("chdir", str(directory))] if directory else []
    return Job(
        name=f"{cluster.job_name or config.name}-satellite",
        components=(satellite_of(config).request,),
        options=tuple(options),
        setup=cluster.setup,
        requeue=cluster.requeue,
        umask=umask_for(config.run_group),
        room=room,
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
    return " ".join(filter(None, ["srun", options, before, python, "-u -m areal_hpc join --rest", arguments]))


def render_satellite(job: Job, command: str) -> str:
    """The batch script of each satellite.

    Args:
        command: exit code ``EXIT_STOPPED`` means that it was told to leave a run that goes on, ``EXIT_UNNEEDED`` that
            the run is out.
    """
    head = "#!/bin/bash\n" + "\n".join(f"#SBATCH {option}" for option in options_of(job, 0))
    setup = ["\n".join(job.setup)] if job.setup else []
    rest = "again requeuehold" if job.requeue else "again --hold"
    ways = {"rest": rest, "then": THEN[job.requeue], "cut_off": CUT_OFF[job.requeue]}
    script = SCRIPT.format(command=command, **ways, **CODES, unneeded=EXIT_UNNEEDED)
    parts = [head, f"umask {job.umask:03o}", PATIENTLY, *setup, _again(job), script]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _again(job: Job) -> str:
    """The function by which a satellite comes again."""
    return render_again(
        requeue=job.requeue,
        room=job.room,
        options="${SLURM_ARRAY_TASK_ID:+--array=$SLURM_ARRAY_TASK_ID}",
        handover=RECORD.format(room=shlex.quote(job.room)) if job.room else "",
        said="$me is over, and job $asked serves the run in its place",
    )


def array_options(config: Config, trainer_job: str) -> Sequence[str]:
    """What sbatch is told besides the script: how many, and that none is to start before the trainer's job does."""
    return [
        f"--array=1-{config.cluster.satellites}",
        f"--dependency=after:{trainer_job}",
        "--kill-on-invalid-dep=yes",  # else they wait for ever for a job that was cancelled before it began
    ]
