"""Adapters by name: which a model has, what they start as, what becomes of the model's weights with them.

    model.layers.0.self_attn.q_proj.weight            W [outputs, inputs], frozen
    model.layers.0.self_attn.q_proj.lora_A.weight     A [rank, inputs], random at first
    model.layers.0.self_attn.q_proj.lora_B.weight     B [outputs, rank], zeros at first: nothing is changed
    lora_base                                         the fingerprint of all frozen weights, int64 [1]

The layer computes x W^T + scale (x A^T) B^T, which is x (W + scale B A)^T: ``merged``. Adapters mean nothing on other
weights than they were trained on, so they travel with the fingerprint of these, and whoever takes them compares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import google_crc32c
import torch
from torch import Tensor

from areal_hpc.config.lora import LoraConfig
from areal_hpc.errors import ConfigError

BASE = "lora_base"
WEIGHT = ".weight"
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
PEFT_PREFIX = "base_model.model."
"""Before every name in a file of the package ``peft``: of its own model around ours."""

Shape = tuple[int, ...]
Named = Iterable[tuple[str, Tensor]]


def is_adapter(name: str) -> bool:
    """Whether the tensor is one of an adapter's two."""
    return name.endswith((DOWN, UP))


def adapted_layers(names: Iterable[str], config: LoraConfig) -> list[str]:
    """The layers among ``names`` that get an adapter.

    Raises:
        ConfigError: one of the targets names no layer.
    """
    by_last_word: dict[str, list[str]] = {}
    for name in names:
        by_last_word.setdefault(name.rpartition(".")[2], []).append(name)
    if lacking := [target for target in config.target_modules if target not in by_last_word]:
        raise ConfigError(
            f"model.lora.target_modules: the model has no layer {', '.join(lacking)} that can be adapted; choose "
            f"among {', '.join(sorted(by_last_word))}"
        )
    return [name for target in dict.fromkeys(config.target_modules) for name in by_last_word[target]]


def adapter_shapes(layer: str, shape: Shape, rank: int) -> dict[str, Shape]:
    """Names and shapes of the two tensors of a layer whose weight has ``shape``."""
    outputs, inputs = shape
    return {layer + DOWN: (rank, inputs), layer + UP: (outputs, rank)}


def travelling_shapes(weights: Mapping[str, Shape], config: LoraConfig) -> dict[str, Shape]:
    """Names and shapes of all that an update holds where adapters are trained: theirs, and ``lora_base``.

    Args:
        weights: names and shapes of the frozen ones.

    Raises:
        ConfigError: one of the targets names none of their matrices.
    """
    matrices = [
        name.removesuffix(WEIGHT) for name, shape in weights.items() if name.endswith(WEIGHT) and len(shape) == 2
    ]
    found: dict[str, Shape] = {BASE: (1,)}
    for layer in adapted_layers(matrices, config):
        found |= adapter_shapes(layer, weights[layer + WEIGHT], config.rank)
    return found


def start_value(name: str, shape: Shape, seed: int) -> Tensor:
    """What an adapter's tensor starts as, float32: the same for every rank, layout and backend.

    A is uniform within 1 / sqrt(inputs), as the authors' own code has it; B is 0.
    """
    if name.endswith(UP):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed((seed << 32) + int(google_crc32c.value(name.encode())))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def merged(weights: Named, adapters: Mapping[str, Tensor], scale: float) -> Iterator[tuple[str, Tensor]]:
    """The weights of the model that computes with its adapters as it is: W + scale B A, rounded once to W's dtype."""
    for name, weight in weights:
        layer = name.removesuffix(WEIGHT)
        if layer + DOWN in adapters:
            down, up = (adapters[layer + part].to(weight.device, torch.float32) for part in (DOWN, UP))
            yield name, torch.addmm(weight.float(), up, down, alpha=scale).to(weight.dtype)
        else:
            yield name, weight


def peft_config(config: LoraConfig, base: str) -> dict[str, Any]:
    """What ``adapter_config.json`` says.

    Args:
        base: directory of the frozen model.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(set(config.target_modules)),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
    }


def terms_of(config: LoraConfig, base: int) -> dict[str, Any]:
    """What a checkpoint says of its adapters: with any of it changed their numbers would mean something else.

    Args:
        base: the fingerprint of the frozen weights.
    """
    return {
        "rank": config.rank,
        "alpha": config.alpha,
        "target_modules": sorted(set(config.target_modules)),
        "base": base,
    }
