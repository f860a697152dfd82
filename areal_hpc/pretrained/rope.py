"""Rotary positions (Su et al. 2021, arXiv 2104.09864) as a checkpoint's ``config.json`` asks for them.

    rope = read_rope(config, directory)             checked; of either generation's keys
    frequencies = inverse_frequencies(rope, dim)    how fast each pair of numbers of a head turns
    amplitude(rope)                                 what cosines and sines are multiplied by

The variants stretch a context: ``linear`` slows all frequencies down. ``llama3`` (The Llama 3 Herd of Models, 3.1
release) does so to those whose wavelength exceeds the original context, and blends in between; ``yarn`` (Peng et al.
2023, arXiv 2309.00071) likewise, blending by the number of the frequency as its authors' code does, and makes scores
larger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_hpc.errors import DataError

if TYPE_CHECKING:
    import torch

Rope = Mapping[str, Any]
"""``rope_type``, ``rope_theta`` and what the variant needs."""
ORIGINAL = "original_max_position_embeddings"
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL),
}
"""The variants that are computed, and the numbers that each must have."""


def read_rope(config: Mapping[str, Any], directory: Path) -> Rope:
    """The checked settings, from ``rope_parameters`` (transformers 5), else ``rope_theta`` and ``rope_scaling``.

    Raises:
        DataError: a variant that we do not compute, or one without its numbers.
    """
    written = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta", 10000.0), ORIGINAL: config["max_position_embeddings"], **written}
    variant = rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if variant not in VARIANTS:
        raise DataError(
            f"{directory}: rotary variant {variant!r} is not known to the embedded engine and the Megatron trainer; "
            f"they compute {', '.join(VARIANTS)}, so choose another model"
        )
    if missing := [key for key in VARIANTS[variant] if rope.get(key) is None]:
        raise DataError(
            f"{directory}: config.json has no {' and no '.join(missing)} for its rotary variant {variant!r}; add what "
            "the model was trained with"
        )
    return rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2]."""
    import torch

    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies: torch.Tensor = 1.0 / rope["rope_theta"] ** exponents
    if rope["rope_type"] == "linear":
        return frequencies / float(rope["factor"])
    if rope["rope_type"] == "default":
        return frequencies
    kept = _llama3_kept(frequencies, rope) if rope["rope_type"] == "llama3" else _yarn_kept(frequencies, rope)
    return frequencies * (kept + (1.0 - kept) / float(rope["factor"]))


def _llama3_kept(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Shares in [0, 1] of each frequency that are not slowed down."""
    turns = frequencies * rope[ORIGINAL] / (2 * math.pi)  # over the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept: torch.Tensor = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept


def _yarn_kept(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Shares in [0, 1] of each frequency that are not slowed down: all of one that turns ``beta_fast`` times over the
    original context, nothing of one that turns ``beta_slow`` times.
    """
    import torch

    dim = 2 * frequencies.numel()

    def number(turns: float) -> float:
        """Number of the frequency that turns so often over the original context."""
        return dim * math.log(rope[ORIGINAL] / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    first, last = number(rope.get("beta_fast") or 32.0), number(rope.get("beta_slow") or 1.0)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    return 1.0 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)


def amplitude(rope: Rope) -> float:
    """1.0, except for ``yarn``: what is written, or 1 and a tenth of the factor's logarithm."""
    if rope["rope_type"] != "yarn":
        return 1.0
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    growth = 0.1 * math.log(max(rope["factor"], 1.0))
    one, other = rope.get("mscale"), rope.get("mscale_all_dim")
    return float((1.0 + one * growth) / (1.0 + other * growth)) if one and other else 1.0 + growth
