"""A job's sbatch text: a pure function of what is asked for, proven by the golden files in ``sbatch/``.

    text = render(job_of(config, log=..., directory=...), command)

The script holds no decision about the run. Its one process, the launcher, is on the job's first node; all others are
started by it (``remote.py``). What only a batch script can do is here: it heals a job that Slurm has requeued by half,
and is the one place that lets a run go on after its time, or without a node that has failed it: in the same job, or
where a site does not requeue in the next one of a chain, which has the same script and waits for the end of this job
(``again``).
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from areal_hpc.cluster.again import render_again
from areal_hpc.cluster.components import components_of
from areal_hpc.cluster.environment import AFTER
from areal_hpc.config.cluster import ComponentConfig, Shape
from areal_hpc.config.derived import signal_lead_s
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError
from areal_hpc.exits import EXIT_ELSEWHERE, EXIT_STOPPED
from areal_hpc.privacy import umask_for

FLAGS = tuple(
    field.name for field in fields(ComponentConfig) if field.name not in ("nodes", "cpus", "gpus", "exclusive", "raw")
)
"""Fields that are sbatch options of the same name."""

PATIENTLY = """\
# A controller that does not answer for some minutes must not end a run of weeks.
patiently() {
  local said
  for _ in {1..60}; do
    if said=$("$@" 2>&1); then echo "$said"; return 0; fi
    echo "areal-hpc: $1: $said" >&2
    grep -qiE 'contact slurm|timed out|unexpected message|connection|zero bytes' <<<"$said" || return 1
    sleep 5
  done
  return 1
}
"""

HEAL = """\
# A node that dies under a component of one node takes that component alone back into the queue (Slurm 22.05 to this
# day); the others run on with processes that nobody needs. Components that started apart show it: requeue them all.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  starts=$(scontrol show job -o "$SLURM_JOB_ID" | grep -oE ' StartTime=[^ ]+' | cut -d= -f2 |
    xargs -n1 date +%s -d | sort -n)
  if [ $(($(tail -n1 <<<"$starts") - $(head -n1 <<<"$starts"))) -gt 5 ]; then
    echo "areal-hpc: only a part of this job was requeued; requeueing all of it" >&2
    patiently scontrol requeue "$SLURM_JOB_ID"
    sleep 60
    exit 1
  fi
fi
"""

RUN = """\
# {signal}: the job's end is near, at its time limit or for another job. SIGTERM: it ends now, and no signal tells why;
# Slurm does. At a time limit of which nobody was warned only seconds are left: what is to follow is asked for at once.
ending=""
ends_now() {{
  kill -TERM "$run" 2>/dev/null
  ending={term}
  patiently scontrol show job -o "$me" | grep -qE ' ({cut_off})' && again
}}
trap ends_now TERM
trap 'ending=soon; kill -TERM "$run" 2>/dev/null' {signal}
{command} &
run=$!
while kill -0 "$run" 2>/dev/null; do  # of two signals that come at once, bash's `wait` loses one
  sleep 1
  [ -z "$ending" ] || kill -TERM "$run" 2>/dev/null  # again: it may not have heard while it came up
done
wait "$run"
code=$?
# It has a checkpoint, and more to do; or it was still coming up, and did not hear; or a node has failed it.
case "$ending:$code" in
  soon:{stopped} | soon:{unheard} | soon:{elsewhere} | :{elsewhere}) again && {then} ;;
esac
exit "$code"
"""
HANDOVER = """\
  cp -r {room}/"$me" {room}/"$asked"
  mv {room}/"$asked/${{me}}_submitted.pkl" {room}/"$asked/${{asked}}_submitted.pkl"
"""
"""Where submitit of the next job will look for what it is to run; the directory's name also tells that there is one."""
CUT_OFF = {True: "Reason=TimeLimit", False: "Reason=TimeLimit|Reason=NodeDown|PreemptTime=[0-9]"}
"""What `scontrol show job` says of a job that has ended and that nobody else lets go on, by whether Slurm requeues."""
CODES = {"stopped": EXIT_STOPPED, "unheard": 128 + signal.SIGTERM, "elsewhere": EXIT_ELSEWHERE}
"""Of a run, or of engines, that have more to do: what they end with where they were told to, what a shell makes of
their end where it came before they had a handler for it, and what they end with where a node has failed them."""
SIGNAL = "USR1"
THEN = {True: """{ [ "$ending" = term ] || sleep 60; }""", False: "code=0"}
"""What a script does that has seen to it that its job goes on, by whether Slurm requeues: that ends a script whose job
it has taken back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that sbatch is told."""

    name: str
    components: tuple[ComponentConfig, ...]
    """Complete; one of a plain job."""
    options: tuple[str, ...]
    """Options of the whole job, as they stand in the script."""
    setup: tuple[str, ...] = ()
    requeue: bool = True
    """Go on in the same job; else in the next one of a chain."""
    umask: int = 0o077
    room: str = ""
    """Directory in which submitit has one for each job, named by its id, or in which satellites say which job comes
    next; empty for a script that a person types."""


