"""Megatron's parameters in Hugging Face names: what each is called there, how a whole becomes parts, and parts a whole.

    weight = weight_of("decoder.layers.0.self_attention.linear_qkv.weight", first_layer=4)
    weight.names                                    ("model.layers.4.self_attn.q_proj.weight", k_proj, v_proj)
    cut(weight, tensors, shape, ranks, rank)        whole tensors in these names -> the part of one rank
    joined(weight, parts, shape)                    the parts of all ranks -> whole tensors in these names
    slices(weight, shapes, shape, ranks, rank)      which slices of the whole tensors one rank's part is made of

Every value is copied and none computed with, so there and back is bit for bit the same. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from areal_hpc.pretrained.architecture import Architecture

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class Split(StrEnum):
    """How tensor-parallel ranks share a weight."""

    WHOLE = "whole"  # every rank holds all of it
    STACKED = "stacked"  # the same of several tensors, one below the other
    WORDS = "words"  # rows, with rows of zeros added to make the shares equal
    INPUTS = "inputs"  # columns
    GATED = "gated"  # rows of the gate, then the same rows of the up projection
    ATTENTION = "attention"  # for each group of heads its queries, then its key, then its value

    def is_whole(self) -> bool:
        """Whether every rank holds all of it."""
        return self in (Split.WHOLE, Split.STACKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One Megatron parameter, in the names of the whole model."""

    names: tuple[str, ...]
    split: Split
    expert: int | None = None  # which one's it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A piece of a whole tensor, and where a rank has it in its part of the weight."""

    name: str
    dim: int  # of rows or of columns
    start: int  # the first of them in the whole tensor
    places: Tensor  # int64 [N], of each in the rank's part
    whole: tuple[int, ...]  # shape of the tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.whole[: self.dim], self.places.numel(), *self.whole[self.dim + 1 :])

    @property
    def offset(self) -> tuple[int, ...]:
        return tuple(self.start if dim == self.dim else 0 for dim in range(len(self.whole)))


_LAYER: Final = r"decoder\.layers\.(?P<layer>\d+)\."
_EXPERT: Final = _LAYER + r"mlp\.experts\.local_experts\.(?P<expert>\d+)\."
_RULES: Final[tuple[tuple[str, Split, tuple[str, ...]], ...]] = (
    (r"embedding\.word_embeddings\.weight", Split.WORDS, (EMBEDDING,)),
    (r"output_layer\.weight", Split.WORDS, (HEAD,)),
    (r"score\.weight", Split.WHOLE, ("score.weight",)),
    (r"value_head\.(?P<kind>weight|bias)", Split.WHOLE, ("value_head.{kind}",)),
    (r"decoder\.final_layernorm\.weight", Split.WHOLE, ("model.norm.weight",)),
    (_LAYER + r"input_layernorm\.weight", Split.WHOLE, ("input_layernorm.weight",)),
    (_LAYER + r"pre_mlp_layernorm\.weight", Split.WHOLE, ("post_attention_layernorm.weight",)),
    (
        _LAYER + r"self_attention\.linear_qkv\.(?P<kind>weight|bias|lora_B\.weight)",
        Split.ATTENTION,
        ("self_attn.q_proj.{kind}", "self_attn.k_proj.{kind}", "self_attn.v_proj.{kind}"),
    ),
    (
        _LAYER + r"self_attention\.linear_qkv\.(?P<kind>lora_A\.weight)",
        Split.STACKED,
        ("self_attn.q_proj.{kind}", "self_attn.k_proj.{kind}", "self_attn.v_proj.{kind}"),
    ),
    (
        _LAYER + r"self_attention\.linear_proj\.(?P<kind>weight|lora_A\.weight)",
        Split.INPUTS,
        ("self_attn.o_proj.{kind}",),
    ),
    (
        _LAYER + r"self_attention\.linear_proj\.(?P<kind>lora_B\.weight)",
        Split.WHOLE,
        ("self_attn.o_proj.{kind}",),
    ),
    (_LAYER + r"self_attention\.q_layernorm\.weight", Split.WHOLE, ("self_attn.q_norm.weight",)),
    (_LAYER + r"self_attention\.k_layernorm\.weight", Split.WHOLE, ("self_attn.k_norm.weight",)),
    (
        _LAYER + r"mlp\.linear_fc1\.(?P<kind>weight|lora_B\.weight)",
        Split.GATED,
        ("mlp.gate_proj.{kind}", "mlp.up_proj.{kind}"),
    ),
    (
        _LAYER + r"mlp\.linear_fc1\.(?P<kind>lora_A\.weight)",
        Split.STACKED,
        ("mlp.gate_proj.{kind}", "mlp.up_proj.{kind}"),
    ),
    (_LAYER + r"mlp\.linear_fc2\.(?P<kind>weight|lora_A\.weight)", Split.INPUTS, ("mlp.down_proj.{kind}",)),
    (_LAYER + r"mlp\.linear_fc2\.(?P<kind>lora_B\.weight)", Split.WHOLE, ("mlp.down_proj.{kind}",)),
    (_LAYER + r"mlp\.router\.weight", Split.WHOLE, ("mlp.gate.weight",)),
    (
        _EXPERT + r"linear_fc1\.weight",
        Split.GATED,
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
    ),
    (_EXPERT + r"linear_fc2\.weight", Split.INPUTS, ("mlp.experts.{expert}.down_proj.weight",)),
)
_COMPILED: Final = tuple((re.compile(pattern), split, names) for pattern, split, names in _RULES)


