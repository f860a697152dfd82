"""New weights beside the model that a worker of SGLang or vLLM computes with: received in a thread, proven, and kept.

    begin(keeps, adapters)       an update: what came of an earlier one and was not loaded is forgotten
    receive(...)                 any number: a bucket is received and proven
    lacks()                      why the model cannot be made of what has come
    weights(device)              all of it; of adapters that came alone, the weights that they make
    settle()                     the model computes with it

What comes is put into host memory, since a device seldom has room for a model twice. What of it is kept after a load
is what a later update may bring changes of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from areal_hpc.accelerator import beside
from areal_hpc.buckets import num_bytes, unpack
from areal_hpc.collective import broadcast
from areal_hpc.delta import Delta, Weight, apply
from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation.served.merging import Merging, Tensors
from areal_hpc.transfer import TensorSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(slots=True)
class Arrivals:
    """The state of weight updates in one worker: groups it has joined, weights it holds, weights it has received."""

    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    keeps: bool = False
    held: Tensors = field(default_factory=dict)
    """What the model computes with, in host memory; only with ``keeps``."""
    base: Tensors = field(default_factory=dict)
    """What was held when the update began; changes are applied to it, so that it is worth nothing after a failure."""
    new: Tensors = field(default_factory=dict)
    merging: Merging | None = None
    """Merges adapters into the model; None where updates bring the model's weights."""
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "weights"))

    def begin(self, *, keeps: bool, adapters: Mapping[str, Any] | None = None) -> None:
        """Begin an update. Call it only when nothing of an earlier one is still coming.

        Args:
            keeps: whether what is loaded is kept, so that a later update may bring changes of it alone.
            adapters: what ``merging.order`` says, where updates bring these.
        """
        self.base, self.held, self.new = self.held, {}, {}
        self.keeps = keeps
        if adapters is not None:
            self.merging = self.merging or Merging(adapters)
            self.merging.begin()

    def receive(self, group: str, specs: Sequence[TensorSpec], device: torch.device, *, checked: bool) -> None:
        """Take one bucket that rank 0 broadcasts. Raises WeightUpdateError if it is not what was sent."""
        with beside(device):  # or the engine, which samples meanwhile, would wait for it
            buffer = torch.empty(sum(map(num_bytes, specs)), dtype=torch.uint8, device=device)
            broadcast(buffer, self.groups[group])
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

    def is_ready(self) -> bool:
        """Whether the frozen weights that adapters are merged into have been read, or cannot be; or there are none."""
        return self.merging is None or self.merging.is_ready()

    def lacks(self) -> str:
        """Why the model cannot be made of what has come; empty if it can, as far as is known here."""
        return "" if self.merging is None else self.merging.lacks(self.new)

    def weights(self, device: torch.device | str) -> Iterable[tuple[str, torch.Tensor]]:
        """What the model is to compute with, by the names of its own weights."""
        return list(self.new.items()) if self.merging is None else self.merging.whole(self.new, device)

    def settle(self) -> None:
        """The model computes with what has come."""
        self.held, self.base, self.new = (self.new if self.keeps else {}), {}, {}
