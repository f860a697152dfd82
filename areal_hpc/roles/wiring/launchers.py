"""Which launcher starts a run's processes: those of this machine, or of the nodes of the Slurm job that we are in."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping

from areal_hpc import accelerator
from areal_hpc.cluster.components import components_of, divide, placements
from areal_hpc.cluster.containers import python_on_nodes
from areal_hpc.cluster.devices import engine_devices, require_devices_of_their_own, visible_devices
from areal_hpc.cluster.environment import allocation
from areal_hpc.cluster.local import Key, LocalLauncher
from areal_hpc.cluster.remote import RemoteLauncher
from areal_hpc.cluster.steps import step_commands
from areal_hpc.config.cluster import Shape
from areal_hpc.config.schema import Config, EngineName, TransportName
from areal_hpc.fs import publish_json
from areal_hpc.run_dir import RunDir


def make_launcher(config: Config, run: RunDir, epoch: int, roles: Mapping[str, int]) -> LocalLauncher | RemoteLauncher:
    """The launcher of attempt ``epoch``.

    Args:
        roles: how many processes of each role there will be.

    Raises:
        ConfigError: the shape needs a Slurm job, and this is none or has other nodes; or this machine has fewer devices
            than an engine needs, or than new weights need to be broadcast.
        AttemptFailed: a node of the job does not answer.
    """
    if config.cluster.shape is Shape.LOCAL:
        return LocalLauncher.of(config, run, epoch, own_variables=_bound_engines(config, roles))
    job = allocation(os.environ)
    nodes = divide(config, job.components)
    placed = placements(config, nodes, roles)
    gpus = {component.name: component.gpus for component in components_of(config)}
    devices = Counter[str]()
    for (role, _), place in placed.items():
        devices["generator" if role == "part" else role] += len(place.devices)
    record = {"job_id": job.job_id, "restarts": job.restarts, "after": job.after, "nodes": nodes, "gpus": gpus}
    publish_json(run.attempt(epoch).job, {**record, "devices": devices, "time": time.time()})
    agent = [python_on_nodes(config.cluster), "-m", "areal_hpc.cluster.agent", str(run.root), str(epoch)]
    steps = step_commands(config, job, nodes, agent)
    return RemoteLauncher(run, epoch, steps, placed, config.limits.start_s)


def _bound_engines(config: Config, roles: Mapping[str, int]) -> dict[Key, Mapping[str, str]]:
    """What binds each engine to devices of this machine: without it all would take the first. Nothing on a CPU."""
    if not roles.get("generator") or not (num_devices := devices_here(config)):
        return {}
    devices = engine_devices(config, num_devices)
    if roles.get("trainer") and config.weights.transport is TransportName.BROADCAST:
        require_devices_of_their_own(devices)
    return {("generator", index): visible_devices(one, os.environ) for index, one in enumerate(devices)}


def devices_here(config: Config) -> int:
    """Devices of this machine that its engines share; 0 where they compute on the CPU."""
    if config.generation.backend is EngineName.EMBEDDED or accelerator.detect() is accelerator.CPU:
        return 0
    import torch

    return torch.accelerator.device_count()
