"""Kernels that attend over all packed sequences in one call, each on its own package's terms.

    flash                flash-attn 2, on CUDA
    ascend               torch_npu's fused attention
    transformer_engine   Transformer Engine's, as Megatron calls it, on CUDA; also with context parallelism

Each is a function of queries [T, heads, D], keys and values [T, groups, D], and the lengths of their sequences, which
``schedule`` has put into one of Megatron's ``PackedSeqParams``; it gives [T, heads, D] or [T, heads * D].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from areal_hpc.config.schema import Attention
from areal_hpc.errors import ConfigError
from areal_hpc.extras import optional
from areal_hpc.training.megatron.requirements import PACKAGES

Kernel = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
COMPRESSED = 2048
"""Rows and columns of the one causal mask by which torch_npu masks sequences of any length."""
LOWER_RIGHT = 3
"""The ``sparse_mode`` in which it does: causal, counted from the last query and the last key of each sequence."""


def kernel_of(attention: Attention, *, scale: float, **given: Any) -> Kernel:
    """The kernel that ``trainer.attention`` names, for one layer.

    Args:
        scale: what attention scores are multiplied by.
        given: what Megatron tells the attention of a layer.

    Raises:
        ConfigError: its package is not installed.
    """
    if attention is Attention.FLASH:
        attend = optional("flash_attn", extra="flash", what="trainer.attention=flash").flash_attn_varlen_func
        return functools.partial(_by_flash, functools.partial(attend, softmax_scale=scale, causal=True))
    if attention is Attention.ASCEND:
        attend = optional("torch_npu", extra="npu", what="trainer.attention=ascend").npu_fusion_attention
        return functools.partial(_by_ascend, functools.partial(attend, scale=scale, sparse_mode=LOWER_RIGHT))
    assert attention is Attention.TRANSFORMER_ENGINE, attention
    module = transformer_engine("trainer.attention=transformer_engine").TEDotProductAttention
    return functools.partial(_by_transformer_engine, module(softmax_scale=scale, **given))


def _by_flash(attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, lengths: Any) -> Tensor:
    return attend(
        query,
        key,
        value.contiguous(),
        lengths.cu_seqlens_q,
        lengths.cu_seqlens_kv,
        lengths.max_seqlen_q,
        lengths.max_seqlen_kv,
    )


def _by_ascend(
    attend: Callable[..., tuple[Tensor, ...]], query: Tensor, key: Tensor, value: Tensor, lengths: Any
) -> Tensor:
    attended, *_ = attend(
        query,
        key,
        value.contiguous(),
        query.shape[1],
        "TND",  # tokens, heads, width
        atten_mask=_later(query.device),
        actual_seq_qlen=lengths.ends,
        actual_seq_kvlen=lengths.ends,
    )
    return attended


@functools.cache
def _later(device: torch.device) -> Tensor:
    """True where a key comes after the query, which is not to see it."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)


def _by_transformer_engine(module: Any, query: Tensor, key: Tensor, value: Tensor, lengths: Any) -> Tensor:
    from megatron.core.transformer.enums import AttnMaskType

    attended: Tensor = module(query, key, value, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=lengths)
    return attended


def transformer_engine(key: str) -> Any:
    """Megatron's classes around it.

    Args:
        key: what of the configuration needs it.

    Raises:
        ConfigError: Megatron cannot import it.
    """
    from megatron.core.extensions import transformer_engine

    if not transformer_engine.HAVE_TE:
        raise ConfigError(
            f"{key} needs Transformer Engine, which Megatron-core cannot import here; "
            f"{PACKAGES[Attention.TRANSFORMER_ENGINE].command}, or leave that out"
        )
    return transformer_engine
