"""Adapters of a Hugging Face model in place, and what every backend says of the adapters that it trains.

    adapters = Adapters(model, config, dtype=dtype, seed=seed)      the model is frozen, and ``dtype``, from here on
    adapters.parameters()                                           what is trained, by name
    with adapters.off(): ...                                        the frozen model: a reference that costs no memory

A layer keeps its name and its weight, and gets two children, ``lora_A`` and ``lora_B``; a hook adds what these compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from areal_hpc.config.lora import LoraConfig
from areal_hpc.errors import CheckpointError
from areal_hpc.fs import read_json
from areal_hpc.pretrained.lora import (
    BASE,
    Named,
    adapted_layers,
    adapter_shapes,
    merged,
    start_value,
)
from areal_hpc.training.shards import FILES, PROGRESS, SHARDS, read_whole


class Adapters:
    """The adapters of one model, which computes with them unless they are ``off``.

    Raises:
        ConfigError: a target names no linear layer of the model.
    """

    def __init__(self, model: nn.Module, config: LoraConfig, *, dtype: torch.dtype, seed: int) -> None:
        freeze(model, dtype)
        self._scale, self._on = config.scale, True
        self._parameters: dict[str, nn.Parameter] = {}
        head = model.get_output_embeddings()  # type: ignore[operator]  # its weight alone is used, not the layer
        linear = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not head}
        for name in adapted_layers(linear, config):
            self._attach(name, linear[name], config.rank, seed)

    def _attach(self, name: str, layer: nn.Linear, rank: int, seed: int) -> None:
        shapes = adapter_shapes(name, tuple(layer.weight.shape), rank)
        for full_name, (outputs, inputs) in shapes.items():
            child = nn.Linear(inputs, outputs, bias=False, device="meta")
            value = start_value(full_name, (outputs, inputs), seed)
            child.weight = self._parameters[full_name] = nn.Parameter(value.to(layer.weight.device))
            layer.add_module(full_name.split(".")[-2], child)
        layer.register_forward_hook(self._add)

    def _add(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + self._scale * layer.lora_B(layer.lora_A(inputs[0])) if self._on else output

    def parameters(self) -> dict[str, nn.Parameter]:
        """The adapters' tensors by name; float32 until an optimizer that keeps masters of them rounds them."""
        return dict(sorted(self._parameters.items()))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the frozen model alone."""
        self._on = False
        try:
            yield
        finally:
            self._on = True


def freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """Train nothing of the model, and round it as one that is trained: equal weights must give equal log-probs."""
    model.requires_grad_(False)
    for parameter in model.parameters():  # and not its buffers: rotary frequencies stay float32, as a policy's
        parameter.data = parameter.data.to(dtype)


def outgoing(
    config: LoraConfig, base: Callable[[], Named], adapters: Named, fingerprint: int, *, whole: bool
) -> Iterator[tuple[str, Tensor]]:
    """What engines are sent: the adapters and on which weights they stand; or the ``whole`` model, merged.

    Args:
        base: the frozen weights, by name; asked for only where they are needed.
        fingerprint: theirs.
    """
    if whole:
        yield from merged(base(), dict(adapters), config.scale)
        return
    yield BASE, torch.tensor([fingerprint])
    yield from adapters


def saved_adapters(path: Path, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """What ``outgoing`` gave to engines when the checkpoint ``path`` was made, from its files alone."""
    terms = read_json(path / PROGRESS)["lora"]
    masters, _ = read_whole(path, SHARDS, FILES)
    yield BASE, torch.tensor([terms["base"]])
    for name in sorted(masters):
        yield name, masters[name].to(getattr(torch, dtype))


def require_same_terms(path: Path, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose numbers mean something else here.

    Args:
        saved: what the checkpoint ``path`` says of its adapters, nothing where it has none: ``terms_of``.
        ours: the same of this run.

    Raises:
        CheckpointError: they differ; says in what.
    """
    if bool(saved) is not bool(ours):
        has, wants = ("adapters", "weights") if saved else ("weights", "adapters")
        raise CheckpointError(f"{path} holds {has} and this run trains {wants}; set model.lora.rank as it was there")
    if saved.get("base") != ours.get("base"):
        raise CheckpointError(
            f"{path} is of adapters on other weights; give the model.path and model.dtype of that run"
        )
    if different := [name for name in ours if saved.get(name) != ours[name]]:
        name = different[0]
        raise CheckpointError(
            f"model.lora.{name}: {path} was made with {saved.get(name)}, not {ours[name]}; set it as it was there"
        )
