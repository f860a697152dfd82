"""Devices are rows of facts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from areal_hpc import accelerator
from areal_hpc.errors import ConfigError, DevicesLost


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


def test_fault_17_who_was_given_devices_and_finds_none_does_not_compute_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accelerator, "detect", lambda: accelerator.CPU)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert accelerator.detect_bound({"CUDA_VISIBLE_DEVICES": "2,3"}) is accelerator.CPU
    assert "computing on the CPU, for which alone torch is built here, beside CUDA_VISIBLE_DEVICES" in caplog.text
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for none in ({}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, {"PATH": "0"}):
        assert accelerator.detect_bound(none) is accelerator.CPU
    said = r"was to compute on CUDA_VISIBLE_DEVICES=2,3, and torch finds no device there; leave that node out"
    with pytest.raises(DevicesLost, match=said):
        accelerator.detect_bound({"CUDA_VISIBLE_DEVICES": "2,3"})
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    with pytest.raises(DevicesLost, match="ASCEND_RT_VISIBLE_DEVICES=0"):
        accelerator.take_device(0)


@pytest.mark.parametrize(
    ("given", "there"),
    [("", 0), ("3", 1), ("0,1", 2), ("3,", 1), ("GPU-8f,GPU-9c", 2), ("NoDevFiles", 1), ("MIG-8f,MIG-9c", 1)],
)
def test_fault_17_who_finds_all_that_it_was_given_computes_on_it(
    monkeypatch: pytest.MonkeyPatch, given: str, there: int
) -> None:
    monkeypatch.setattr(accelerator, "detect", lambda: accelerator.NPU)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: there)
    environment = {"ASCEND_RT_VISIBLE_DEVICES": given, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert accelerator.detect_bound(environment) is accelerator.NPU


def test_fault_17_a_node_that_has_lost_one_of_several_devices_is_as_bad_as_one_that_has_lost_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver shows those before the first that is not there."""
    monkeypatch.setattr(accelerator, "detect", lambda: accelerator.CUDA)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    said = r"was to compute on CUDA_VISIBLE_DEVICES=4,5,6, and torch finds 2 of these 3 there; leave that node out"
    with pytest.raises(DevicesLost, match=said):
        accelerator.detect_bound({"CUDA_VISIBLE_DEVICES": "4,5,6"})


@pytest.mark.parametrize(
    ("found", "there", "num", "refused"),
    [
        (accelerator.CUDA, 8, 1, True),
        (accelerator.NPU, 8, 4, True),
        (accelerator.CUDA, 1, 1, False),
        (accelerator.CUDA, 2, 2, False),
        (accelerator.CPU, 0, 1, False),
    ],
)
def test_who_sees_the_devices_of_others_and_is_bound_to_none_takes_none(
    monkeypatch: pytest.MonkeyPatch, found: accelerator.Accelerator, there: int, num: int, refused: bool
) -> None:
    """Where a site gives whole nodes, nothing binds, and every process of a node would compute on its first device."""
    monkeypatch.setattr(accelerator, "detect", lambda: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: there)
    said = rf"works on {num} and sees {there} {found.name} devices, .*; set cluster\.all\.gpus"
    with pytest.raises(ConfigError, match=said) if refused else nullcontext():
        accelerator.require_bound(num)


@pytest.mark.parametrize(
    ("found", "said", "expected"),
    [(accelerator.NPU, None, "2100"), (accelerator.NPU, "60", "60"), (accelerator.CUDA, None, None)],
)
def test_a_device_with_a_limit_of_its_own_waits_for_others_as_long_as_their_group_may_take(
    monkeypatch: pytest.MonkeyPatch, found: accelerator.Accelerator, said: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(accelerator, "detect", lambda: found)
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", said or "")
    if said is None:
        monkeypatch.delenv("HCCL_EXEC_TIMEOUT")
    accelerator.let_wait(2099.5)
    assert os.environ.get("HCCL_EXEC_TIMEOUT") == expected


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
    tried: list[str] = []
    monkeypatch.setattr(accelerator, "detect", lambda: accelerator.CUDA)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    monkeypatch.setattr(torch, "ones", lambda *_, device: tried.append(device) or torch.zeros(1))
    assert accelerator.take_device(1) == "cuda:1"
    assert (current, tried) == ([1], ["cuda:1"])


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    ],
)
def test_fault_17_a_device_that_is_there_and_does_not_compute_is_lost(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(accelerator, "detect", lambda: accelerator.CUDA)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch, "ones", broken)
    with pytest.raises(DevicesLost, match=r"cuda:0, which is there and fails: CUDA error: uncorrectable ECC .*; leave"):
        accelerator.take_device(0)


