"""Adapters that came alone, in the weights that a worker of SGLang or vLLM computes with.

    worker                                            thread
    merging.begin()                                   reads the frozen weights, at the first update and never again
    ... the adapters come, proven one by one ...
    merging.lacks(adapters)                           why they cannot be merged yet, or at all
    merging.whole(adapters, device)                   every weight of the model, one at a time: W + scale B A

Such engines keep the adapter that a request began with to its end, and SGLang computes none on a CPU. Merged, they are
updated in mid-answer as ever; and they are merged by what the trainer merges with, so that what it would have sent
whole is what comes out. That the adapters are of these weights their fingerprint tells.

The frozen weights stay in host memory, of which they take as much as the model: those of a rank are whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from areal_hpc.buckets import dtype_named, fingerprint_of
from areal_hpc.config.lora import LoraConfig
from areal_hpc.pretrained.files import read_shapes, read_weights, trainable
from areal_hpc.pretrained.lora import BASE, Shape, merged, travelling_shapes

Tensors = dict[str, torch.Tensor]


def order(model_path: str, dtype: str, lora: LoraConfig) -> dict[str, Any] | None:
    """JSON data that tells a worker in another process which adapters to merge into which model; None where the model
    itself is trained."""
    if lora.rank == 0:
        return None
    terms = {"rank": lora.rank, "alpha": lora.alpha, "target_modules": list(lora.target_modules)}
    return {"model_path": model_path, "dtype": dtype, "lora": terms}


def lora_of(order: Mapping[str, Any]) -> LoraConfig:
    """The adapters' configuration, from such an order."""
    return LoraConfig(**{**order["lora"], "target_modules": tuple(order["lora"]["target_modules"])})


class Merging:
    """Merges adapters into the frozen model's weights, which one worker holds.

    Args:
        order: as the function of that name makes it.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._config = lora_of(order)
        self._directory, self._dtype = Path(order["model_path"]), dtype_named(order["dtype"])
        self._pool = ThreadPoolExecutor(1, "frozen-weights")
        self._reading: Future[tuple[Tensors, int, dict[str, Shape]]] | None = None

    def begin(self) -> None:
        """See to it that the frozen weights are read, or being read; what failed is tried anew."""
        if self._reading is None or (self._reading.done() and self._reading.exception() is not None):
            self._reading = self._pool.submit(self._read)

    def _read(self) -> tuple[Tensors, int, dict[str, Shape]]:
        """The weights by name, their fingerprint, and what an update holds."""
        wanted = set(trainable(read_shapes(self._directory), self._directory))
        stored = read_weights(self._directory)  # mapped files, which may change, or fail, later
        weights = {name: tensor.to(self._dtype, copy=True) for name, tensor in stored if name in wanted}
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        return weights, fingerprint_of(weights.items()), travelling_shapes(shapes, self._config)

    def is_ready(self) -> bool:
        """Whether the frozen weights are read, or cannot be."""
        return self._reading is not None and self._reading.done()

    def wait(self, limit_s: float) -> None:
        """Wait until ``is_ready``, for ``limit_s`` seconds at most."""
        if self._reading is not None:
            wait([self._reading], max(0.0, limit_s))

    def lacks(self, adapters: Mapping[str, torch.Tensor]) -> str:
        """Why these cannot be merged, as they are and now; empty if they can."""
        if self._reading is None or not self._reading.done():
            return f"the frozen weights of {self._directory} are still being read"
        if (error := self._reading.exception()) is not None:
            return f"the frozen weights of {self._directory} cannot be read: {error}"
        _, fingerprint, shapes = self._reading.result()
        came = {name: tuple(one.shape) for name, one in adapters.items()}
        if came != shapes:
            odd = sorted(came.items() ^ shapes.items())[:3]
            return f"these are not the adapters of {self._directory} that model.lora asks for: {odd} came, or did not"
        if int(adapters[BASE]) != fingerprint:
            return (
                f"the adapters are of other weights than those in {self._directory}; see that model.path holds the "
                "same files for the trainer and for every engine"
            )
        return ""

    def whole(
        self, adapters: Mapping[str, torch.Tensor], device: torch.device | str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight of the model with ``adapters`` in it, one of them on ``device`` at a time."""
        assert not self.lacks(adapters), self.lacks(adapters)
        assert self._reading is not None
        frozen = ((name, weight.to(device)) for name, weight in self._reading.result()[0].items())
        return merged(frozen, adapters, self._config.scale)
