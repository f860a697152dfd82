"""Rotary positions (Su et al. 2021, arXiv 2104.09864) of packed sequences, turned once for a micro-batch.

    turns = turns_of(frequencies, amplitude, positions, dtype)  cosines and sines of a pass's tokens, for all layers
    query, key = rotate(query, turns), rotate(key, turns)

Megatron's own finds them again in each layer, from boundaries that it first asks the device for. Phases are float32
whatever the model computes in, since rounded ones drift with the position; cosines and sines are rounded to what it
computes in, as those of transformers and of the engines are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Turns = tuple[Tensor, Tensor]
"""Cosines and sines, each [T, 1, D / 2]."""


def turns_of(frequencies: Tensor, amplitude: float, positions: Tensor, dtype: torch.dtype) -> Turns:
    """The cosines and sines that ``rotate`` needs for these tokens.

    Args:
        frequencies: float32 [D / 2].
        amplitude: what both are multiplied by; see ``pretrained.rope``.
        positions: int64 [T], of each token in its sequence.
    """
    phases = torch.outer(positions.to(torch.float32), frequencies)[:, None]
    return (amplitude * phases.cos()).to(dtype), (amplitude * phases.sin()).to(dtype)


def rotate(heads: Tensor, turns: Turns) -> Tensor:
    """[T, heads, D], of which the first half is turned against the second."""
    rotated: Tensor = _Rotate.apply(heads, *turns)  # type: ignore[no-untyped-call]
    return rotated


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is turned back."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turned(heads, cosines, sines, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _turned(gradients[0], cosines, sines, -1.0), None, None


def _turned(heads: Tensor, cosines: Tensor, sines: Tensor, direction: float) -> Tensor:
    turned = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    (one, other), (to_one, to_other) = heads.chunk(2, -1), turned.chunk(2, -1)
    torch.mul(one, cosines, out=to_one).addcmul_(other, sines, value=-direction)
    torch.mul(other, cosines, out=to_other).addcmul_(one, sines, value=direction)
    return turned
