"""A trainer's tensors in host memory, and from there on disk: the first is what training waits for, the second is not.

    masters = HostCopy()                    once
    tensors = masters.take(live.items())    at a step's edge: one copy into memory that is kept from save to save
    write_tensors(tensors, path)            later, in any thread, before the next ``take``

Memory for a save is one copy of the state, however many saves there are: safetensors writes from where the bytes lie,
and they are read back for comparison one tensor at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from areal_hpc.errors import CorruptRecord
from areal_hpc.pretrained.files import save_tensors


class HostCopy:
    """Host memory for some named tensors; pinned where they live on a device, so that the copy runs at full speed."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def take(self, live: Iterable[tuple[str, Tensor]]) -> Mapping[str, Tensor]:
        """The tensors as they are now, until the next call; names, shapes and dtypes are the same in each call.

        They are asked for one by one, so they need not exist at the same time.
        """
        any_on_device = False
        for name, tensor in live:
            on_device = tensor.device.type != "cpu"
            if name not in self._tensors:
                self._tensors[name] = torch.empty_like(
                    tensor, device="cpu", memory_format=torch.contiguous_format, pin_memory=on_device
                )
            self._tensors[name].copy_(tensor.detach(), non_blocking=on_device)
            any_on_device |= on_device
        if any_on_device:
            torch.accelerator.synchronize()
        return self._tensors


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file, make it durable, read it back and compare every bit with memory.

    Raises:
        CorruptRecord: the file does not hold what was written.
        OSError: the disk refused.
    """
    save_tensors(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    with safe_open(path, framework="pt", backend="pread") as stored:  # mapped, a bad disk would be a SIGBUS
        for name, tensor in tensors.items():
            if not same_bits(stored.get_tensor(name), tensor):
                raise CorruptRecord(f"{path}: {name} does not hold what was written; check the disk")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors hold the same bytes: NaN equals itself here, and -0.0 is not 0.0."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
