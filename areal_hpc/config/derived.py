"""Values that follow from a configuration and are therefore no keys of it."""

from __future__ import annotations

from collections.abc import Mapping

from areal_hpc.config.schema import Config


def ring_capacity(config: Config) -> int:
    """Groups that may be outstanding at once. With a slot for each, no group gets older than ``max_staleness``."""
    return (config.buffer.max_staleness + 1) * config.algorithm.groups_per_step


def model_ranks(config: Config) -> int:
    """Trainer ranks that hold one copy of the model."""
    parallel = config.trainer.parallel
    return parallel.tensor * parallel.pipeline * parallel.context


def threads_of(config: Config) -> Mapping[str, int]:
    """CPU threads of one process of each role that has more to say than 1."""
    return {"trainer": config.trainer.threads, "generator": config.generation.threads}


def engine_ranks(config: Config) -> int:
    """Devices of one engine replica."""
    return config.generation.tensor_parallel * config.generation.pipeline_parallel
