"""What a site's Slurm says of itself, as far as it decides whether a run can ever start there.

A heterogeneous job that a site cannot start is the one thing that sbatch may take all the same, and then let wait for
ever: its components are held against the nodes one by one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping

from areal_hpc.cluster.components import components_of
from areal_hpc.cluster.jobs import ask
from areal_hpc.config.cluster import Shape
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError

BACKFILL = "sched/backfill"
DEFAULT = "*"
"""What sinfo puts behind the name of the partition that is taken where none is named."""
Partitions = Mapping[str, Collection[str]]
"""Partition to the names of its nodes; the default one also under ``DEFAULT``."""


def require_startable(config: Config) -> None:
    """Ask Slurm, where there is one, whether the run's job is one that it can ever start.

    Raises:
        ConfigError: the job is heterogeneous, and it can not; says why, and what can.
        SubmissionError: Slurm does not answer in time.
    """
    if config.cluster.shape is not Shape.HET or len(components_of(config)) == 1 or shutil.which("scontrol") is None:
        return
    if problem := het_problem(config, settings(ask(["scontrol", "show", "config"]).stdout), partitions()):
        raise ConfigError(f"cluster.shape: {problem}")


def settings(said: str) -> dict[str, str]:
    """`scontrol show config` as keys and values; empty if it failed."""
    return dict(re.findall(r"^(\S+)\s*=\s*(.*?)\s*$", said, re.MULTILINE))


def partitions() -> Partitions:
    """The site's partitions and their nodes; empty if Slurm does not say."""
    found: dict[str, set[str]] = {}
    for line in ask(["sinfo", "--noheader", "--Node", "--format", "%P|%N"]).stdout.split():
        partition, _, node = line.partition("|")
        for name in {partition.removesuffix(DEFAULT), *([DEFAULT] if partition.endswith(DEFAULT) else [])}:
            found.setdefault(name, set()).add(node)
    return found


def het_problem(config: Config, facts: Mapping[str, str], there: Partitions) -> str:
    """Why a heterogeneous job of this run never starts, and what does; empty if nothing is known against it.

    Args:
        facts: the site's settings.
        there: its nodes; a partition that is not among them is not judged.
    """
    scheduler = facts.get("SchedulerType", BACKFILL)
    if scheduler != BACKFILL:
        return f"this site has no heterogeneous jobs (SchedulerType {scheduler}); set cluster.shape=split"
    requests = [component.request for component in components_of(config)]
    named = [name for request in requests for name in (request.partition or DEFAULT).split(",")]
    if any(name not in there for name in named):
        return ""
    nodes = {node for name in named for node in there[name]}
    needed = sum(request.nodes for request in requests)
    if needed <= len(nodes):
        return ""
    what = ", ".join(component.name for component in components_of(config))
    return (
        f"a heterogeneous job has other nodes for each component ({what}), {needed} in all; there are {len(nodes)}; "
        "set cluster.shape=split and cluster.share_nodes=true, or name other partitions"
    )
