"""LoRA adapters on frozen weights: an update replaces the adapters alone, so that it is small and soon done.

The weights are not touched: what an adapter adds is computed beside them, as the trainer does. So nothing is rounded
into them, there is one copy of them, and an old set of adapters is replaced by a new one between two forward passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from areal_hpc.config.lora import LoraConfig
from areal_hpc.delta import Weight
from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation.embedded.parameters import LayerAdapters, LowRank, Parameters, WeightSet
from areal_hpc.pretrained.lora import BASE, DOWN, UP, adapted_layers

ATTENTION, MLP = "self_attn", "mlp"


class Adapters(WeightSet):
    """One whole set; as it is made, it changes nothing.

    Raises:
        ConfigError: a target is no matrix of this model.
    """

    def __init__(self, base: Parameters, config: LoraConfig) -> None:
        super().__init__()
        self._base, self._config = base, config
        self.by_name[BASE] = torch.zeros(1, dtype=torch.int64)
        matrices = (name.removesuffix(".weight") for name in base.by_name if name.endswith("_proj.weight"))
        self._adapted = frozenset(adapted_layers(matrices, config))
        self._layers = [self._layer(f"model.layers.{i}") for i in range(base.architecture.num_layers)]

    def _layer(self, prefix: str) -> LayerAdapters:
        return LayerAdapters(
            qkv=self._fused([f"{prefix}.{ATTENTION}.{part}_proj" for part in "qkv"]),
            output=self._fused([f"{prefix}.{ATTENTION}.o_proj"]),
            gate_up=self._fused([f"{prefix}.{MLP}.{part}_proj" for part in ("gate", "up")]),
            down=self._fused([f"{prefix}.{MLP}.down_proj"]),
        )

    def _fused(self, parts: Sequence[str]) -> LowRank | None:
        """The adapters of one fused matrix, in the order of its parts; None if none of these has any."""
        rank, scale = self._config.rank, self._config.scale
        shapes = {part: self._base.shapes[f"{part}.weight"] for part in parts}
        adapted = [part for part in parts if part in self._adapted]
        if not adapted:
            return None
        down = torch.zeros((len(adapted) * rank, shapes[adapted[0]][1]), dtype=self._base.dtype)
        ups: list[tuple[slice, torch.Tensor]] = []
        first = 0
        for part, (outputs, _) in shapes.items():
            if part in adapted:
                up = torch.zeros((outputs, rank), dtype=self._base.dtype)
                self.by_name |= {part + DOWN: down[len(ups) * rank : (len(ups) + 1) * rank], part + UP: up}
                ups.append((slice(first, first + outputs), up))
            first += outputs
        return LowRank(down=down, ups=tuple(ups), scale=scale)

    @property
    def matrices(self) -> Parameters:
        return self._base

    def adapters(self, layer: int) -> LayerAdapters:
        return self._layers[layer]

    @torch.inference_mode()
    def load(self, weights: Iterable[tuple[str, Weight]], held: WeightSet | None = None) -> frozenset[str]:
        """As ``WeightSet.load``; also compares the weights that the adapters were trained on with this engine's.

        Raises:
            WeightUpdateError: as there, or they were trained on others.
        """
        loaded = super().load(weights, held)
        if BASE in loaded and int(self.by_name[BASE]) != self._base.fingerprint:
            raise WeightUpdateError(
                "the adapters are of other weights than this engine has; see that model.path holds the same files for "
                "the trainer and for every engine"
            )
        return loaded
