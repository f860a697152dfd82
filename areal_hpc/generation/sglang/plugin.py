"""What SGLang finds under its entry point groups ``sglang.srt.platforms``, a CPU platform, if it is asked for by name,
and ``sglang.srt.plugins``, how it takes weights: weight groups in bounded time (``joining.py``), and updates beside
sampling (``staging.py``), where the server is told to have them.

SGLang activates every platform plugin that is installed unless ``SGLANG_PLATFORM`` names one. A GPU server in the same
environment must not become a CPU server by that, so this one stays out of the way unless it is named.
"""

from __future__ import annotations

import json
import os

PLATFORM = "areal_cpu"
"""The name of the entry point, and the value of ``SGLANG_PLATFORM`` that selects it."""
SELECTED_BY = "SGLANG_PLATFORM"
ORDER = "AREAL_HPC_WEIGHTS"
"""How a server is told to take weights, a JSON object: ``limit_s``, the longest seconds of a step; whether it
``stages`` them beside those that it samples with, and then whether it ``keeps`` what was loaded, and which ``adapters``
alone come (``served/merging.py``)."""


def activate() -> str | None:
    """The class of the platform as SGLang wants it, a dotted path; None unless it was asked for."""
    if os.environ.get(SELECTED_BY) != PLATFORM:
        return None
    declare_vision_operators()
    return "areal_hpc.generation.sglang.cpu_platform.CpuPlatform"


def stage() -> None:
    """Called in each of SGLang's processes before it starts there."""
    if written := os.environ.get(ORDER):
        from areal_hpc.generation.sglang.hooks import register

        register(**json.loads(written))


def declare_vision_operators() -> None:
    """Let torchvision be imported beside a torch that cannot load its C++ library.

    SGLang imports torchvision whatever the model is. The wheel on PyPI is built against the CUDA build of torch; beside
    the CPU build its library does not load, and its Python side fails where it registers fakes for two operators that
    the library would have declared. Nothing here computes with them, so their declaration is enough.
    """
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
