"""A run's configuration as components of a Slurm job, and its processes placed on their nodes. Pure functions.

component    roles
trainer      trainer ranks, evaluator, and the launcher on its first node
generation   engines; on the trainer's nodes with ``share_nodes`` and, besides those that join, with ``satellites``.
             One that needs more GPUs than a node has spans several: a generator on the first, a part on each other
rollout      rollout workers; without nodes of its own they are on the trainer's

What only trains (a replay, an offline algorithm) has the first alone, and what only evaluates the second, with the
evaluator.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal_hpc.config.cluster import ComponentConfig, Shape, inherited
from areal_hpc.config.derived import engine_ranks
from areal_hpc.config.recipes import is_offline
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError

KEYS = {"trainer": "trainer.ranks", "generator": "generation.replicas"}
"""What says how many processes there are that need devices."""
ROLES = {"trainer": ("trainer", "evaluator"), "generation": ("generator", "part"), "rollout": ("rollout",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One component of the job."""

    name: str
    roles: tuple[str, ...]
    request: ComponentConfig
    """Complete: nothing is inherited any more."""

    @property
    def gpus(self) -> int:
        """GPUs of a node that the run may use."""
        if self.request.gpus:
            return self.request.gpus
        asked = self.request.gpus_per_node or self.request.gpus_per_task or _gpus_of(self.request.gres)
        return int(asked.rpartition(":")[2] or 0)