def weight_of(name: str, first_layer: int = 0, first_expert: int = 0) -> Weight:
    """What Megatron's parameter ``name`` is in the whole model.

    Args:
        first_layer: number, in the whole model, of the first layer of this chunk.
        first_expert: the same of the first expert on this rank.
    """
    for pattern, split, names in _COMPILED:
        if found := pattern.fullmatch(name):
            groups = found.groupdict()
            expert = int(groups["expert"]) + first_expert if "expert" in groups else None
            prefix = f"model.layers.{int(groups['layer']) + first_layer}." if "layer" in groups else ""
            values = {"kind": groups.get("kind"), "expert": expert}
            return Weight(names=tuple(prefix + one.format(**values) for one in names), split=split, expert=expert)
    raise AssertionError(f"no rule for Megatron's parameter {name}")


def first_layer(chunk: Any) -> int:
    """Number, in the whole model, of the first layer of Megatron's ``chunk``."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    return int(get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage))


def cut(weight: Weight, tensors: Sequence[Tensor], model: Architecture, ranks: int, rank: int) -> Tensor:
    """Rank's part of the whole ``tensors``, which stand in the order of ``weight.names``."""
    match weight.split:
        case Split.WHOLE:
            return tensors[0]
        case Split.STACKED:
            return torch.cat(list(tensors))
        case Split.WORDS:
            rows = -(-model.vocab_size // ranks)
            part = tensors[0][rank * rows : (rank + 1) * rows]
            return pad(part, (0, 0, 0, rows - part.shape[0]))
        case Split.INPUTS:
            return tensors[0].chunk(ranks, 1)[rank]
        case Split.GATED:
            return torch.cat([tensor.chunk(ranks)[rank] for tensor in tensors])
        case Split.ATTENTION:
            # With fewer keys than ranks a part begins and ends within a group: Megatron cuts all of them alike.
            return torch.cat([_groups(tensor, model) for tensor in tensors], 1).flatten(0, 1).chunk(ranks)[rank]


def joined(weight: Weight, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
    """Whole tensors, in the order of ``weight.names``, from the parts of all ranks."""
    match weight.split:
        case Split.WHOLE:
            return [parts[0]]
        case Split.STACKED:
            return list(parts[0].chunk(len(weight.names)))
        case Split.WORDS:
            return [torch.cat(list(parts))[: model.vocab_size]]
        case Split.INPUTS:
            return [torch.cat(list(parts), 1)]
        case Split.GATED:
            halves = [part.chunk(2) for part in parts]
            return [torch.cat(half) for half in zip(*halves, strict=True)]
        case Split.ATTENTION:
            sizes = [size // model.num_kv_heads for size in model.qkv_sizes]
            return [part.flatten(0, 1) for part in torch.split(_groups(torch.cat(list(parts)), model), sizes, 1)]


def slices(
    weight: Weight, shapes: Sequence[tuple[int, ...]], model: Architecture, ranks: int, rank: int
) -> list[Slice]:
    """What the rank's part is made of; rows that only make shares equal are in none of them.

    Found by cutting the numbers of the rows (or columns) as the weight itself is cut.

    Args:
        shapes: of the whole tensors, in the order of ``weight.names``.
    """
    dim = 1 if weight.split is Split.INPUTS else 0
    sizes = [shape[dim] for shape in shapes]
    numbers = torch.arange(1, 1 + sum(sizes))  # 0 is what ``cut`` fills up with
    columns = [part.view((-1, 1) if dim == 0 else (1, -1)) for part in torch.split(numbers, sizes)]
    mine = cut(weight, columns, model, ranks, rank).flatten()
    places = mine.argsort(stable=True)[int((mine == 0).sum()) :]
    found, first = [], 1
    for name, shape, size in zip(weight.names, shapes, sizes, strict=True):
        of_name = places[(mine[places] >= first) & (mine[places] < first + size)]
        if of_name.numel():
            start = int(mine[of_name[0]]) - first
            assert int(mine[of_name[-1]]) - first - start == of_name.numel() - 1, f"{name} is in several pieces"
            found.append(Slice(name=name, dim=dim, start=start, places=of_name, whole=shape))
        first += size
    return found


def _groups(tensor: Tensor, model: Architecture) -> Tensor:
    """The rows by groups of heads that share a key: [groups, rows of each, ...]."""
    return tensor.reshape(model.num_kv_heads, -1, *tensor.shape[1:])
