"""What Slurm tells a batch script of its job, as data: ``SLURM_*`` to an ``Allocation``. Nothing else reads them.

A heterogeneous job has one group of variables for each component, numbered by a suffix; a plain job has them without.
``AFTER`` is ours: a job hands it to the next one of its chain.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from areal_hpc.cluster.hostlist import expand
from areal_hpc.errors import ConfigError

AFTER = "AREAL_HPC_AFTER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The nodes that one job has."""

    job_id: str
    restarts: int
    """How often Slurm has requeued the job."""
    after: str = ""
    """The job that this one goes on for, where sites do not requeue (hetjob.py)."""
    components: tuple[tuple[str, ...], ...]
    """Names of the nodes of each component of a heterogeneous job; one component of a plain job."""

    @property
    def continues(self) -> bool:
        """Whether the job goes on with a run. Slurm has then ended every process that the run had before."""
        return self.restarts > 0 or bool(self.after)

    @property
    def num_nodes(self) -> int:
        return sum(map(len, self.components))


def in_job(environment: Mapping[str, str]) -> bool:
    """Whether this environment is that of a Slurm job."""
    return "SLURM_JOB_ID" in environment


def job_of(environment: Mapping[str, str]) -> str:
    """The job that a process is in, as squeue lists it: of an array with the number of its task; empty outside."""
    if array := environment.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID", "")


def node_here(environment: Mapping[str, str]) -> str:
    """This machine's name: Slurm's for it, or outside of a job its own."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def allocation(environment: Mapping[str, str]) -> Allocation:
    """The allocation that a batch script with this environment runs in.

    Raises:
        ConfigError: there is none.
    """
    if not in_job(environment):
        raise ConfigError(
            "this is no Slurm job: submit the run with `areal-hpc submit`, or run it on this machine with "
            "cluster.shape=local"
        )
    size = int(environment.get("SLURM_HET_SIZE", "0"))
    suffixes = [f"_HET_GROUP_{group}" for group in range(size)] or [""]
    return Allocation(
        job_id=environment["SLURM_JOB_ID"],
        restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
        after=environment.get(AFTER, ""),
        components=tuple(tuple(expand(environment[f"SLURM_JOB_NODELIST{suffix}"])) for suffix in suffixes),
    )