def test_processes_on_the_cpu_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "detect", lambda: accelerator.CPU)
    assert [accelerator.take_device(rank) for rank in (0, 1, 63)] == ["cpu"] * 3


@pytest.fixture
def free_choice() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("free_choice")
def test_what_cannot_be_computed_twice_alike_is_refused() -> None:
    accelerator.compute_deterministically()
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("free_choice")
def test_determinism_is_not_promised_for_a_device_on_which_nobody_has_shown_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "detect", lambda: accelerator.CUDA)
    with pytest.raises(ConfigError, match="a device of kind cuda; hide it with CUDA_VISIBLE_DEVICES= or set"):
        accelerator.compute_deterministically()
    assert not torch.are_deterministic_algorithms_enabled()


PRODUCTS = """
import torch
from torch.nn.functional import linear

def placed(values, offset):
    raw = torch.zeros(4 * values.numel() + 128, dtype=torch.uint8)
    start = -raw.data_ptr() % 64 + offset
    view = raw[start : start + 4 * values.numel()].view(torch.float32).view(values.shape)
    return view.copy_(values)

torch.set_num_threads(1)
torch.manual_seed(0)
for rows in (1, 2, 7):
    for inputs in (33, 64, 257):
        for outputs in (32, 100):
            x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
            places = [(a, b) for a in (0, 4, 16, 48) for b in (0, 16, 48)]
            results = {bytes(linear(placed(x, a), placed(weight, b)).numpy()) for a, b in places}
            assert len(results) == 1, (rows, inputs, outputs, len(results))
"""


def test_a_matrix_product_does_not_depend_on_where_its_operands_lie() -> None:
    """Without the variables it does, on the CPUs seen so far: two starts of one program differ in the last bits."""
    environment = {**os.environ, **accelerator.REPRODUCIBLE}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class Part:
    """A GPU as torch tells of it; of parts of one (MIG) only the UUIDs differ."""

    pci_domain_id, pci_bus_id, pci_device_id = 1, 0x1A, 3

    def __init__(self, uuid: str = "") -> None:
        self.uuid = uuid


def test_parts_of_one_gpu_are_one_card_and_another_gpu_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Part()
    other.pci_bus_id = 0x1B
    unknown = Part()
    unknown.pci_domain_id = unknown.pci_bus_id = unknown.pci_device_id = 0  # of a chip that has no bus
    gpus = [Part("MIG-1"), Part("MIG-2"), other, unknown]
    monkeypatch.setattr(accelerator, "detect", lambda: accelerator.CUDA)
    monkeypatch.setattr(accelerator.socket, "gethostname", lambda: "node-3")
    monkeypatch.setattr(accelerator, "_boot", lambda: "5f0c1d2e-77aa")
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    cards = []
    for index in range(len(gpus)):
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda index=index: index)
        cards.append(accelerator.card_here())
    first = "GPU 0001:1a:03 of node-3 (boot 5f0c1d2e)"
    assert cards == [first, first, "GPU 0001:1b:03 of node-3 (boot 5f0c1d2e)", ""]


def test_a_cpu_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "detect", lambda: accelerator.CPU)
    assert accelerator.card_here() == ""


@dataclass
class Device:
    """Torch's module for a device: what its streams are asked for, in order."""

    asked: list[str] = field(default_factory=list)
    current: Any = None

    def __post_init__(self) -> None:
        self.current = FakeStream(self, "the common one")

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, f"one of {device}")

    def current_stream(self, _: torch.device) -> Any:
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@dataclass
class FakeStream:
    device: Device
    name: str

    def wait_stream(self, other: FakeStream) -> None:
        self.device.asked.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.device.asked.append(f"{self.name} is waited for")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    accelerator._stream_beside.cache_clear()
    yield made
    accelerator._stream_beside.cache_clear()


def test_what_is_done_beside_comes_after_what_was_before_and_the_common_stream_waits_for_none_of_it(
    device: Device,
) -> None:
    block = ["one of cuda:1 waits for the common one", "work in one of cuda:1"]
    for _ in range(2):
        with accelerator.beside(torch.device("cuda", 1)):
            device.asked.append(f"work in {device.current.name}")
    assert device.asked == [*block, "one of cuda:1 is waited for"] * 2
    assert accelerator._stream_beside.cache_info().misses == 1, "an engine computes on others that torch deals out"
    with accelerator.beside(torch.device("cpu")):
        assert len(device.asked) == 6


def test_after_an_error_beside_nothing_is_waited_for(device: Device) -> None:
    with pytest.raises(RuntimeError, match="a member has died"), accelerator.beside(torch.device("cuda", 0)):
        raise RuntimeError("a member has died")
    assert device.asked == ["one of cuda:0 waits for the common one"]
    assert device.current.name == "the common one"
