"""Devices as rows of facts: what differs between CPU, CUDA and Ascend NPU, and nothing else.

The only place that may say "cuda" or "npu", and the only door to torch_npu.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_hpc.errors import ConfigError, DevicesLost

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


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
    blocking_wait: str = ""
    """Environment variable, read when a group is made, that has errors of its operations raised where these are waited
    for; else torch ends the process. Empty where they always are."""
    longest_wait: str = ""
    """Environment variable, read when a group is made, of the seconds for which a device waits for those of other
    ranks; empty where it does for as long as the group may take."""


CPU = Accelerator(name="cpu", device="cpu", collective="gloo", visible_devices="", gres="")
CUDA = Accelerator(
    name="cuda",
    device="cuda",
    collective="nccl",
    visible_devices="CUDA_VISIBLE_DEVICES",
    gres="gpu",
    blocking_wait="TORCH_NCCL_BLOCKING_WAIT",
)
NPU = Accelerator(
    name="npu",
    device="npu",
    collective="hccl",
    visible_devices="ASCEND_RT_VISIBLE_DEVICES",
    gres="npu",
    extension="torch_npu",
    blocking_wait="HCCL_BLOCKING_WAIT",
    longest_wait="HCCL_EXEC_TIMEOUT",  # else half an hour
)
NO_DEVICES = ("", "-1", "NoDevFiles")
"""What a variable says that hides all devices; the last is Slurm's."""
ACCELERATORS = {row.name: row for row in (CPU, CUDA, NPU)}
REPRODUCIBLE = {
    "MKL_CBWR": "AUTO",
    "MKL_DYNAMIC": "FALSE",
    "OMP_DYNAMIC": "FALSE",
    "PYTHONHASHSEED": "0",
}
"""Environment of a process whose results must not differ from one start to the next.

Without ``MKL_CBWR`` a matrix product's last bits follow from where malloc put its operands (oneMKL, "Reproducibility
Conditions"). AUTO keeps the code path of this kind of CPU, and is one of two values that CPUs of all makers take.
"""


def detect() -> Accelerator:
    """The accelerator of this process: what ``torch.accelerator`` reports, else the CPU."""
    import torch

    if importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")
    if not torch.accelerator.is_available():
        return CPU
    device = torch.accelerator.current_accelerator()
    return named(device.type) if device is not None else CPU


def detect_bound(environment: Mapping[str, str] = os.environ) -> Accelerator:
    """``detect`` for a process that is to compute: where it was given devices, the CPU is no substitute for them.

    A torch that is built for the CPU alone computes on it, and says so.

    Raises:
        DevicesLost: it was given devices and torch finds none of them, or fewer: the node has lost them, or its driver.
    """
    found = detect()
    given = [name for row in (CUDA, NPU) if environment.get(name := row.visible_devices, "") not in NO_DEVICES]
    if found is not CPU:
        _require_all(found, environment)
    elif given and not _is_built_for_devices():
        log.warning("computing on the CPU, for which alone torch is built here, beside %s", " and ".join(given))
    elif given:
        raise DevicesLost(
            f"{socket.gethostname()} was to compute on {' or '.join(f'{name}={environment[name]}' for name in given)}, "
            "and torch finds no device there; leave that node out (cluster.all.exclude), or hide its devices to "
            f"compute on the CPU: {' '.join(f'{name}=' for name in given)}"
        )
    return found


def _require_all(row: Accelerator, environment: Mapping[str, str]) -> None:
    """Check that every device that the process was given is there.

    Raises:
        DevicesLost: there are fewer devices of this kind than the process was given.
    """
    import torch

    given = environment.get(row.visible_devices, "")
    number, found = _num_named(given), torch.accelerator.device_count()
    if found < number:
        raise DevicesLost(
            f"{socket.gethostname()} was to compute on {row.visible_devices}={given}, and torch finds {found} of these "
            f"{number} there; leave that node out (cluster.all.exclude), or name in {row.visible_devices} those that "
            "are there"
        )


def require_bound(num: int) -> None:
    """On a cluster's node each process is bound to its devices before its Python starts. One that is not sees all of
    them, and would take the first, as the others there do.

    Args:
        num: devices that it works on.

    Raises:
        ConfigError: it sees more.
    """
    import torch

    row = detect()
    if row is not CPU and (found := torch.accelerator.device_count()) > num:
        raise ConfigError(
            f"this process on {socket.gethostname()} works on {num} and sees {found} {row.name} devices, of which "
            "nobody has said which are its own; set cluster.all.gpus, or that of its component, to how many the run "
            f"uses of a node, or bind it by {row.visible_devices}"
        )


