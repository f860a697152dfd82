"""How much host memory a node of each component needs, held against what is asked of Slurm, which kills who takes more.

    trainer rank     masters and moments, where a checkpoint copies them to before it writes: of the reference trainer
                     rank 0 alone, of Megatron each rank its share; where there are devices, in pinned memory, of which
                     torch takes for each tensor the next power of two
    engine rank      the model, where an update is put there beside the one that is computed with, or where changes or
                     adapters travel alone, of which the rest of the model must be at hand
    without GPUs     what would be on the device as well

A lower bound: what programs, data and page cache take comes on top.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from areal_hpc.cluster.components import (
    Component,
    components_of,
    engines_of_node,
    num_devices,
    placements,
    satellite_of,
)
from areal_hpc.cluster.estimate import Size, engine_bytes, gib, model_size, trained_parameters, trainer_bytes
from areal_hpc.config.cluster import ComponentConfig, Shape
from areal_hpc.config.derived import takes_whole
from areal_hpc.config.recipes import recipe_of
from areal_hpc.config.schema import Config, Dtype, EngineName, TrainerBackendName, TransportName

MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
UNITS = {"K": 1 << 10, "M": 1 << 20, "": 1 << 20, "G": 1 << 30, "T": 1 << 40}
"""Units of Slurm's --mem; without one it counts megabytes."""
ENGINES = ("generator", "part")


def host_lines(config: Config, roles: Mapping[str, int]) -> Iterator[str]:
    """What the fullest node of each component needs, a line each, and advice where less is asked for; nothing of a
    model whose size is not known.

    Args:
        roles: how many processes of each role there will be.
    """
    size = model_size(config)
    if size is None:
        return
    needs = _needs(config, size, roles)
    for component in [*components_of(config), *_satellite(config)]:
        needed = needs.get(component.name, 0.0)
        if not needed:
            continue
        asked = asked_bytes(component.request, component.gpus)
        known = f", of {gib(asked)} asked for" if asked else ""
        yield f"{'host memory':<13}at least {gib(needed)} GiB on a node of {component.name}{known}"
        if asked is not None and asked < needed:
            key = "generation" if component.name == "satellite" else component.name
            yield (
                f"{'advice':<13}{component.name} gets {gib(asked)} GiB of host memory on a node, and needs "
                f"{gib(needed)} and what programs take besides; raise cluster.{key}.mem, or put fewer processes "
                "on a node"
            )


def _needs(config: Config, size: Size, roles: Mapping[str, int]) -> dict[str, float]:
    """Bytes of the fullest node of each component."""
    components = components_of(config)
    nodes = {one.name: [f"{one.name} {number}" for number in range(one.request.nodes)] for one in components}
    of_node: dict[str, float] = defaultdict(float)
    gpus = {node: one.gpus for one in components for node in nodes[one.name]}
    for (role, index), place in placements(config, nodes, roles).items():
        if role in ENGINES:
            of_node[place.node] += num_devices(config, role) * rank_bytes(config, size, has_gpus=gpus[place.node] > 0)
        elif role == "trainer":
            of_node[place.node] += trainer_rank_bytes(config, size, index, has_gpus=gpus[place.node] > 0)
    found = {one.name: max((of_node[node] for node in nodes[one.name]), default=0.0) for one in components}
    for one in _satellite(config):
        ranks = engines_of_node(config, one.gpus) * num_devices(config, "generator")
        found[one.name] = ranks * rank_bytes(config, size, has_gpus=one.gpus > 0)
    return found


def _satellite(config: Config) -> list[Component]:
    return [satellite_of(config)] if config.cluster.shape is Shape.SATELLITES else []


def rank_bytes(config: Config, size: Size, *, has_gpus: bool) -> float:
    """Host memory of one rank of an engine."""
    on_device = has_gpus and config.generation.backend is not EngineName.EMBEDDED
    width = 2 if config.model.dtype is Dtype.BFLOAT16 else 4
    beside = float(size.parameters * width) if _keeps_a_model(config, on_device=on_device) else 0.0
    return beside + (0.0 if on_device else sum(engine_bytes(config, size)))


def _keeps_a_model(config: Config, *, on_device: bool) -> bool:
    """Whether host memory has a whole model for updates, as each kind of engine has them."""
    adapters = config.model.lora.rank > 0 and not takes_whole(config)
    match config.generation.backend:
        case EngineName.EMBEDDED:
            return not adapters  # of which it computes with two sets
        case EngineName.SGLANG:
            return config.generation.pipeline_parallel == 1 and (adapters or config.weights.delta or not on_device)
        case EngineName.VLLM:  # reads a directory one tensor at a time
            return adapters or config.weights.delta or config.weights.transport is not TransportName.DISK


def trainer_rank_bytes(config: Config, size: Size, rank: int, *, has_gpus: bool) -> float:
    """Host memory of one trainer rank. Adapters, which are small, are taken as they are."""
    whole = size.rounded if has_gpus else size.parameters
    trained = trained_parameters(config, size) if config.model.lora.rank else whole
    critic = whole if recipe_of(config.algorithm.name).critic else 0
    kept = 12.0 * (trained + critic)  # a master and two moments in float32
    if config.trainer.backend is TrainerBackendName.MEGATRON:
        kept /= config.trainer.ranks
    elif rank:
        kept = 0.0
    return kept + (0.0 if has_gpus else sum(trainer_bytes(config, size)))


def asked_bytes(request: ComponentConfig, gpus: int) -> float | None:
    """Memory of a node that Slurm is asked for; None where it gives what it gives, or all."""
    for text, number in ((request.mem, 1), (request.mem_per_cpu, request.cpus), (request.mem_per_gpu, gpus)):
        if (found := MEMORY.fullmatch(text)) and int(found[1]) and number:
            return float(int(found[1]) * UNITS[found[2].upper()] * number)
    return None
