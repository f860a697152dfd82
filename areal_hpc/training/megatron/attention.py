"""Attention over packed sequences in the place that Megatron leaves for it: exact on every device, or by a kernel.

Exact, each sequence is one call of torch's fused attention, so nobody attends across a boundary and no mask of the
whole micro-batch exists; ``kernels`` take all sequences in one call. With context parallelism a rank holds two chunks
of every sequence (see ``packing``): keys and values of all ranks are gathered, one collective a layer, and each chunk
attends to what comes before its end.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from areal_hpc.config.schema import Attention
from areal_hpc.training.megatron.kernels import kernel_of
from areal_hpc.training.megatron.rotary import rotate


class PackedAttention(torch.nn.Module):
    """Megatron builds one for each layer and calls it with queries [T, heads, D], keys and values [T, groups, D].

    Raises:
        ConfigError: the kernel is not installed.
    """

    def __init__(self, config: Any, *, attention: Attention, softmax_scale: float | None = None, **given: Any) -> None:
        super().__init__()
        scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self._attend = (
            _Exact(config, scale)
            if attention is Attention.EXACT
            else kernel_of(attention, scale=scale, config=config, **given)
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> Tensor:
        """[T, 1, heads * D]; T are this rank's tokens of the packed sequences."""
        assert packed_seq_params is not None, "only packed sequences are trained on"
        query, key = (rotate(heads, packed_seq_params.turns) for heads in (query, key))
        return self._attend(query, key, value, packed_seq_params).reshape(query.shape[0], 1, -1)


class _Exact:
    """A ``Kernel``."""

    def __init__(self, config: Any, scale: float) -> None:
        from megatron.core import parallel_state

        self._scale = scale
        self._group = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, lengths: Any) -> Tensor:
        ranks = 1 if self._group is None else self._group.size()
        sizes = [(end - start) // ranks for start, end in pairwise([0, *lengths.ends])]
        parts = [torch.split(part, sizes) for part in (query, *self._of_all_ranks(key, value))]
        attend = self._attend if self._group is None else self._attend_in_chunks
        return torch.cat([attend(*one) for one in zip(*parts, strict=True)])

    def _of_all_ranks(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the same tokens on every context rank, side by side: [T, ranks, groups, D]."""
        if self._group is None:
            return key, value
        gathered = _Gather.apply(torch.stack([key, value]), self._group)  # type: ignore[no-untyped-call]
        both = gathered.permute(1, 2, 0, 3, 4)  # from [ranks, 2, T, groups, D]
        return both[0], both[1]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """[T, heads, D] of one sequence; causal, unless a bool ``mask`` [T, S] says what each query may see."""
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        attended = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended.squeeze(0).transpose(0, 1)

    def _attend_in_chunks(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """This rank's two chunks of a sequence; ``key`` and ``value`` [2 chunks, ranks, groups, D] are everybody's."""
        assert self._group is not None
        rank, ranks, chunk = self._group.rank(), self._group.size(), query.shape[0] // 2
        key, value = _in_order(key, chunk), _in_order(value, chunk)
        attended = []
        for half, part in enumerate((rank, 2 * ranks - 1 - rank)):
            seen = (part + 1) * chunk
            places = torch.arange(seen, device=query.device)
            mask = places <= places[part * chunk :, None]  # [chunk, seen]
            attended.append(self._attend(query[half * chunk :][:chunk], key[:seen], value[:seen], mask))
        return torch.cat(attended)


def _in_order(of_ranks: Tensor, chunk: int) -> Tensor:
    """[2 chunks, ranks, ...] as ranks hold them -> [2 chunks * ranks, ...] as the sequence runs."""
    by_rank = of_ranks.transpose(0, 1)
    early, late = by_rank[:, :chunk], by_rank[:, chunk:].flip(0)
    return torch.cat([early.flatten(0, 1), late.flatten(0, 1)])


class _Gather(torch.autograd.Function):
    """[...] of each rank -> [ranks, ...]; backward sums what all ranks found for this one's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
        dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
        return gathered.view(group.size(), *tensor.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        mine = gradient.new_empty(gradient.shape[1:])
        dist.reduce_scatter_tensor(mine, gradient.flatten(0, 1).contiguous(), group=ctx.group)
        return mine, None
