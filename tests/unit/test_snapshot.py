"""A trainer's state in host memory and on disk: the copy is a copy, memory is bounded, what is read back counts."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from areal_hpc.errors import CorruptRecord
from areal_hpc.training import snapshot
from areal_hpc.training.snapshot import HostCopy, write_tensors


def tensors() -> dict[str, Tensor]:
    return {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
    }


def test_what_is_taken_does_not_change_with_what_it_was_taken_from() -> None:
    live = tensors()
    taken = HostCopy().take(live.items())
    for tensor in live.values():
        tensor.add_(1)
    assert all(torch.equal(taken[name], tensor) for name, tensor in tensors().items() if name != "b")
    assert taken["b"].isnan().tolist() == [True, False, False]


def test_C24_every_save_uses_the_same_memory() -> None:
    copy, live = HostCopy(), tensors()
    first = {name: tensor.data_ptr() for name, tensor in copy.take(live.items()).items()}
    live["a"].add_(1)
    again = copy.take(live.items())
    assert {name: tensor.data_ptr() for name, tensor in again.items()} == first
    assert torch.equal(again["a"], live["a"])


BOUNDED = """
import resource, sys
from pathlib import Path
import torch
from areal_hpc.training.snapshot import HostCopy, write_tensors

MIB = 1 << 20
state = {f"tensor-{i}": torch.full((4 * MIB,), float(i)) for i in range(6)}  # 16 MiB each
write_tensors({"small": torch.zeros(1)}, Path(sys.argv[1]) / "first")        # whatever a first time takes
data = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))


def save_twice(spare: int) -> None:
    limit = data + (6 + spare) * 16 * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    copy = HostCopy()
    for _ in range(2):
        write_tensors(copy.take(state.items()), Path(sys.argv[1]) / "state")


try:
    save_twice(-2)
except RuntimeError as error:
    assert "memory" in str(error), error
    print("two tensors short: refused")
save_twice(2)
print("room for one copy and one tensor to compare: written")
"""


def test_C24_a_save_takes_one_copy_of_the_state_and_one_tensor_more(tmp_path: Path) -> None:
    """By the kernel's count of private memory; the first half shows that the kernel does count."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}  # what is freed goes back at once
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "two tensors short: refused",
        "room for one copy and one tensor to compare: written",
    ], done.stderr


def test_what_is_written_is_a_safetensors_file_with_every_bit(tmp_path: Path) -> None:
    write_tensors(tensors(), tmp_path / "state.safetensors")
    found = load_file(tmp_path / "state.safetensors")
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.fixture
def small_files() -> Iterator[None]:
    """The kernel lets this process write no file beyond 1,000 bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_fault_20_a_disk_that_refuses_is_an_error_of_the_disk_with_its_path(tmp_path: Path, small_files: None) -> None:
    """safetensors raises an error of its own, which nobody who waits for OSError would know."""
    with pytest.raises(OSError, match=r"File too large: '.*/state\.safetensors'") as caught:
        write_tensors({"a": torch.ones(1000)}, tmp_path / "state.safetensors")
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(FileNotFoundError):
        write_tensors({"a": torch.ones(3)}, tmp_path / "away" / "state.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_B5_a_file_that_does_not_hold_what_was_written_is_never_voted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = snapshot.save_tensors

    def save_with_a_flipped_bit(given: Mapping[str, Tensor], path: Path) -> None:
        real(dict(given), path)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(snapshot, "save_tensors", save_with_a_flipped_bit)
    with pytest.raises(CorruptRecord, match=r"state\.safetensors: a does not hold what was written"):
        write_tensors({"a": torch.ones(3)}, tmp_path / "state.safetensors")
