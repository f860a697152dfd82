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


def test_ranks_of_one_machine_take_different_devices() -> None:
    assert [accelerator.device_of(accelerator.CUDA, rank, 4) for rank in range(4)] == [
        "cuda:0",
        "cuda:1",
        "cuda:2",
        "cuda:3",
    ]
    assert accelerator.device_of(accelerator.NPU, 7, 8) == "npu:7"


@pytest.mark.parametrize("num_devices", [0, 1, 2])
def test_a_rank_without_a_device_of_its_own_is_refused(num_devices: int) -> None:
    with pytest.raises(ConfigError, match=rf"there are {num_devices}; lower trainer\.ranks, .* CUDA_VISIBLE_DEVICES="):
        accelerator.device_of(accelerator.CUDA, 2, num_devices)


def test_the_device_that_is_taken_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(accelerator, "detect", lambda: accelerator.CUDA)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    assert accelerator.take_device(1) == "cuda:1"
    assert current == [1]


def test_processes_on_the_cpu_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "detect", lambda: accelerator.CPU)
    assert [accelerator.take_device(rank) for rank in (0, 1, 63)] == ["cpu"] * 3
