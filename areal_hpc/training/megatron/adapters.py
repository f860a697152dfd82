"""Adapters on the linear layers of Megatron's blocks, in parts that fit the parts of these.

    layer that ranks share by outputs (queries, keys and values; gate and up)      A whole on every rank, B its rows
    layer that ranks share by inputs (attention's output; down)                    A its columns, B whole on every rank

What is narrow between A and B travels between tensor-parallel ranks, as the wide does around the layer itself: gathered
from their shares of the sequence, or summed and dealt to these. What a whole matrix learns on a rank is of its share of
the sequence, so Megatron sums that over the ranks, as it does for norms.

One layer of Megatron's is several of the model's, which have an adapter each: their A stand one below the other, and
each row of B reads what its own A has made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, one_hot

from areal_hpc.config.lora import LoraConfig
from areal_hpc.pretrained.architecture import Architecture
from areal_hpc.training.megatron.names import Split, cut, first_layer, weight_of
from areal_hpc.training.megatron.parallel import Place

MEGATRON_LAYERS = {
    "self_attention.linear_qkv": "q_proj",
    "self_attention.linear_proj": "o_proj",
    "mlp.linear_fc1": "gate_proj",
    "mlp.linear_fc2": "down_proj",
}
"""Each of Megatron's layers with one of the model's own that it stands for: all of those are adapted, or none."""


class SplitAdapters:
    """This rank's parts, uninitialised; the chunks compute with them unless they are ``off``.

    Args:
        chunks: of a frozen model, as ``model.build`` made them.
    """

    def __init__(self, chunks: Sequence[Any], config: LoraConfig, architecture: Architecture, place: Place) -> None:
        self._config, self._architecture, self._place, self._on = config, architecture, place, True
        for chunk in chunks:
            for name, layer in list(chunk.named_modules()):
                ending = ".".join(name.split(".")[-2:])
                if MEGATRON_LAYERS.get(ending) in config.target_modules:
                    self._attach(f"{name}.weight", first_layer(chunk), layer)
            if chunk.pre_process:
                # A layer that is computed again in backward gets no gradient for its weights if its input wants none.
                chunk.embedding.register_forward_hook(_wants_gradient)

    def _attach(self, name: str, first: int, layer: Any) -> None:
        weight, ranks, rank = weight_of(name, first), self._place.tensor.size(), self._place.tensor.rank()
        outputs, inputs = layer.weight.shape
        num_parts, by_inputs = len(weight.names), weight.split is Split.INPUTS
        self._add(layer, "lora_A", (num_parts * self._config.rank, inputs), split=1 if by_inputs else None)
        self._add(layer, "lora_B", (outputs, self._config.rank), split=None if by_inputs else 0)
        if by_inputs:
            layer.register_forward_hook(self._after_sum)
            return
        rows = _rows_of_parts(weight.split, self._architecture)
        of_row = [torch.full((size, 1), part) for part, size in enumerate(rows)]
        parts = one_hot(cut(weight, of_row, self._architecture, ranks, rank)[:, 0], num_parts)
        layer.register_buffer("lora_parts", parts.to(layer.weight), persistent=False)
        layer.register_forward_hook(self._before_split)

    def _add(self, layer: Any, name: str, shape: tuple[int, int], *, split: int | None) -> None:
        """Give the layer one of its adapter's two matrices, of ``shape`` [outputs, inputs].

        Args:
            split: the dimension that tensor-parallel ranks share; None where each has the whole.
        """
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        outputs, inputs = shape
        child = torch.nn.Linear(inputs, outputs, bias=False, dtype=layer.weight.dtype, device=layer.weight.device)
        if split is None:
            child.weight.sequence_parallel = self._place.tensor.size() > 1  # type: ignore[attr-defined]
        else:
            set_tensor_model_parallel_attributes(child.weight, True, split, 1)
        layer.add_module(name, child)

    def _before_split(self, layer: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """[tokens of this rank, 1, inputs] -> [tokens, 1, this rank's outputs]."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        if not self._on:
            return output
        narrow = layer.lora_A(inputs[0])
        if self._place.tensor.size() > 1:
            narrow = gather_from_sequence_parallel_region(narrow, tensor_parallel_output_grad=True)
        up = (layer.lora_B.weight[:, None, :] * layer.lora_parts[:, :, None]).flatten(1)  # [outputs, parts * rank]
        return output[0] + self._config.scale * linear(narrow, up), output[1]

    def _after_sum(self, layer: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """[tokens, 1, this rank's inputs] -> [tokens of this rank, 1, outputs]."""
        from megatron.core.tensor_parallel import reduce_scatter_to_sequence_parallel_region

        if not self._on:
            return output
        narrow = layer.lora_A(inputs[0])
        if self._place.tensor.size() > 1:
            narrow = reduce_scatter_to_sequence_parallel_region(narrow)
        return output[0] + self._config.scale * layer.lora_B(narrow), output[1]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the frozen model alone."""
        self._on = False
        try:
            yield
        finally:
            self._on = True


def _rows_of_parts(split: Split, architecture: Architecture) -> tuple[int, ...]:
    """Outputs of each of the model's own layers that one of Megatron's stands for."""
    if split is Split.ATTENTION:
        return architecture.qkv_sizes
    assert split is Split.GATED, split
    return architecture.intermediate_size, architecture.intermediate_size


def _wants_gradient(_: Any, __: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
