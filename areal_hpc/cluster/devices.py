"""Which devices a process gets before its Python starts, and how it is told. Pure functions.

8 devices, 4 trainer ranks, 2 engines of 2 ranks, on one machine

0  1  2  3  |  4  5  |  6  7
trainers       engine 1 engine 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areal_hpc.accelerator import CUDA, NPU, devices_named
from areal_hpc.config.derived import engine_ranks
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError

BINDING = (CUDA.visible_devices, NPU.visible_devices)


def visible_devices(devices: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that bind a process to some of the node's devices before its Python starts.

    Args:
        devices: numbers among those that the job has on this node.
        environment: the step's; where Slurm has bound it to devices, their names are in it.

    Raises:
        ConfigError: Slurm has bound it to fewer than that.
    """
    if not devices:
        return {}
    if bound := [name for name in BINDING if environment.get(name)]:
        return {name: ",".join(_those(name, environment[name], devices)) for name in bound}
    return dict.fromkeys(BINDING, ",".join(map(str, devices)))


def _those(variable: str, given: str, devices: Sequence[int]) -> list[str]:
    """Names of the devices with these numbers."""
    names = devices_named(given)
    if (last := max(devices)) >= len(names):
        raise ConfigError(
            f"{variable}={given} names {len(names)} devices of this node, and a process is to have number {last}, "
            "counted from 0; set cluster.all.gpus, or that of its component, to what Slurm gives of a node, or ask for "
            "more by gres or gpus_per_node"
        )
    return [names[number] for number in devices]


def engine_devices(config: Config, num_devices: int) -> list[tuple[int, ...]]:
    """The devices of each engine on a machine that the whole run has to itself.

    Trainers take theirs from the first on, so engines take theirs from the last on. Where there are too few, engines
    share them with trainers, and then with each other: how much memory an engine may take is ``server_args``' affair,
    and new weights must come by disk (``require_devices_of_their_own``).

    Raises:
        ConfigError: the machine has fewer devices than one engine needs.
    """
    ranks = engine_ranks(config)
    if ranks > num_devices:
        raise ConfigError(
            f"generation.tensor_parallel: an engine needs {ranks} devices, and this machine has {num_devices}; lower "
            "it or generation.pipeline_parallel"
        )
    firsts = [num_devices - ranks * (1 + index % (num_devices // ranks)) for index in range(config.generation.replicas)]
    return [tuple(range(first, first + ranks)) for first in firsts]


def require_devices_of_their_own(engines: Sequence[Sequence[int]]) -> None:
    """Refuse a weight group two of whose members would be on one device: NCCL and HCCL take one from each.

    Args:
        engines: devices of each engine of this machine. On the first of all is the trainer's rank 0, which sends.

    Raises:
        ConfigError: names the two.
    """
    taken = {0: "trainer-0"}
    for index, devices in enumerate(engines):
        for device in devices:
            if device in taken:
                raise ConfigError(
                    f"weights.transport=broadcast: {taken[device]} and generator-{index} would share device {device} "
                    "of this machine, and a collective takes one member from each; set weights.transport=disk (and "
                    "generation.server_args to how much of the memory an engine may take), or lower "
                    "generation.replicas or generation.tensor_parallel"
                )
            taken[device] = f"generator-{index}"
