"""What a run will ask for and where everybody will sit, in words; nothing is submitted, no device is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from areal_hpc.cluster.components import (
    Component,
    components_of,
    engines_of_node,
    nodes_of_engine,
    placements,
    require_slurm,
    satellite_of,
)
from areal_hpc.cluster.hetjob import FLAGS
from areal_hpc.config.cluster import Shape, seconds_of
from areal_hpc.config.derived import engine_ranks, model_ranks
from areal_hpc.config.schema import Config


def plan_lines(config: Config, roles: Mapping[str, int]) -> Iterator[str]:
    """The plan, a line at a time.

    Args:
        roles: how many processes of each role there will be.

    Raises:
        ConfigError: it cannot be; names the quantity that is missing.
    """
    require_slurm(config)
    components = components_of(config)
    nodes = {one.name: _imagined(one) for one in components}
    placed = placements(config, nodes, roles)
    yield f"shape        {config.cluster.shape}: {sum(map(len, nodes.values()))} nodes in {len(components)} components"
    for one in components:
        yield f"{one.name:<12} {', '.join(_asked(one))}"
        for node in nodes[one.name]:
            here = [(key, place) for key, place in placed.items() if place.node == node]
            yield f"  {node:<20} " + (", ".join(_named(*key, place.devices) for key, place in here) or "nobody")
    if config.cluster.shape is Shape.SATELLITES:
        yield from _satellites(config)
    ranks = config.trainer.ranks
    yield f"world        {ranks} trainer ranks, data parallel {ranks // model_ranks(config)}"
    span = nodes_of_engine(config) if roles.get("part") else 1
    over = f" of {span} nodes, its generator on the first and a part on each other" if span > 1 else ""
    yield f"engines      {config.generation.replicas}, each on {engine_ranks(config)} devices{over}"
    taken = {place.node for place in placed.values()}
    for one in components:
        if idle := [node for node in nodes[one.name] if node not in taken]:
            yield f"advice       {_about_idle(one, idle, span)}"


def _about_idle(component: Component, idle: Sequence[str], span: int) -> str:
    """What to do about nodes on which nobody would sit. ``span``: nodes of an engine."""
    used = component.request.nodes - len(idle)
    fewer = f"lower cluster.{component.name}.nodes to {used}"
    more = len(idle) // span if "generator" in component.roles else 0
    return f"nobody would be on {', '.join(idle)}; {fewer}" + (
        f", or raise generation.replicas by {more}" if more else ""
    )


def _satellites(config: Config) -> Iterator[str]:
    """The jobs beside the run's own.

    Raises:
        ConfigError: a node of theirs has fewer GPUs than an engine needs.
    """
    one, count = satellite_of(config), config.cluster.satellites
    yield f"satellites   {count} {'job' if count == 1 else 'jobs'} that come and go, each: {', '.join(_asked(one))}"
    engines = engines_of_node(config, one.gpus)
    where = f" on {engine_ranks(config)} GPUs each" if one.gpus else ""
    yield f"  {'every node':<20} {engines} {'engine' if engines == 1 else 'engines'}{where}"


def _imagined(component: Component) -> tuple[str, ...]:
    return tuple(f"{component.name}-node-{number}" for number in range(component.request.nodes))


def _asked(component: Component) -> Iterator[str]:
    request = component.request
    yield f"nodes={request.nodes}"
    if request.cpus:
        yield f"cpus={request.cpus}"
    for name in FLAGS:
        if value := getattr(request, name):
            yield f"{name.replace('_', '-')}={value}" + (_length(value) if name == "time" else "")
    if request.exclusive:
        yield "whole nodes"
    yield from request.raw


def _length(limit: str) -> str:
    """A time limit in words: Slurm's 1:30 is less than many take it for."""
    seconds = seconds_of(limit)
    if seconds is None:
        return ""
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    amounts = {"d": days, "h": hours, "min": minutes, "s": seconds % 60}
    return f" ({' '.join(f'{amount} {unit}' for unit, amount in amounts.items() if amount)})"


def _named(role: str, index: int, devices: tuple[int, ...]) -> str:
    return f"{role}-{index}" + (f" on GPU {','.join(map(str, devices))}" if devices else "")
