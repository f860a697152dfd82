"""New weights beside the model that a worker of SGLang or vLLM computes with: received in a thread, proven, and kept.

What comes is put into host memory, since a device seldom has room for a model twice. What of it is kept after a load
is what a later update may bring changes of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from areal_hpc.buckets import num_bytes, unpack
from areal_hpc.collective import join_group
from areal_hpc.delta import Delta, Weight, apply
from areal_hpc.errors import WeightUpdateError
from areal_hpc.transfer import GroupAddress, TensorSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class Arrivals:
    """What a worker has of the trainer's."""

    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    keeps: bool = False
    held: Tensors = field(default_factory=dict)
    """What the model computes with, in host memory; only with ``keeps``."""
    base: Tensors = field(default_factory=dict)
    """What was held when the update began; changes are applied to it, so that it is worth nothing after a failure."""
    new: Tensors = field(default_factory=dict)
    coming: Future[None] | None = None
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "weights"))

    def begin(self, *, keeps: bool) -> None:
        if self.coming is not None:
            self.coming.exception()  # its group is gone by now; whatever it was, nobody wants it any more
            self.coming = None
        self.base, self.held, self.new = self.held, {}, {}
        self.keeps = keeps

    def enter(self, address: GroupAddress, rank: int, timeout_s: float) -> None:
        """Enter the trainer's group."""
        self.groups[address.name] = join_group(address, rank, timeout_s)

    def receive(self, group: str, specs: Sequence[TensorSpec], device: torch.device, *, checked: bool) -> None:
        """Take one bucket that rank 0 broadcasts. Raises WeightUpdateError if it is not what was sent."""
        buffer = torch.empty(sum(map(num_bytes, specs)), dtype=torch.uint8, device=device)
        dist.broadcast(buffer, group=self.groups[group], group_src=0)
        self.new.update(self.taken(unpack(buffer, specs, checked=checked)))

    def taken(self, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors in host memory: those that came, and those of which changes came.

        Raises:
            WeightUpdateError: changes came of something that is not held.
        """
        for name, weight in weights:
            if not isinstance(weight, Delta):
                self.base.pop(name, None)  # or there would be room for two models in the course of a whole update
                yield name, weight.cpu()
                continue
            if name not in self.base:
                raise WeightUpdateError(f"a delta came for weight {name!r}, of which nothing is held; send it whole")
            apply(self.base[name], weight)
            yield name, self.base[name]

    def settle(self, new: Tensors) -> None:
        """``new`` is what the model computes with."""
        self.held, self.base, self.new = (new if self.keeps else {}), {}, {}
