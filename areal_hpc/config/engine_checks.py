"""What the values of ``generation`` and ``weights`` must be to each other."""

from __future__ import annotations

from collections.abc import Iterator

from areal_hpc.config.engines import OWN_ARGUMENTS, TransportName
from areal_hpc.config.schema import Config, EngineName


def check_engine_ranks(config: Config) -> Iterator[str]:
    generation = config.generation
    whole = generation.tensor_parallel * generation.pipeline_parallel == 1
    if generation.backend is not EngineName.SGLANG and not whole:  # of several workers of vLLM's, one alone may fail
        yield (
            f"generation.backend: {generation.backend} runs the model whole here; set generation.tensor_parallel and "
            "generation.pipeline_parallel to 1, or choose sglang"
        )
    if generation.pipeline_parallel > 1 and config.weights.transport is TransportName.BROADCAST:
        # SGLang numbers a member by its tensor-parallel rank alone, which is the same in every stage.
        yield (
            f"generation.pipeline_parallel: the ranks of {generation.pipeline_parallel} stages cannot enter one weight "
            "group of SGLang; set weights.transport=disk, or generation.pipeline_parallel to 1"
        )
    elif generation.pipeline_parallel > 1 and config.weights.delta:
        yield (
            "weights.delta: the stages of an engine do not agree on whether all have taken a change; set it to false, "
            "or generation.pipeline_parallel to 1"
        )


def check_server_args(config: Config) -> Iterator[str]:
    if config.generation.backend is EngineName.EMBEDDED and config.generation.server_args:
        yield "generation.server_args: the embedded engine takes none; remove them, or choose sglang or vllm"
    given = {name.lstrip("-").replace("-", "_"): name for name in config.generation.server_args}
    for plain, name in given.items():
        if instead := OWN_ARGUMENTS.get(plain):
            yield f"generation.server_args.{name}: remove it; {instead}"
    if "dp_size" in given and "enable_dp_attention" not in given:
        yield (
            f"generation.server_args.{given['dp_size']}: whole copies of the model in one engine have no devices of "
            "the run's, and SGLang lets them enter no weight group; set generation.replicas instead, or beside it "
            "enable_dp_attention, whose copies share the engine's devices"
        )
