"""Attention over packed sequences in the place that Megatron leaves for it: exact on every device, or flash-attn's.

Exact, each sequence is one call of torch's fused attention, so nobody attends across a boundary and no mask of the
whole micro-batch exists; flash-attn takes all sequences in one call. With context parallelism a rank holds two chunks
of every sequence (see ``packing``): keys and values of all ranks are gathered, one collective a layer, and each chunk
attends to what comes before its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from areal_hpc.config.schema import Attention
from areal_hpc.extras import optional

Varlen = Callable[..., Tensor]
"""``flash_attn_varlen_func`` of flash-attn 2: queries, keys and values of packed sequences, and where these begin."""


def kernel_of(attention: Attention) -> Varlen | None:
    """What computes all sequences in one call; None where each is one of its own.

    Raises:
        ConfigError: it is not installed.
    """
    if attention is Attention.EXACT:
        return None
    kernel: Varlen = optional("flash_attn", extra="flash", what="trainer.attention=flash").flash_attn_varlen_func
    return kernel


class PackedAttention(torch.nn.Module):
    """Megatron builds one for each layer and calls it with queries [T, heads, D], keys and values [T, groups, D]."""

    def __init__(
        self,
        config: Any,
        *_: Any,
        softmax_scale: float | None = None,
        kernel: Varlen | None = None,
        **__: Any,
    ) -> None:
        super().__init__()
        from megatron.core import parallel_state

        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self._kernel = kernel
        self._group = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> Tensor:
        """[T, 1, heads * D]; T are this rank's tokens of the packed sequences."""
        assert packed_seq_params is not None, "only packed sequences are trained on"
        if self._kernel is not None:
            return self._in_one_call(self._kernel, query, key, value, packed_seq_params)
        ranks = 1 if self._group is None else self._group.size()
        lengths = (packed_seq_params.cu_seqlens_q.diff() // ranks).tolist()
        parts = [torch.split(part, lengths) for part in (query, *self._of_all_ranks(key, value))]
        attend = self._attend if self._group is None else self._attend_in_chunks
        attended = [attend(*one) for one in zip(*parts, strict=True)]
        return torch.cat(attended).reshape(query.shape[0], 1, -1)

    def _in_one_call(self, kernel: Varlen, query: Tensor, key: Tensor, value: Tensor, packed: Any) -> Tensor:
        assert self._group is None, "the configuration's checks let no context parallelism pass"
        attended = kernel(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            softmax_scale=self._scale,
            causal=True,
        )
        return attended.reshape(query.shape[0], 1, -1)

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
