"""Devices as rows of facts: what differs between CPU, CUDA and Ascend NPU, and nothing else.

The only place that may say "cuda" or "npu", and the only door to torch_npu.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

from areal_hpc.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One kind of device."""

    name: str
    device: str
    """Device type as torch spells it."""
    collective: str
    """Backend of collective operations on its tensors."""
    visible_devices: str
    """Environment variable that binds a process to devices before Python starts; empty where there is none."""
    gres: str
    """Generic resource that Slurm knows it by; empty where there is none."""
    extension: str = ""
    """Module whose import registers device and backend with torch; empty where torch has them."""


CPU = Accelerator(name="cpu", device="cpu", collective="gloo", visible_devices="", gres="")
CUDA = Accelerator(name="cuda", device="cuda", collective="nccl", visible_devices="CUDA_VISIBLE_DEVICES", gres="gpu")
NPU = Accelerator(
    name="npu",
    device="npu",
    collective="hccl",
    visible_devices="ASCEND_RT_VISIBLE_DEVICES",
    gres="npu",
    extension="torch_npu",
)
ACCELERATORS = {row.name: row for row in (CPU, CUDA, NPU)}


def detect() -> Accelerator:
    """The accelerator of this process: what ``torch.accelerator`` reports, else the CPU."""
    import torch

    if importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")
    if not torch.accelerator.is_available():
        return CPU
    device = torch.accelerator.current_accelerator()
    return named(device.type) if device is not None else CPU


def named(name: str) -> Accelerator:
    """The row called ``name``.

    Raises:
        ConfigError: there is no such row.
    """
    if name not in ACCELERATORS:
        raise ConfigError(f"accelerator {name!r} is not known; use one of {', '.join(sorted(ACCELERATORS))}")
    return ACCELERATORS[name]
