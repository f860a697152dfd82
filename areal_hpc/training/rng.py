"""The random streams of one process as JSON data."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of Python's, numpy's and torch's global streams, and of the ``device``'s own where it has one."""
    kind, keys, *position = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": [kind, [int(key) for key in keys], *position],
        "torch": torch.get_rng_state().tolist(),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state().tolist()
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on with the streams of ``rng_state``; the device's only where the state comes from such a device."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(torch.tensor(state["device"], dtype=torch.uint8))
