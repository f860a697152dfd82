"""The srun commands that put an agent on every node of a job: one step a component. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from areal_hpc.cluster.components import Component, components_of
from areal_hpc.cluster.containers import wrapping
from areal_hpc.cluster.environment import Allocation
from areal_hpc.config.schema import Config

Step = tuple[Sequence[str], Sequence[str]]
"""A command, and the nodes it puts a task on."""


def step_commands(
    config: Config, job: Allocation, nodes: Mapping[str, Sequence[str]], agent: Sequence[str]
) -> list[Step]:
    """The steps of a job.

    Args:
        nodes: of each component of the run, by its name.
        agent: the command of one task, without what goes before it on this site.
    """
    components = components_of(config)
    if len(job.components) == 1:
        every = [node for where in nodes.values() for node in where]
        return [(_step(config, len(every), components[0], [], agent), every)]
    return [
        (_step(config, len(nodes[one.name]), one, [f"--het-group={group}"], agent), nodes[one.name])
        for group, one in enumerate(components)
    ]


def check_command(config: Config, job: Allocation, words: Sequence[str]) -> Sequence[str]:
    """One task on the job's first node, as the run's processes there will be."""
    group = ["--het-group=0"] if len(job.components) > 1 else []
    return _step(config, 1, components_of(config)[0], group, words)


def on_each_node(config: Config, gpus: int, words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """A step's command with what goes before it on this site, and what that needs of srun.

    Args:
        gpus: of a node.
    """
    container = wrapping(config.cluster.container, gpus)
    words = [*shlex.split(config.cluster.prefix), *container.words, *words]
    if config.cluster.setup:
        words = ["bash", "-c", "\n".join([*config.cluster.setup, 'exec "$@"']), "bash", *words]
    return container.srun, words


def _step(
    config: Config, num_nodes: int, component: Component, options: Sequence[str], words: Sequence[str]
) -> Sequence[str]:
    """One task a node. Its output is carried line by line, which is what keeps the lines of several nodes whole.

    A step that asks for no CPUs has all that the job has on its nodes, and shares them with those of other tools; it is
    not bound, since what it starts are several processes. What ends one task ends the step: a node without its agent is
    of no use.
    """
    container, words = on_each_node(config, component.gpus, words)
    fixed = ["--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=1", "--cpu-bind=none"]
    mpi = f"--mpi={config.cluster.mpi or 'none'}"
    return ["srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", *fixed, mpi, *options, *container, *words]
