"""What Megatron is told of a device that is neither CUDA's nor a CPU: by stand-ins, since there is none here."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch

from areal_hpc.training.megatron import compat


@pytest.mark.parametrize("name", compat.FACTORIES)
@pytest.mark.parametrize("asked", ["cuda", "cuda:0", torch.device("cuda", 0)])
def test_tensors_for_cuda_are_made_on_the_device(name: str, asked: str | torch.device) -> None:
    here = compat.torch_for("meta", ModuleType("cuda"))
    first = torch.zeros(2) if name.endswith("_like") else [2] if name == "tensor" else 2
    more = (1.0,) if name == "full" else ()
    size = (first,) if name == "full" else first
    assert getattr(here, name)(size, *more, device=asked).device.type == "meta"
    assert getattr(here, name)(size, *more, device="cpu").device.type == "cpu"
    assert here.bfloat16 is torch.bfloat16


def test_the_devices_own_module_answers_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron makes tensors on what ``current_device`` says, a number, which is CUDA's only where CUDA is."""
    module = SimpleNamespace(__name__="torch.xpu", current_device=lambda: 3, synchronize=lambda: "waited")
    monkeypatch.setattr(torch, "get_device_module", lambda name: {"xpu": module}[name])
    here = compat.cuda_as("xpu")
    assert here.current_device() == torch.device("xpu", 3)
    assert here.synchronize() == "waited"


@pytest.mark.parametrize("said", ["torch.FloatTensor", "torch.npu.FloatTensor", "torch.cuda.FloatTensor"])
def test_only_megatrons_optimizers_hear_of_cuda_types(said: str) -> None:
    there: dict[str, object] = {"type_of": compat._type_for(lambda *_: said), "__name__": "megatron.core.optimizer.of"}
    exec("found = type_of(None)", there)  # by code of that module
    assert there["found"] == "torch.cuda.FloatTensor"
    assert compat._type_for(lambda *_: said)(torch.zeros(1)) == said


def test_sizes_are_brought_to_the_host() -> None:
    sizes = torch.tensor([2, 3])
    assert compat._on_host(sizes, as_numpy=True).tolist() == [2, 3]
    assert compat._on_host(sizes).device.type == "cpu"
    assert compat._on_host([2, 3], record_stream=True) == [2, 3]
