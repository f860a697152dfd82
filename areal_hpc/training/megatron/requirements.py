"""What the Megatron trainer needs of the installation and of the model, checked without importing either."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from areal_hpc.config.lora import ATTENTION, FEED_FORWARD, NO_LORA, LoraConfig
from areal_hpc.config.schema import Attention, ParallelConfig, TrainerConfig
from areal_hpc.errors import ConfigError
from areal_hpc.pretrained.architecture import Architecture, read_architecture

OLDEST, TOO_NEW = (0, 16, 1), (0, 20, 0)
"""Versions of megatron-core whose insides are those that ``compat`` and ``optimizer`` reach into."""
WANTS_TRITON = (0, 18, 0)
"""The first megatron-core that cannot be imported without triton, which torch brings for CUDA only."""
FP8_MULTIPLE = 16
"""Every side of a matrix product in FP8 is a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One that computes on some devices only."""

    name: str
    module: str
    made: str
    command: str
    """What installs it."""


COMPILED = "in the extra `cuda` and compiled at its installation, by nvcc and against the torch that is there"
PACKAGES = {
    Attention.FLASH: Package(
        name="flash-attn",
        module="flash_attn",
        made=COMPILED,
        command="pip install --no-build-isolation 'areal-hpc[flash]'",
    ),
    Attention.TRANSFORMER_ENGINE: Package(
        name="Transformer Engine",
        module="transformer_engine",
        made=COMPILED,
        command="pip install --no-build-isolation 'areal-hpc[transformer-engine]'",
    ),
    Attention.ASCEND: Package(
        name="torch-npu",
        module="torch_npu",
        made="for Ascend devices and wants their toolkit, CANN",
        command="pip install 'areal-hpc[npu]'",
    ),
}


def require_megatron() -> None:
    """Refuse a missing megatron-core, and one that nobody has tried.

    Raises:
        ConfigError: says what to install.
    """
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            "trainer.backend=megatron needs megatron-core: pip install 'areal-hpc[megatron]', or set "
            "trainer.backend=reference"
        ) from error
    release = tuple(int(number) for number in re.findall(r"\d+", found)[:3])
    if not OLDEST <= release < TOO_NEW:
        first, last = (".".join(map(str, version)) for version in (OLDEST, TOO_NEW))
        raise ConfigError(
            f"trainer.backend=megatron: megatron-core {found} is not one of those that are known to work, {first} to "
            f"below {last}; pip install 'areal-hpc[megatron]'"
        )
    if release >= WANTS_TRITON and find_spec("triton") is None:
        raise ConfigError(f"trainer.backend=megatron: megatron-core {found} imports triton; pip install triton")


def require_kernels(trainer: TrainerConfig) -> None:
    """Refuse kernels that are not installed, by what can be seen without importing them.

    Raises:
        ConfigError: says what to install.
    """
    wanted = {f"trainer.attention={trainer.attention}": PACKAGES.get(trainer.attention)}
    if trainer.fp8:
        wanted["trainer.fp8"] = PACKAGES[Attention.TRANSFORMER_ENGINE]
    for key, package in wanted.items():
        if package is not None and find_spec(package.module) is None:
            raise ConfigError(
                f"{key} needs {package.name}, which is {package.made}: {package.command}, or leave that out"
            )


def check_model(path: Path, parallel: ParallelConfig, lora: LoraConfig = NO_LORA, *, fp8: bool = False) -> Architecture:
    """The model's architecture, if it can be split as ``trainer.parallel`` says, and computed in FP8 where asked.

    Raises:
        DataError: the model is not one that is computed here.
        ConfigError: lists every size that does not divide what it splits, or that FP8 does not take; or adapters would
            be of experts.
    """
    architecture = read_architecture(path)
    if lora.rank and architecture.experts is not None and set(lora.target_modules) & set(FEED_FORWARD):
        raise ConfigError(
            f"model.lora.target_modules: {path} has experts, which get no adapters; name {', '.join(ATTENTION)} at most"
        )
    if fp8:
        _check_fp8(path, architecture, parallel)
    if problems := list(_problems(architecture, parallel)):
        raise ConfigError(f"{path} cannot be split so: " + "; ".join(problems))
    return architecture


def _check_fp8(path: Path, model: Architecture, parallel: ParallelConfig) -> None:
    if model.experts is not None:
        raise ConfigError(f"trainer.fp8: {path} has experts, whose tokens come in any number; set it to false")
    widths = {
        "hidden": model.hidden_size,
        "query": model.qkv_sizes[0] // parallel.tensor,
        "query, key and value": sum(model.qkv_sizes) // parallel.tensor,
        "feed-forward": model.intermediate_size // parallel.tensor,
    }
    if odd := [f"{what} width {width}" for what, width in widths.items() if width % FP8_MULTIPLE]:
        raise ConfigError(
            f"trainer.fp8: products are of multiples of {FP8_MULTIPLE}, and {path} has on each rank {', '.join(odd)}; "
            "lower trainer.parallel.tensor, or set it to false"
        )


def _problems(model: Architecture, parallel: ParallelConfig) -> Iterator[str]:
    stages = parallel.pipeline * parallel.virtual_pipeline
    experts = 0 if model.experts is None else model.experts.num_experts
    divided = [
        ("tensor", parallel.tensor, "attention heads", model.num_heads),
        ("tensor", parallel.tensor, "feed-forward units", model.intermediate_size),
        ("pipeline times virtual_pipeline", stages, "layers", model.num_layers),
        ("expert", parallel.expert, "experts", experts),
    ]
    if model.experts is not None:
        divided.append(("expert_tensor", parallel.expert_tensor, "units of an expert", model.experts.intermediate_size))
    for key, ranks, what, number in divided:
        if number % ranks:
            yield f"trainer.parallel.{key} = {ranks} does not divide its {number} {what}; lower it"
    more, fewer = max(parallel.tensor, model.num_kv_heads), min(parallel.tensor, model.num_kv_heads)
    if more % fewer:
        yield (
            f"trainer.parallel.tensor = {parallel.tensor} and its {model.num_kv_heads} key-value heads do not divide "
            "each other; lower it"
        )
    if model.experts is None and parallel.expert * parallel.expert_tensor > 1:
        yield "it has no experts; set trainer.parallel.expert and expert_tensor to 1"
    if model.experts is not None and parallel.expert == 1 and parallel.expert_tensor != parallel.tensor:
        # Megatron would keep a copy on each of those ranks, and add up what each learns from its own tokens nowhere.
        yield (
            f"trainer.parallel.expert_tensor = {parallel.expert_tensor} leaves copies of its experts on the "
            f"{parallel.tensor} ranks of trainer.parallel.tensor; set it to {parallel.tensor}, or "
            "trainer.parallel.expert above 1"
        )
    if model.output_bias:
        yield "it adds a bias to attention's output, which the Megatron trainer does not; set trainer.backend=reference"
