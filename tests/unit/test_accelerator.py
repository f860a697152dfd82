"""Devices are rows of facts."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from areal_hpc import accelerator
from areal_hpc.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "collective", "visible"),
    [("cpu", "gloo", ""), ("cuda", "nccl", "CUDA_VISIBLE_DEVICES"), ("npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES")],
)
def test_each_device_has_its_collective_and_its_binding(name: str, collective: str, visible: str) -> None:
    row = accelerator.named(name)
    assert (row.device, row.collective, row.visible_devices) == (name, collective, visible)


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'tpu' is not known; use one of cpu, cuda, npu"):
        accelerator.named("tpu")


@pytest.mark.parametrize("name", ["cuda", "npu"])
def test_what_torch_reports_is_what_is_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class Device:
        type = name

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", Device)
    assert accelerator.detect() is accelerator.ACCELERATORS[name]


def test_without_an_accelerator_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert accelerator.detect() is accelerator.CPU
