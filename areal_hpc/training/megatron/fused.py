"""Two functions of every layer, with gradients written out: what autograd would keep and pass over is half again.

out = rms_norm(hidden, weight, eps)
out = gated(both)                       silu of the first half, times the second
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., H]. Mean square and root in float32, rounded, then scaled: the order of transformers and of the engines."""
    normed: Tensor = _RMSNorm.apply(hidden, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = hidden.float()
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        normed = (wide * scale).to(hidden.dtype)
        ctx.save_for_backward(normed, scale, weight)
        return weight * normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """A step along what was normed changes nothing, so that part of the gradient is taken out."""
        (gradient,), (normed, scale, weight) = gradients, ctx.saved_tensors
        of_weight = (gradient * normed).flatten(0, -2).sum(0)
        wide, ahead = normed.float(), (gradient * weight).float()
        along = (ahead * wide).mean(-1, keepdim=True)
        return torch.addcmul(ahead, wide, along, value=-1).mul_(scale).to(normed.dtype), of_weight, None


def gated(both: Tensor) -> Tensor:
    """[..., 2 F] -> [..., F]."""
    out: Tensor = _Gated.apply(both)  # type: ignore[no-untyped-call]
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,), (both,) = gradients, ctx.saved_tensors
        found = torch.empty_like(both)
        (gate, up), (of_gate, of_up) = both.chunk(2, -1), found.chunk(2, -1)
        torch.mul(gradient, silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return found