def _gpus_of(gres: str) -> str:
    found = re.search(r"(?:^|,)gpu(?::[^,:()]+)?:(\d+)", gres)
    return found[1] if found else ("1" if re.search(r"(?:^|,)gpu(?:$|,)", gres) else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The node of one process of the run, and its devices there."""

    node: str
    devices: tuple[int, ...] = ()
    """Which of the devices that the job has on the node are its; none where it has no say."""


def require_slurm(config: Config) -> None:
    """Raise ConfigError if the shape asks nothing of Slurm."""
    if config.cluster.shape is Shape.LOCAL:
        raise ConfigError(
            "cluster.shape: local (which deterministic sets) is for `areal-hpc run`, on one machine; set it to het, or "
            "to split where the site has no heterogeneous jobs"
        )


def components_of(config: Config) -> tuple[Component, ...]:
    """The components of a run's job, the launcher's first."""
    cluster = config.cluster
    return tuple(
        Component(name=name, roles=roles, request=inherited(getattr(cluster, name), cluster.all))
        for name, roles in _roles_by_component(config).items()
    )


def _roles_by_component(config: Config) -> Mapping[str, tuple[str, ...]]:
    if config.evaluation.checkpoint:
        return {"generation": (*ROLES["generation"], "evaluator")}
    if config.replay.run or is_offline(config.algorithm):
        return {"trainer": ROLES["trainer"]}
    together = config.cluster.share_nodes or config.cluster.shape is Shape.SATELLITES
    apart = [] if together else ["generation"]
    apart += ["rollout"] if config.cluster.rollout.nodes else []
    with_trainer = tuple(role for name, roles in ROLES.items() if name not in apart for role in roles)
    return {"trainer": with_trainer, **{name: ROLES[name] for name in apart}}


def satellite_of(config: Config) -> Component:
    """What a job of engines asks for that joins the run."""
    request = inherited(config.cluster.generation, config.cluster.all)
    return Component(name="satellite", roles=ROLES["generation"], request=request)


def num_devices(config: Config, role: str) -> int:
    """Devices of its node that one process of a role works on. Raises ConfigError as ``nodes_of_engine``."""
    if role in ROLES["generation"]:
        return engine_ranks(config) // nodes_of_engine(config)
    return 1 if role == "trainer" else 0


def nodes_of_engine(config: Config) -> int:
    """Nodes that each engine of the run's own spans: several where one has fewer GPUs than it needs.

    SGLang gives each node the same number of ranks, and of pipeline stages and nodes the one divides the other.

    Raises:
        ConfigError: it cannot be spread over nodes like these; names the quantity.
    """
    component = next((one for one in components_of(config) if "generator" in one.roles), None)
    ranks, gpus = engine_ranks(config), 0 if component is None else component.gpus
    if component is None or config.cluster.shape is Shape.LOCAL or not gpus or ranks <= gpus:
        return 1
    needs = (
        f"cluster.{component.name}: an engine of {ranks} ranks (generation.tensor_parallel * pipeline_parallel) needs "
        f"more than the {gpus} GPUs of a node"
    )
    if component.name != "generation":
        raise ConfigError(
            f"{needs}, and on the trainer's nodes none spans several; lower it, or set cluster.share_nodes=false and "
            "cluster.shape to het or split"
        )
    if ranks % gpus:
        raise ConfigError(
            f"{needs}, and they do not divide its {ranks} ranks; set generation.tensor_parallel to a multiple of "
            f"{gpus}, or cluster.generation.gpus to a divisor of {ranks}"
        )
    nodes, stages = ranks // gpus, config.generation.pipeline_parallel
    if nodes % stages and stages % nodes:
        raise ConfigError(
            f"{needs}, so {nodes} of them, on which {stages} stages cannot be spread evenly; set "
            f"generation.pipeline_parallel to a multiple or a divisor of {nodes}"
        )
    return nodes


def num_parts(config: Config) -> int:
    """Processes that hold parts of engines which span several nodes, besides the engines' generators."""
    engines = config.generation.replicas
    return engines * (nodes_of_engine(config) - 1) if engines else 0


def engine_of_part(config: Config, part: int) -> tuple[int, int]:
    """The index of the engine that a part is of, and the rank of its node there: 1 and above."""
    engine, rank = divmod(part, nodes_of_engine(config) - 1)
    return engine, 1 + rank


def engines_of_node(config: Config, num_gpus: int) -> int:
    """Engines that a satellite's node runs on so many GPUs: one where there are none.

    Raises:
        ConfigError: they are too few for one.
    """
    size = engine_ranks(config)
    if num_gpus and num_gpus < size:
        raise ConfigError(
            f"an engine needs {size} GPUs of one node, and a satellite has {num_gpus}; ask for more in "
            "cluster.generation, or lower generation.tensor_parallel. Only engines of the run's own job span nodes"
        )
    return num_gpus // size if num_gpus else 1


def divide(config: Config, allocated: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The nodes of each component, by its name.

    Args:
        allocated: the nodes of the job's components; all in one component for the shape ``split``.

    Raises:
        ConfigError: the job has other nodes than the configuration asks for.
    """
    components = components_of(config)
    sizes = [component.request.nodes for component in components]
    if config.cluster.shape is Shape.SPLIT and sum(map(len, allocated)) == sum(sizes):
        every = iter(allocated[0])
        allocated = [list(itertools.islice(every, size)) for size in sizes]
    found = [len(nodes) for nodes in allocated]
    if found != sizes:
        wanted = ", ".join(f"{component.name} {size}" for component, size in zip(components, sizes, strict=True))
        raise ConfigError(
            f"cluster.shape {config.cluster.shape}: the job has components of {found} nodes, and the configuration "
            f"asks for {wanted}; submit it anew with `areal-hpc submit`, set cluster.shape=split for a plain job of "
            "that many nodes, or cluster.shape=local for this node alone"
        )
    return {component.name: tuple(nodes) for component, nodes in zip(components, allocated, strict=True)}


def placements(
    config: Config, nodes: Mapping[str, Sequence[str]], roles: Mapping[str, int]
) -> dict[tuple[str, int], Placement]:
    """Which node, and which of its devices, each process gets: in blocks, as even as can be.

    Args:
        nodes: of each component.
        roles: number of processes of each role.

    Raises:
        ConfigError: there are too few nodes, or a node has fewer GPUs than its processes need; names what is missing.
    """
    found: dict[tuple[str, int], Placement] = {}
    for component in components_of(config):
        where = nodes[component.name]
        taken = dict.fromkeys(where, 0)
        for role in component.roles:
            placed = _nodes_of_role(config, role, roles.get(role, 0), where)
            needed = num_devices(config, role) if component.gpus and placed else 0
            for index, node in enumerate(placed):
                devices = tuple(range(taken[node], taken[node] + needed))
                taken[node] += needed
                found[role, index] = Placement(node=node, devices=devices)
        short = {node: number for node, number in taken.items() if number > component.gpus}
        if short:
            node, number = next(iter(short.items()))
            raise ConfigError(
                f"cluster.{component.name}: {number} GPUs are needed on {node}, and {component.gpus} are asked for on "
                "each node; ask for more nodes or GPUs, or lower "
                f"{' or '.join(KEYS[role] for role in component.roles if role in KEYS and roles.get(role))}"
            )
    return found


def _nodes_of_role(config: Config, role: str, count: int, where: Sequence[str]) -> list[str]:
    """The node of each of a role's ``count`` processes.

    Raises:
        ConfigError: they are too few for engines that span several.
    """
    if role not in ROLES["generation"] or count == 0 or (span := nodes_of_engine(config)) == 1:
        shared = count >= len(where)
        return [where[index * len(where) // count] if shared else where[index] for index in range(count)]
    if (needed := span * config.generation.replicas) > len(where):
        raise ConfigError(
            f"cluster.generation.nodes: {config.generation.replicas} engines (generation.replicas) of {span} nodes "
            f"each need {needed}, and there are {len(where)}; ask for more, or lower generation.replicas"
        )
    places = [(index, 0) if role == "generator" else engine_of_part(config, index) for index in range(count)]
    return [where[engine * span + rank] for engine, rank in places]