def devices_named(given: str) -> list[str]:
    """The names in what a process was given; a comma behind the last is none."""
    return [name.strip() for name in given.split(",") if name.strip()]


def _num_named(given: str) -> int:
    """How many devices a process sees of those that it was given: of parts of GPUs (MIG) CUDA shows one alone."""
    names = devices_named(given)
    return 1 if any(name.startswith("MIG-") for name in names) else len(names)


def _is_built_for_devices() -> bool:
    import torch

    return bool(torch.version.cuda or torch.version.hip) or importlib.util.find_spec("torch_npu") is not None


def take_device(local_rank: int) -> str:
    """Make the device that is this process's the current one; its name, as torch spells it.

    Args:
        local_rank: number of this process among those that share the visible devices; 0 if it has them to itself.

    Raises:
        DevicesLost: see ``detect_bound``; or the device is there, and does not compute.
        ConfigError: see ``device_of``.
    """
    import torch

    row = detect_bound()
    if row is CPU:
        return row.device
    device = device_of(row, local_rank, torch.accelerator.device_count())
    torch.accelerator.set_device_index(local_rank)  # for what names none: collectives, random streams
    _prove(device)
    return device


def _prove(device: str) -> None:
    """Compute a little there: of a device with broken memory, or one that its driver has given up, torch knows by name.

    Raises:
        DevicesLost: it fails.
    """
    import torch

    try:
        torch.ones(1, device=device).sum().item()
    except RuntimeError as error:
        what = str(error).partition("\n")[0]
        raise DevicesLost(
            f"{socket.gethostname()} was to compute on {device}, which is there and fails: {what}; leave that node out "
            "(cluster.all.exclude)"
        ) from error


def let_wait(limit_s: float) -> None:
    """Have this process's device wait for those of other ranks as long as its groups may take: HCCL does not ask these.
    What the environment says already, holds.
    """
    if name := detect().longest_wait:
        os.environ.setdefault(name, str(math.ceil(limit_s)))


def card_here() -> str:
    """The card of this thread's current device, by PCI address and host, as NCCL tells cards from each other: parts of
    one (MIG) are the same. Empty where nobody knows: on a CPU, on an NPU, and of a GPU that has no such address.
    """
    import torch

    if detect() is not CUDA:
        return ""
    found = torch.cuda.get_device_properties(torch.accelerator.current_device_index())
    address = [getattr(found, f"pci_{name}_id", 0) for name in ("domain", "bus", "device")]
    if not any(address):
        return ""
    return f"GPU {address[0]:04x}:{address[1]:02x}:{address[2]:02x} of {socket.gethostname()} (boot {_boot()[:8]})"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """What this thread has ``device`` do inside comes after all that it was told before, and is done when the block
    ends; what other threads tell it meanwhile waits for none of that.

    Else it would: threads share one stream, and who waits for a collective has that stream wait, too. After an error
    nothing is waited for; a later block on the device comes after what is left of this one.
    """
    import torch

    if device.type == CPU.device:
        yield
        return
    module, stream = torch.get_device_module(device), _stream_beside(device)
    stream.wait_stream(module.current_stream(device))
    with module.stream(stream):
        yield
    stream.synchronize()


@functools.cache
def _stream_beside(device: torch.device) -> Any:
    """One for each device of a process: torch deals out 32 in turn, and an engine computes on some of them."""
    import torch

    return torch.get_device_module(device).Stream(device)


def device_of(row: Accelerator, local_rank: int, num_devices: int) -> str:
    """A device for each process: number ``local_rank`` of ``num_devices`` of this kind.

    Raises:
        ConfigError: there are fewer devices than processes.
    """
    if local_rank >= num_devices:
        raise ConfigError(
            f"process {local_rank} on this machine has no {row.name} device of its own: there are {num_devices}; lower "
            f"trainer.ranks, or hide them all with {row.visible_devices}= to compute on the CPU"
        )
    return f"{row.device}:{local_rank}"


def compute_deterministically() -> None:
    """Let torch refuse, in this process and from here on, what it cannot compute twice alike.

    Raises:
        ConfigError: the device is not a CPU, for which nobody has shown that this is enough.
    """
    import torch

    found = detect()
    if found is not CPU:
        raise ConfigError(
            f"deterministic: true holds on CPUs only, and this process has a device of kind {found.name}; hide it with "
            f"{found.visible_devices}= or set deterministic=false"
        )
    torch.use_deterministic_algorithms(True)


def named(name: str) -> Accelerator:
    """The row called ``name``.

    Raises:
        ConfigError: there is no such row.
    """
    if name not in ACCELERATORS:
        raise ConfigError(f"accelerator {name!r} is not known; use one of {', '.join(sorted(ACCELERATORS))}")
    return ACCELERATORS[name]
