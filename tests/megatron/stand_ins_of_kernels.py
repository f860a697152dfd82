"""Packages that need a device, as they document the calls that we make: exact attention by one mask for everything.

with installed():                       in a process of its own: each can be imported, and Megatron takes itself to have
    ...                                 Transformer Engine
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor


def attended(
    query: Tensor, key: Tensor, value: Tensor, ends: Sequence[int], scale: float, places: Tensor | None = None
) -> Tensor:
    """[T, heads, D]; ``places`` are those of the queries among the keys, if not one for each."""
    everywhere = torch.arange(key.shape[0])
    places = everywhere if places is None else places
    sequence = torch.bucketize(everywhere, torch.tensor(ends), right=True)
    seen = (sequence[places, None] == sequence) & (places[:, None] >= everywhere)
    per_group = query.shape[1] // key.shape[1]
    key, value = (of_groups.repeat_interleave(per_group, 1).float() for of_groups in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """flash-attn 2.7."""
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and causal and softmax_scale and dropout_p == 0.0
    assert all(one.stride(-1) == 1 for one in (q, k, v))
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    return attended(q, k, v, cu_seqlens_q[1:].tolist(), softmax_scale)


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """torch_npu, from CANN 8: lengths are the ends of sequences, and mode 3 wants the compressed causal mask."""
    assert query.dtype == torch.bfloat16 and input_layout == "TND" and head_num == query.shape[1]
    assert all(one.is_contiguous() for one in (query, key, value))
    assert atten_mask is not None and atten_mask.dtype == torch.bool and atten_mask.shape == (2048, 2048)
    assert torch.equal(atten_mask, torch.ones(2048, 2048).triu(1) > 0) and sparse_mode == 3
    assert actual_seq_qlen is not None and actual_seq_qlen == actual_seq_kvlen
    assert actual_seq_qlen[-1] == query.shape[0] and all(type(end) is int for end in actual_seq_qlen)
    nothing = torch.empty(0)
    return attended(query, key, value, actual_seq_qlen, scale), nothing, nothing, nothing, 0, 0, 0


class TEDotProductAttention(torch.nn.Module):
    """Megatron's class of that name."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **more: Any,
    ) -> None:
        super().__init__()
        assert attn_mask_type.name == "causal" and attention_type == "self" and layer_number >= 1
        assert softmax_scale == 1.0 / math.sqrt(config.kv_channels)
        self._scale, self._group = softmax_scale, more["pg_collection"].cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """[T, heads * D]. Of context ranks each has two chunks of every sequence, one early and one late."""
        assert attention_mask is None and attn_mask_type.name == "causal" and packed_seq_params.qkv_format == "thd"
        starts = packed_seq_params.cu_seqlens_q.tolist()
        ranks, rank = self._group.size(), self._group.rank()
        places = [chunks_of(starts, one, ranks) for one in range(ranks)]
        key, value = (self._of_all(one, places) for one in (key, value))
        return attended(query, key, value, starts[1:], self._scale, places[rank]).flatten(1)

    def _of_all(self, mine: Tensor, places: Sequence[Tensor]) -> Tensor:
        if len(places) == 1:
            return mine
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in places]
        dist.all_gather(parts, mine.contiguous(), group=self._group)
        return torch.cat(parts)[torch.cat(list(places)).argsort()]


def chunks_of(starts: Sequence[int], rank: int, ranks: int) -> Tensor:
    """Places of a context rank's tokens, as Transformer Engine deals them."""
    mine: list[int] = []
    for start, end in pairwise(starts):
        chunk = (end - start) // (2 * ranks) if ranks > 1 else end - start
        for part in (rank, 2 * ranks - 1 - rank)[: min(ranks, 2)]:
            mine += range(start + part * chunk, start + (part + 1) * chunk)
    return torch.tensor(mine)


class FusedAdam(torch.optim.Optimizer):
    """Transformer Engine's and Apex's: AdamW whose groups count the updates, from the first one that they see."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,  # then the number of updates would be a tensor
    ) -> None:
        assert adam_w_mode and not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for one in group["params"]:
                if one.grad is not None:
                    self._update(one, group)

    def _update(self, one: Tensor, group: dict[str, Any]) -> None:
        state = self.state[one]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(one), torch.zeros_like(one)
        (beta1, beta2), step = group["betas"], group["step"]
        state["exp_avg"].lerp_(one.grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(one.grad.square(), 1 - beta2)
        mean, square = state["exp_avg"] / (1 - beta1**step), state["exp_avg_sq"] / (1 - beta2**step)
        one.sub_(group["lr"] * (mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * one))


def linear_of(layer: type) -> type:
    """Megatron's own in the place of Transformer Engine's, which takes tokens and widths by sixteens only."""

    class Linear(layer):  # type: ignore[misc]
        def forward(self, hidden: Tensor, *given: Any, **named: Any) -> Any:
            assert hidden.shape[0] * hidden.shape[1] % 16 == 0, hidden.shape
            assert all(side % 16 == 0 for side in self.weight.shape), self.weight.shape
            return super().forward(hidden, *given, **named)

    return Linear


def _require_same_arguments(extensions: ModuleType) -> None:
    """Of the stand-in's methods and those of Megatron's class, which without Transformer Engine exists as text only."""
    (true,) = (
        node
        for node in ast.walk(ast.parse(inspect.getsource(extensions)))
        if isinstance(node, ast.ClassDef) and node.name == TEDotProductAttention.__name__
    )
    for method in (node for node in true.body if isinstance(node, ast.FunctionDef)):
        if method.name in ("__init__", "forward"):
            ours = list(inspect.signature(getattr(TEDotProductAttention, method.name)).parameters)
            theirs = [argument.arg for argument in method.args.args]
            known = [name for name in ours if name != "more"]
            assert theirs[: len(known)] == known, theirs


@contextmanager
def installed() -> Iterator[None]:
    extensions = importlib.import_module("megatron.core.extensions.transformer_engine")
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    _require_same_arguments(extensions)
    with ExitStack() as stack:
        for package, function in (("flash_attn", flash_attn_varlen_func), ("torch_npu", npu_fusion_attention)):
            module = ModuleType(package)
            module.__spec__ = ModuleSpec(package, None)
            setattr(module, function.__name__, function)
            stack.enter_context(mock.patch.dict(sys.modules, {package: module}))
        stack.enter_context(mock.patch.object(extensions, "HAVE_TE", True))
        stack.enter_context(mock.patch.object(extensions, "TEDotProductAttention", TEDotProductAttention))
        optimizers = importlib.import_module("megatron.core.optimizer")
        for module in (optimizers, optimizers.distrib_optimizer):
            stack.enter_context(mock.patch.object(module, "Adam", FusedAdam))
        stack.enter_context(mock.patch.object(optimizers, "USING_PYTORCH_OPTIMIZER", False))
        for name in ("ColumnParallelLinear", "RowParallelLinear"):
            stack.enter_context(mock.patch.object(extensions, f"TE{name}", linear_of(getattr(layers, name))))
        yield
