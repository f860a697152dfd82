"""A model that ranks hold parts of, and its optimizer: the policy's, and in the same way the critic's.

model = SplitModel(source, architecture, trainer, place, dtype=dtype, number_head="")
model.chunks                                forward only
model.optimizer.chunks                      the same, whose gradients are summed over ranks
model.weights, model.state                  whole tensors for engines, pieces for checkpoints
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_hpc.config.lora import LoraConfig
from areal_hpc.config.schema import TrainerConfig
from areal_hpc.pretrained.architecture import Architecture
from areal_hpc.pretrained.files import TensorFiles, weight_files
from areal_hpc.pretrained.lora import start_value
from areal_hpc.training.megatron.adapters import SplitAdapters
from areal_hpc.training.megatron.model import build
from areal_hpc.training.megatron.optimizer import SplitOptimizer
from areal_hpc.training.megatron.parallel import Place
from areal_hpc.training.megatron.state import SplitState
from areal_hpc.training.megatron.weights import Weights


class SplitModel:
    """One rank's part.

    Args:
        source: Hugging Face directory of the weights to start from.
        number_head: name of the layer that makes one number of each state, in place of the words; "" for words. Where
            ``source`` has no such layer it starts at 0.
    """

    def __init__(
        self,
        source: Path,
        architecture: Architecture,
        trainer: TrainerConfig,
        place: Place,
        *,
        dtype: torch.dtype,
        number_head: str = "",
    ) -> None:
        self.chunks = build(architecture, trainer, dtype, number_head=number_head)
        self.weights = Weights(self.chunks, architecture, place)
        self.optimizer = SplitOptimizer(self.chunks, trainer.optimizer, dtype)
        for parameter, part in self.weights.cut(_reader(source, self.weights, number_head)):
            self.optimizer.set_master(parameter, part)
        self.state = SplitState(self.weights, self.optimizer)


class AdaptedModel:
    """The same of a frozen model with adapters, of which alone there are an optimizer and a state.

    Args:
        seed: of the adapters that it begins with.
    """

    def __init__(
        self,
        source: Path,
        architecture: Architecture,
        trainer: TrainerConfig,
        place: Place,
        *,
        dtype: torch.dtype,
        lora: LoraConfig,
        seed: int,
    ) -> None:
        self.chunks, self.base = frozen(source, architecture, trainer, place, dtype)
        self.adapters = SplitAdapters(self.chunks, lora, architecture, place)
        self.weights = Weights(self.chunks, architecture, place, adapters=True)
        self.optimizer = SplitOptimizer(self.chunks, trainer.optimizer, dtype)
        shapes = self.weights.shapes
        for parameter, part in self.weights.cut(lambda name: start_value(name, shapes[name], seed)):
            self.optimizer.set_master(parameter, part)
        self.state = SplitState(self.weights, self.optimizer)


@torch.no_grad()
def frozen(
    source: Path, architecture: Architecture, trainer: TrainerConfig, place: Place, dtype: torch.dtype
) -> tuple[list[Any], Weights]:
    """A model that is not trained, rounded as one that is: equal weights must give equal log-probs. Its chunks and
    their view."""
    chunks = build(architecture, trainer, dtype)
    weights = Weights(chunks, architecture, place)
    for parameter, part in weights.cut(_reader(source, weights, "")):
        parameter.copy_(part)
    return [chunk.requires_grad_(False) for chunk in chunks], weights


def _reader(source: Path, weights: Weights, number_head: str) -> Callable[[str], Tensor]:
    files = TensorFiles(weight_files(source))
    new = {
        name: torch.zeros(shape)
        for name, shape in weights.shapes.items()
        if number_head and name.startswith(f"{number_head}.") and name not in files.names
    }
    return lambda name: new[name] if name in new else files.read(name)
