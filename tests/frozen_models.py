"""A frozen model of two layers on disk, its adapters, and what these make of it by another arithmetic: numpy's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from areal_hpc.buckets import fingerprint_of
from areal_hpc.config.lora import LoraConfig
from areal_hpc.generation.served.merging import order
from areal_hpc.pretrained.lora import BASE, DOWN, UP

LORA = LoraConfig(rank=2, alpha=8.0, target_modules=("q_proj",))
"""Whose scale is 4: with small whole numbers every step of the arithmetic is exact, in any order."""
SHAPES = {"model.q_proj": (6, 4), "model.o_proj": (4, 6), "model.embed_tokens": (9, 4)}


class FrozenModel:
    """A directory as Hugging Face has it: tied, with a head and a buffer in the file that no trainer has."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)

        def whole_numbers(*shape: int) -> torch.Tensor:
            return torch.randint(-8, 9, shape, generator=generator).to(dtype)

        self.weights = {f"{name}.weight": whole_numbers(*shape) for name, shape in SHAPES.items()}
        self.weights["model.norm.weight"] = whole_numbers(4)
        directory.mkdir()
        stored = {"lm_head.weight": torch.ones(9, 4), "model.rotary_emb.inv_freq": torch.ones(2)}
        save_file(self.weights | stored, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
        self.order = order(str(directory), str(dtype).removeprefix("torch."), LORA)

    def adapters(self, seed: int) -> dict[str, torch.Tensor]:
        """As a trainer sends them."""
        generator = torch.Generator().manual_seed(seed)
        outputs, inputs = SHAPES["model.q_proj"]
        found = {
            f"model.q_proj{name}": torch.randint(-2, 3, shape, generator=generator).float()
            for name, shape in ((DOWN, (LORA.rank, inputs)), (UP, (outputs, LORA.rank)))
        }
        return {BASE: torch.tensor([fingerprint_of(self.weights.items())]), **found}

    def with_adapters(self, adapters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's weights with these merged, in float64."""
        down, up = (adapters[f"model.q_proj{part}"].double().numpy() for part in (DOWN, UP))
        weight = self.weights["model.q_proj.weight"]
        made = weight.double().numpy() + LORA.scale * np.einsum("or,ri->oi", up, down)
        return self.weights | {"model.q_proj.weight": torch.from_numpy(made).to(weight.dtype)}
