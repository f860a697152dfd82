"""A job's sbatch text: a pure function of what is asked for, proven by the golden files in ``sbatch/``.

    text = render(job_of(config, log=..., directory=...), command)

The script holds no decision about the run. Its one process, the launcher, is on the job's first node; all others are
started by it (``remote.py``). What only a batch script can do is here: it heals a job that Slurm has requeued by half,
and is the one place that requeues.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from areal_hpc.cluster.components import components_of
from areal_hpc.config.cluster import ComponentConfig, Shape
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError
from areal_hpc.exits import EXIT_STOPPED

FLAGS = tuple(
    field.name for field in fields(ComponentConfig) if field.name not in ("nodes", "cpus", "gpus", "exclusive", "raw")
)
"""Fields that are sbatch options of the same name."""

HEAL = """\
# A node that dies under a component of one node takes that component alone back into the queue (Slurm 22.05 to this
# day); the others run on with processes that nobody needs. Components that started apart show it: requeue them all.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  starts=$(scontrol show job -o "$SLURM_JOB_ID" | grep -oE ' StartTime=[^ ]+' | cut -d= -f2 |
    xargs -n1 date +%s -d | sort -n)
  if [ $(($(tail -n1 <<<"$starts") - $(head -n1 <<<"$starts"))) -gt 5 ]; then
    echo "areal-hpc: only a part of this job was requeued; requeueing all of it" >&2
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60
    exit 1
  fi
fi
"""

RUN = """\
# SIGTERM: Slurm ends the job, whatever the reason. {signal}: it soon will, at the time limit or for another job.
ending=""
trap 'ending=term; kill -TERM "$run" 2>/dev/null' TERM
trap 'ending=soon; kill -TERM "$run" 2>/dev/null' {signal}
{command} &
run=$!
while kill -0 "$run" 2>/dev/null; do wait "$run"; done
wait "$run"
code=$?
"""

STOPPED = """\
if [ "$code" -eq {stopped} ]; then  # it has a checkpoint, and there is more to do
  case "$ending" in
    "") code=0 ;;  # a person stopped it
    soon) {again} ;;
  esac
fi
"""
REQUEUE = 'scontrol requeue "$SLURM_JOB_ID" && sleep 60'  # Slurm ends the script meanwhile
TELL = 'echo "areal-hpc: the time is up; go on with areal-hpc submit --resume" >&2'
SIGNAL = "USR1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that sbatch is told."""

    name: str
    components: tuple[ComponentConfig, ...]
    """Complete; one of a plain job."""
    options: tuple[str, ...]
    """Of the whole job, as they stand in the script."""
    setup: tuple[str, ...] = ()
    requeue: bool = True


def job_of(config: Config, *, log: str, directory: Path | None = None) -> Job:
    """What the run asks of Slurm.

    Args:
        log: file of the batch script's output, as sbatch reads it (%j is the job's id).
        directory: absolute path that the script runs in; None leaves it to the directory sbatch is typed in.

    Raises:
        ConfigError: the shape ``split`` cannot give its components what they ask for; names the keys.
    """
    cluster = config.cluster
    options = [f"--output={log}", "--open-mode=append", f"--signal=B:{SIGNAL}@{cluster.signal_lead_s}"]
    options += ["--requeue" if cluster.requeue else "--no-requeue"]
    options += [f"--chdir={directory}"] if directory else []
    for name in ("comment", "dependency", "mail_type", "mail_user"):
        if value := getattr(cluster, name):
            options.append(_option(name, value))
    components = tuple(component.request for component in components_of(config))
    if cluster.shape is Shape.SPLIT:
        components = (_merged(config),)
    return Job(
        name=cluster.job_name or config.name,
        components=components,
        options=tuple(options),
        setup=cluster.setup,
        requeue=cluster.requeue,
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
        "\n".join(f"#SBATCH {option}" for option in _options(job, number)) for number in range(len(job.components))
    ]
    parts = ["#!/bin/bash\n" + "\n#SBATCH hetjob\n".join(blocks), "umask 077"]
    if len(job.components) > 1:
        parts.append(HEAL.rstrip())
    if job.setup:
        parts.append("\n".join(job.setup))
    parts.append(RUN.format(signal=SIGNAL, command=command).rstrip())
    parts.append(STOPPED.format(stopped=EXIT_STOPPED, again=REQUEUE if job.requeue else TELL).rstrip())
    parts.append('exit "$code"')
    return "\n\n".join(parts) + "\n"


def _options(job: Job, number: int) -> Iterator[str]:
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
            yield _option(name, value)
    if request.exclusive:
        yield "--exclusive" if request.exclusive == "yes" else f"--exclusive={request.exclusive}"
    yield from request.raw


def _option(name: str, value: str) -> str:
    return f"--{name.replace('_', '-')}={shlex.quote(value)}"
