"""What a site's Slurm says of itself, as far as it decides whether a run can ever start there.

A heterogeneous job that a site cannot start is the one thing that sbatch may take all the same, and then let wait for
ever: its components are held against the nodes one by one. An array that is too large is refused only when the run's
own job is in the queue already, and in words that do not tell how many would do.
"""

from __future__ import annotations

import os
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
ELSEWHERE = ("--partition", "-p", "--clusters", "-M")
"""Options of sbatch that, given as they are, take a component to other nodes."""
WINS = "SBATCH_PARTITION"
"""In the environment this is stronger than what a batch script says (sbatch(1))."""
Partitions = Mapping[str, Collection[str]]
"""Partition to the names of its nodes; the default one also under ``DEFAULT``."""


def require_startable(config: Config) -> None:
    """Ask Slurm, where there is one, whether it can ever start the run's job and the array beside it.

    Raises:
        ConfigError: it can not; says why, and what it can.
        SubmissionError: Slurm does not answer in time.
    """
    shape = config.cluster.shape
    is_het = shape is Shape.HET and len(components_of(config)) > 1
    if not (is_het or shape is Shape.SATELLITES) or shutil.which("scontrol") is None:
        return
    facts = settings(ask(["scontrol", "show", "config"]).stdout)
    if is_het and (problem := het_problem(config, facts, partitions())):
        raise ConfigError(f"cluster.shape: {problem}")
    if shape is Shape.SATELLITES and (problem := array_problem(config, facts)):
        raise ConfigError(f"cluster.satellites: {problem}")


def settings(said: str) -> dict[str, str]:
    """`scontrol show config` as keys and values; empty if it failed."""
    return dict(re.findall(r"^(\S+)\s*=\s*(.*?)\s*$", said, re.MULTILINE))


def partitions() -> Partitions:
    """The site's partitions and their nodes; empty if Slurm does not say, or what the script says does not count."""
    if os.environ.get(WINS):
        return {}
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
        there: its nodes; a partition that is not among them is not judged, nor one that is said in other ways.
    """
    scheduler = facts.get("SchedulerType", BACKFILL)
    if scheduler != BACKFILL:
        return f"this site has no heterogeneous jobs (SchedulerType {scheduler}); set cluster.shape=split"
    requests = [component.request for component in components_of(config)]
    named = [name for request in requests for name in (request.partition or DEFAULT).split(",")]
    elsewhere = any(word.startswith(ELSEWHERE) for request in requests for word in request.raw)
    if elsewhere or any(name not in there for name in named):
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


def array_problem(config: Config, facts: Mapping[str, str]) -> str:
    """Why the array of satellites is too large; empty if it is not, or nobody knows. A task's number, which begins at
    1, must be below MaxArraySize (slurm.conf(5))."""
    largest = facts.get("MaxArraySize", "")
    if not largest.isdigit() or config.cluster.satellites < int(largest):
        return ""
    return f"{config.cluster.satellites} are more than an array of this site has (MaxArraySize {largest}); lower it"
