"""What goes with routing replay, as far as the configuration alone can tell; the model has its say in ``preflight``."""

from __future__ import annotations

from collections.abc import Iterator

from areal_hpc.config.recipes import is_offline
from areal_hpc.config.schema import Config, EngineName, TrainerBackendName


def check_routing(config: Config) -> Iterator[str]:
    if not config.model.routing_replay:
        return
    generation, trainer = config.generation.backend, config.trainer.backend
    if is_offline(config.algorithm):
        yield (
            f"model.routing_replay: algorithm.name {config.algorithm.name} learns from a data set, which no engine "
            "computed; set it to false"
        )
    elif generation is not EngineName.SGLANG:
        yield (
            f"model.routing_replay: {generation} does not tell which experts computed a token; set it to false, or "
            "generation.backend=sglang"
        )
    elif config.generation.pipeline_parallel > 1:
        yield (
            "generation.pipeline_parallel: one stage of an engine does not tell which experts the layers of another "
            "chose; set it to 1, or model.routing_replay to false"
        )
    if trainer is not TrainerBackendName.MEGATRON:
        yield (
            f"model.routing_replay: {trainer} cannot choose experts by a record; set it to false, or "
            "trainer.backend=megatron"
        )
