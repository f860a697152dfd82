"""What goes before a command that is to run in a container, for each runtime that centres have. Pure functions.

runtime      options of srun                         words before the command
none
apptainer                                            apptainer exec --bind ... IMAGE
pyxis        --container-image=IMAGE ...
shifter                                              shifter --image=IMAGE --volume=...

No container has a name: a later job on the node would find what this one has written into it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from areal_hpc.config.cluster import ClusterConfig, ContainerConfig, Runtime


@dataclass(frozen=True, slots=True)
class Wrapping:
    """What a command is wrapped in."""

    srun: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


def _apptainer(container: ContainerConfig, gpus: int) -> Wrapping:
    nvidia = ["--nv"] * (gpus > 0)
    binds = [word for one in container.mounts for word in ("--bind", one)]
    return Wrapping(words=("apptainer", "exec", *nvidia, *binds, *container.args, container.image))


def _pyxis(container: ContainerConfig, gpus: int) -> Wrapping:
    del gpus  # enroot's hooks see which devices there are
    mounts = [f"--container-mounts={','.join(_both_sides(container.mounts))}"] * bool(container.mounts)
    return Wrapping(srun=(f"--container-image={container.image}", *mounts, *container.args))


def _shifter(container: ContainerConfig, gpus: int) -> Wrapping:
    del gpus  # a site's module of shifter brings the driver: cluster.container.args
    volumes = [f"--volume={one}" for one in _both_sides(container.mounts)]
    return Wrapping(words=("shifter", f"--image={container.image}", *volumes, *container.args))


def _both_sides(mounts: Sequence[str]) -> Iterator[str]:
    yield from (one if ":" in one else f"{one}:{one}" for one in mounts)


RUNTIMES: Mapping[Runtime, Callable[[ContainerConfig, int], Wrapping]] = {
    Runtime.NONE: lambda container, gpus: Wrapping(),
    Runtime.APPTAINER: _apptainer,
    Runtime.PYXIS: _pyxis,
    Runtime.SHIFTER: _shifter,
}


def wrapping(container: ContainerConfig, gpus: int) -> Wrapping:
    """What starts a command in the container. ``gpus``: those of a node that the run uses."""
    return RUNTIMES[container.runtime](container, gpus)


def python_on_nodes(cluster: ClusterConfig) -> str:
    """The interpreter of the processes on the nodes."""
    return cluster.python or (sys.executable if cluster.container.runtime is Runtime.NONE else "python")


def python_of_launcher(cluster: ClusterConfig) -> str:
    """The interpreter of the batch script, which no container surrounds."""
    return sys.executable if cluster.container.runtime is not Runtime.NONE else python_on_nodes(cluster)