def log_of(room: Path, job_id: str) -> Path:
    """The output of a submitted job's batch script, over all its requeues; ``room`` as of ``Job``."""
    return room / f"{job_id}.log"


def job_of(config: Config, *, log: str, directory: Path | None = None, room: str = "") -> Job:
    """What the run asks of Slurm.

    Args:
        log: file of the batch script's output, as sbatch reads it (%j is the job's id).
        room: see ``Job``.
        directory: absolute path that the script runs in; None leaves it to the directory sbatch is typed in.

    Raises:
        ConfigError: the shape ``split`` cannot give its components what they ask for; names the keys.
    """
    cluster = config.cluster
    options = [option("output", log), "--open-mode=append", f"--signal=B:{SIGNAL}@{signal_lead_s(config)}"]
    options += ["--requeue" if cluster.requeue else "--no-requeue"]
    options += [option("chdir", str(directory))] if directory else []
    for name in ("comment", "dependency", "mail_type", "mail_user"):
        if value := getattr(cluster, name):
            options.append(option(name, value))
    if cluster.dependency:
        options.append("--kill-on-invalid-dep=yes")  # else a job whose turn never comes waits for ever
    components = tuple(component.request for component in components_of(config))
    if cluster.shape is Shape.SPLIT:
        components = (_merged(config),)
    return Job(
        name=cluster.job_name or config.name,
        components=components,
        options=tuple(options),
        setup=cluster.setup,
        requeue=cluster.requeue,
        umask=umask_for(config.run_group),
        room=room,
    )


def _merged(config: Config) -> ComponentConfig:
    """The one component of a plain job: as many nodes as all together, which must ask for the same."""
    components = components_of(config)
    first = components[0].request
    wrong = {
        f"cluster.{component.name}.{field.name}"
        for component in components[1:]
        for field in fields(ComponentConfig)
        if field.name != "nodes" and getattr(component.request, field.name) != getattr(first, field.name)
    }
    if wrong:
        raise ConfigError(
            f"cluster.shape: the nodes of a plain job are all alike, so {', '.join(sorted(wrong))} cannot differ; "
            "say it in cluster.all, or choose cluster.shape=het"
        )
    total = sum(component.request.nodes for component in components)
    return replace(first, nodes=total)


def render(job: Job, command: str) -> str:
    """The batch script.

    Args:
        command: a shell command, the run's launcher; exit code ``EXIT_STOPPED`` means that it stopped with more to do.
    """
    blocks = [
        "\n".join(f"#SBATCH {option}" for option in options_of(job, number)) for number in range(len(job.components))
    ]
    parts = ["#!/bin/bash\n" + "\n#SBATCH hetjob\n".join(blocks), f"umask {job.umask:03o}", PATIENTLY.rstrip()]
    if len(job.components) > 1:
        parts.append(HEAL.rstrip())
    if job.setup:
        parts.append("\n".join(job.setup))
    parts.append(_again(job).rstrip())
    # Slurm itself requeues what it pre-empts; a chain it does not know, and a person's cancel gives no warning first.
    term = "term" if job.requeue else "${ending:-term}"
    about = {"signal": SIGNAL, "term": term, **CODES, "then": THEN[job.requeue], "cut_off": CUT_OFF[job.requeue]}
    parts.append(RUN.format(command=command, **about).rstrip())
    return "\n\n".join(parts) + "\n"


def _again(job: Job) -> str:
    """The function by which the run goes on after its time."""
    return render_again(
        requeue=job.requeue,
        room=job.room,
        options=f'--dependency="afterany:$me" --export="ALL,{AFTER}=$me"',
        handover=HANDOVER.format(room=shlex.quote(job.room)) if job.room else "",
        said="job $asked goes on when this one has ended",
    )


def options_of(job: Job, number: int) -> Iterator[str]:
    """One component's options. What is the whole job's stands in the first, which is the leader: a dependency of
    several components on a name they share would wait for itself."""
    request = job.components[number]
    yield f"--job-name={shlex.quote(job.name if number == 0 else f'{job.name}-{number}')}"
    if number == 0:
        yield from job.options
    yield f"--nodes={request.nodes}"
    yield "--ntasks-per-node=1"
    if request.cpus:
        yield f"--cpus-per-task={request.cpus}"
    for name in FLAGS:
        if value := getattr(request, name):
            yield option(name, value)
    if request.exclusive:
        yield "--exclusive" if request.exclusive == "yes" else f"--exclusive={request.exclusive}"
    yield from request.raw


def option(name: str, value: str) -> str:
    """An option of sbatch; its value, which may be a path with spaces, stays one word."""
    return f"--{name.replace('_', '-')}={shlex.quote(value)}"
