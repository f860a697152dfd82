"""Statistics that can be added up: over micro-batches, then over ranks, in any order.

A statistic is a pair of scalar tensors ``(sum, count)`` and stands for the mean ``sum / count``. A name that ends in
``_max`` or ``_min`` holds the extreme in the place of the sum, still with the count it was taken over: such pairs merge
by taking the larger or the smaller and adding the counts. Nothing counted is -inf or +inf there, and no number (nan)
once finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Stat = tuple[Tensor, Tensor]
Stats = dict[str, Stat]


def mean_of(values: Tensor, where: Tensor) -> Stat:
    """Sum and count of the values [T] at ``where`` bool [T]; what lies elsewhere may be nan."""
    return torch.where(where, values, 0.0).detach().sum(), where.sum()


def fraction_of(part: Tensor, whole: Tensor) -> Stat:
    """How many of ``whole`` bool [T] are also ``part`` bool [T]."""
    return (part & whole).sum().float(), whole.sum()


def max_of(values: Tensor, where: Tensor) -> Stat:
    """The largest value at ``where``; under a name that ends in ``_max``."""
    return _extreme(values, where, -torch.inf).max(), where.sum()


def min_of(values: Tensor, where: Tensor) -> Stat:
    """The smallest value at ``where``; under a name that ends in ``_min``."""
    return _extreme(values, where, torch.inf).min(), where.sum()


def merge(parts: Sequence[Stats]) -> Stats:
    """One set of statistics from several that have the same names."""
    if not parts:
        return {}
    return {name: _merge_one(name, [part[name] for part in parts]) for name in parts[0]}


def finish(stats: Mapping[str, Stat]) -> dict[str, float]:
    """Each statistic as one number; nan where nothing was counted."""
    return {name: _finish_one(name, *pair) for name, pair in stats.items()}


def _extreme(values: Tensor, where: Tensor, nothing: float) -> Tensor:
    """The values at ``where`` with ``nothing`` appended, so that an empty micro-batch has an extreme too."""
    chosen = torch.where(where, values.detach().float(), nothing)
    return torch.cat([chosen, chosen.new_tensor([nothing])])


def _merge_one(name: str, pairs: Sequence[Stat]) -> Stat:
    firsts = torch.stack([first for first, _ in pairs])
    count = torch.stack([count for _, count in pairs]).sum()
    if name.endswith("_max"):
        return firsts.max(), count
    if name.endswith("_min"):
        return firsts.min(), count
    return firsts.sum(), count


def _finish_one(name: str, first: Tensor, count: Tensor) -> float:
    if int(count) == 0:
        return float("nan")
    return float(first) if name.endswith(("_max", "_min")) else float(first) / float(count)
