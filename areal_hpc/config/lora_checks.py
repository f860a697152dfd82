"""What goes with adapters, as far as the configuration alone can tell; the model has its say in ``preflight``."""

from __future__ import annotations

from collections.abc import Iterator

from areal_hpc.config.lora import ATTENTION, FEED_FORWARD, LoraConfig
from areal_hpc.config.schema import Config, EngineName, TrainerBackendName

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that Megatron computes as one."""


def check_lora(config: Config) -> Iterator[str]:
    lora = config.model.lora
    if lora.rank == 0:
        if lora != LoraConfig():
            yield "model.lora: does nothing with model.lora.rank = 0; set that to 8 or so, or remove the section"
        return
    if config.algorithm.name == "reward_model":
        yield "model.lora.rank: a reward model has a new head, which no adapter is of; set it to 0"
    if not lora.target_modules:
        yield "model.lora.target_modules: empty trains nothing; name layers, or leave it out for all matrices"
    yield from _check_targets(config, set(lora.target_modules))


def _check_targets(config: Config, targets: set[str]) -> Iterator[str]:
    strict = [
        name
        for name, chosen in (
            ("trainer.backend=megatron", config.trainer.backend is TrainerBackendName.MEGATRON),
            ("generation.backend=embedded", config.generation.backend is EngineName.EMBEDDED),
        )
        if chosen
    ]
    if strict and (unknown := sorted(targets - {*ATTENTION, *FEED_FORWARD})):
        yield (
            f"model.lora.target_modules: {strict[0]} knows no {', '.join(unknown)}; choose among "
            f"{', '.join((*ATTENTION, *FEED_FORWARD))}"
        )
    if config.trainer.backend is TrainerBackendName.MEGATRON:
        for fused in FUSED:
            if targets & set(fused) and not targets >= set(fused):
                yield (
                    f"model.lora.target_modules: trainer.backend=megatron computes {', '.join(fused)} as one; name all "
                    "of them or none"
                )
