"""What the values of ``cluster`` must be to each other, where that is about the nodes and not the job's time."""

from __future__ import annotations

from collections.abc import Iterator

from areal_hpc.config.cluster import ComponentConfig, Runtime, Shape
from areal_hpc.config.derived import takes_satellites
from areal_hpc.config.schema import Config


def check_container(config: Config) -> Iterator[str]:
    container = config.cluster.container
    if container.runtime is not Runtime.NONE and not container.image:
        yield f"cluster.container.image: required by cluster.container.runtime {container.runtime}; set it"
    if container.runtime is Runtime.NONE and (container.image or container.mounts or container.args):
        yield (
            "cluster.container.runtime: none starts no container; choose apptainer, pyxis or shifter, or remove the "
            "rest of cluster.container"
        )
    if any(word.startswith("--container-name") for word in container.args):
        yield (
            "cluster.container.args: --container-name would hand a later job on the node what this one has written "
            "into its container; remove it"
        )


def check_shared_nodes(config: Config) -> Iterator[str]:
    cluster = config.cluster
    if cluster.share_nodes and cluster.shape is not Shape.SATELLITES and cluster.generation != ComponentConfig():
        yield (
            "cluster.generation: asks for nothing with cluster.share_nodes, which puts the engines on the trainer's "
            "nodes; say it in cluster.trainer, or set cluster.share_nodes to false"
        )


def check_replicas(config: Config) -> Iterator[str]:
    if config.generation.replicas > 0:
        return
    if not takes_satellites(config) or config.cluster.shape not in (Shape.LOCAL, Shape.SATELLITES):
        yield (
            "generation.replicas: 0 leaves generation to satellites, which this run does not take; raise it, or set "
            "cluster.shape=satellites (and deterministic=false)"
        )
