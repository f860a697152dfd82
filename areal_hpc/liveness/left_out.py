"""Nodes that have lost their devices: what runs in a Slurm job goes on without them.

    process               finds none of the devices that it was given, or fewer (``accelerator``), as its log says
    launcher, satellite   ends the others, names the node in the job's directory, and ends with EXIT_ELSEWHERE
    batch script          has its job go on, and leaves out the nodes that are named there (cluster/again.py)

    slurm/avoided-12/n2    of job 12; satellites/avoided-13_1/ of a satellite. It goes along to the next job of a chain

A node has a file of its own, a line for each time: several of one satellite may find at one moment that they have lost
their devices. Slurm may take a job back by itself, such as for another one, before the script has had the node left
out; so a job that gets one again leaves it out anew, once. The next time it is the site that does not let users change
a job that waits, and that job would end there for ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from areal_hpc.cluster.again import AVOIDED
from areal_hpc.cluster.hostlist import expand
from areal_hpc.config.cluster import ComponentConfig
from areal_hpc.errors import NodeLost
from areal_hpc.fs import make_private_directory, names_in, publish
from areal_hpc.run_dir import RunDir

MOST = 32
"""Nodes that one job leaves out at most: where more have lost their devices, it is the site that is to be mended."""
TIMES = 2
"""How often a job leaves the same node out."""
NAME = re.compile(r"avoided-(\d+(?:_\d+)?)")


def leave_out(
    lost: NodeLost, environment: Mapping[str, str], *, requests: Iterable[ComponentConfig], may: bool = True
) -> None:
    """Have the batch script of this job leave the node out.

    Args:
        environment: of a process that the script has started.
        requests: what the job's components ask for.
        may: whether the job may go on once more.

    Raises:
        NodeLost: it cannot; says why, and what to do.
    """
    path = environment.get(AVOIDED)
    if not path:
        raise lost
    room = Path(path)
    before = _times_in(room)
    times = before.get(lost.node, 0)
    if times >= TIMES:
        raise _because(
            lost,
            f"Slurm gave it although it was to be left out {TIMES} times: this site does not let users change a job "
            "that waits; ask its support to drain that node",
        )
    if any(lost.node in expand(one.nodelist) for one in requests if one.nodelist and "/" not in one.nodelist):
        raise _because(lost, "the nodelist of the configuration asks for it; name another")
    if not may or len(before.keys() | {lost.node}) > MOST:
        others = f"after {', '.join(before)} " if before else ""
        raise _because(
            lost, f"{others}it is one too many (limits.attempts, and {MOST} at most); ask your site's support why"
        )
    publish(make_private_directory(room) / lost.node, f"{lost.node}\n".encode() * (times + 1))


def _because(lost: NodeLost, why: str) -> NodeLost:
    what, _, more = str(lost).partition("; ")
    return NodeLost(f"{what}, and {why}; {more}", lost.node)


def _times_in(room: Path) -> dict[str, int]:
    """How often each node has been left out."""
    names = sorted(names_in(room)) if room.name in names_in(room.parent) else []
    nodes = [name for name in names if not name.startswith(".")]  # others are files on their way
    return {node: len((room / node).read_text(encoding="utf-8").split()) for node in nodes}


def left_out(run: RunDir) -> dict[str, list[str]]:
    """Of each submitted job or satellite that leaves nodes out, which."""
    rooms = [room for room in (run.slurm, run.satellites) if room.is_dir()]
    return {
        match[1]: list(_times_in(room / name))
        for room in rooms
        for name in sorted(names_in(room))
        if (match := NAME.fullmatch(name))
    }
