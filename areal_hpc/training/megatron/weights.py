"""Whole tensors in Hugging Face names, to and from the parts that the ranks hold.

    weights = Weights(chunks, architecture, place)
    for parameter, part in weights.cut(read): ...   read(name) gives a whole tensor; a rank asks for what it holds of
    for name, tensor in weights.whole(of): ...      of(parameter) gives this rank's part of what is wanted
    for parameter, slices in weights.held(): ...    which slices of the whole tensors this rank's parts are made of

``whole`` is collective and gives every rank all tensors in one order, sorted by name, the same bytes for every layout.
Of each weight one stage (and, of an expert, one expert-parallel rank) has the parts: they are gathered over its
tensor-parallel ranks and sent to the others. At a time a rank holds one weight and those of its companions that sort
later, such as the query and value projections until the output projection has gone by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from areal_hpc.collective import meeting
from areal_hpc.pretrained.architecture import Architecture
from areal_hpc.pretrained.lora import is_adapter
from areal_hpc.training.megatron.names import (
    EMBEDDING,
    HEAD,
    Slice,
    Weight,
    cut,
    first_layer,
    joined,
    slices,
    weight_of,
)
from areal_hpc.training.megatron.parallel import Place
from areal_hpc.training.ranks import Ranks

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Home:
    """Which ranks have the parts of some tensors."""

    stage: int
    expert_rank: int | None  # None where all expert-parallel ranks of the stage have them
    shapes: tuple[tuple[int, ...], ...]  # of the whole tensors


class Weights:
    """One rank's view. ``chunks`` are as ``model.build`` made them.

    Args:
        adapters: look at these, which chunks may have got since, and not at the model's own weights.
    """

    def __init__(
        self, chunks: Sequence[Any], architecture: Architecture, place: Place, *, adapters: bool = False
    ) -> None:
        self._architecture, self._place = architecture, place
        self._local: dict[Names, tuple[Weight, Parameter]] = {}
        self._copies: list[Parameter] = []  # of a tied embedding, on the last stage
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if is_adapter(name) is adapters:
                    self._add(weight_of(name, first_layer(chunk), self._first_expert(chunk)), parameter)
        self._homes = self._find_homes()

    def _first_expert(self, chunk: Any) -> int:
        num_experts = chunk.config.num_moe_experts or 0
        return int(self._place.expert.rank() * (num_experts // self._place.expert.size()))

    def _add(self, weight: Weight, parameter: Parameter) -> None:
        if self._architecture.tied and weight.names == (HEAD,):
            self._copies.append(parameter)
        else:
            self._local[weight.names] = (weight, parameter)

    def _find_homes(self) -> dict[Names, _Home]:
        """Where everything is, by what all ranks tell; the order is that of the smallest name."""
        here = self._place.expert.rank()
        mine = [
            [
                weight.names,
                None if weight.expert is None else here,
                self._whole_shapes(weight, part),
            ]
            for weight, part in self._local.values()
        ]
        homes: dict[Names, _Home] = {}
        for stage, expert_rank, shapes, names in self._told(mine):
            homes[names] = _Home(stage=stage, expert_rank=expert_rank, shapes=shapes)
        return dict(sorted(homes.items(), key=lambda item: min(item[0])))

    def _whole_shapes(self, weight: Weight, part: Parameter) -> list[tuple[int, ...]]:
        parts = [torch.empty(part.shape, device="meta")] * self._group(weight).size()
        return [tuple(tensor.shape) for tensor in joined(weight, parts, self._architecture)]

    def _told(self, mine: list[Any]) -> Iterator[tuple[int, int | None, tuple[tuple[int, ...], ...], Names]]:
        """Every entry of every expert-parallel rank of every stage."""
        of_stage = [one for told in Ranks(self._place.expert, self._place.ranks.device).gather(mine) for one in told]
        stages = Ranks(self._place.pipeline, self._place.ranks.device).gather(of_stage)
        for stage, told in enumerate(stages):
            for names, expert_rank, shapes in told:
                yield stage, expert_rank, tuple(tuple(shape) for shape in shapes), tuple(names)

    def _group(self, weight: Weight) -> Any:
        return self._place.tensor if weight.expert is None else self._place.expert_tensor

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every whole tensor of the model, by name."""
        return {
            name: shape for names, home in self._homes.items() for name, shape in zip(names, home.shapes, strict=True)
        }

    def held(self) -> Iterator[tuple[Parameter, list[Slice]]]:
        """This rank's parameters, each with the slices that it is made of."""
        shapes = self.shapes
        copies = [(replace(weight_of("output_layer.weight"), names=(EMBEDDING,)), copy) for copy in self._copies]
        for weight, parameter in [*self._local.values(), *copies]:
            group = self._group(weight)
            whole = [shapes[name] for name in weight.names]
            yield parameter, slices(weight, whole, self._architecture, group.size(), group.rank())

    def kept(self) -> Iterator[tuple[Parameter, list[Slice]]]:
        """What this rank's data-parallel group is to save of ``held``: what several groups hold, one of them saves."""
        elsewhere = set(self._copies)
        if self._place.tensor.rank() > 0:
            elsewhere |= {parameter for weight, parameter in self._local.values() if weight.split.is_whole()}
        return ((parameter, of_whole) for parameter, of_whole in self.held() if parameter not in elsewhere)

    def cut(self, read: Callable[[str], Tensor]) -> Iterator[tuple[Parameter, Tensor]]:
        """This rank's parameters, each with its part of what ``read`` gives for its names; one in memory at a time."""
        for weight, parameter in self._local.values():
            group = self._group(weight)
            whole = [read(name) for name in weight.names]
            yield parameter, cut(weight, whole, self._architecture, group.size(), group.rank())
        for parameter in self._copies:
            weight, group = weight_of("output_layer.weight"), self._place.tensor
            yield parameter, cut(weight, [read(EMBEDDING)], self._architecture, group.size(), group.rank())

    def whole(self, of: Callable[[Parameter], Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor, sorted by name, of what ``of`` gives for each parameter: its shape, and ``dtype``."""
        waiting: dict[str, Tensor] = {}
        for names, following in pairwise([*self._homes, None]):
            assert names is not None
            waiting |= zip(names, self._gathered(names, of, dtype), strict=True)
            for name in sorted(waiting):
                if following is None or name < min(following):
                    yield name, waiting.pop(name)

    @torch.no_grad()
    def _gathered(self, names: Names, of: Callable[[Parameter], Tensor], dtype: torch.dtype) -> list[Tensor]:
        home, place = self._homes[names], self._place
        if names in self._local:
            weight, parameter = self._local[names]
            tensors = [t.contiguous() for t in joined(weight, self._parts(weight, of(parameter)), self._architecture)]
        else:
            tensors = [torch.empty(shape, dtype=dtype, device=place.ranks.device) for shape in home.shapes]
        if home.expert_rank is not None and home.stage == place.pipeline.rank():
            _send(tensors, place.expert, home.expert_rank)
        _send(tensors, place.pipeline, home.stage)
        return tensors

    def _parts(self, weight: Weight, part: Tensor) -> list[Tensor]:
        group = self._group(weight)
        if group.size() == 1:
            return [part]
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        with meeting(f"the parts of {weight.names[0]}", group):
            dist.all_gather(parts, part.contiguous(), group=group)
        return parts


def _send(tensors: Sequence[Tensor], group: Any, source: int) -> None:
    """Broadcast the ``tensors`` of the group's rank ``source`` into those of the others."""
    if group.size() > 1:
        with meeting("a weight of another stage or expert rank", group):
            for tensor in tensors:
                dist.broadcast(tensor, group=group, group_src=source)
