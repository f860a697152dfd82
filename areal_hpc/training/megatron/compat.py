"""Megatron-core on a device that is not CUDA's: what it asks of CUDA, answered.

    bootstrap()         once in a process, before anything else of megatron is used

Megatron-core asks ``torch.cuda`` where tensors live, says device="cuda" when it makes some, and keeps books on streams
and random states. An Ascend NPU answers by the module of torch's that has its name; on a CPU each of these has a plain
meaning. Megatron's modules, and only they, get a stand-in as their global name ``torch`` that gives it; whoever else
imports torch has the real one. Two methods of ``Tensor`` cannot be replaced for some callers only: ``cuda()``, which
could do nothing but raise here, and ``type()``, which answers Megatron's optimizers as they expect and everybody else
as ever.

Nothing in a language model that is trained by reinforcement is random, so random states are empty here.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch

from areal_hpc import accelerator
from areal_hpc.errors import ConfigError
from areal_hpc.training.megatron.requirements import require_megatron

MODULES = (
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.packed_seq_params",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.moe.moe_layer",
)
"""All of Megatron that is used; what these import comes with them."""
FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")


@functools.cache
def bootstrap() -> None:
    """Import Megatron and make it fit this process's device.

    Raises:
        ConfigError: megatron-core is missing, or not as this module knows it.
    """
    require_megatron()
    # Of Transformer Engine and Apex, which are not installed, and of settings that nobody here has made.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    for name in MODULES:
        importlib.import_module(name)
    _define_what_only_transformer_engine_brings()
    if (device := accelerator.detect()) is not accelerator.CUDA:
        _answer_for(device.device)


def _define_what_only_transformer_engine_brings() -> None:
    """The router of 0.16 looks up ``te_general_gemm`` without having imported it where Transformer Engine is absent."""
    module = sys.modules["megatron.core.transformer.moe.moe_utils"]
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None  # type: ignore[attr-defined]


def _answer_for(device: str) -> None:
    # Megatron wraps small functions in torch.compile, for which there may be no compiler here.
    importlib.import_module("torch._dynamo").config.disable = True
    answers = torch_for(device, _cuda_on_cpu() if device == accelerator.CPU.device else cuda_as(device))
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = answers  # type: ignore[attr-defined]
    _replace("megatron.core.tensor_parallel.random", "_get_cuda_rng_state", lambda *_, **__: torch.empty(0))
    _replace("megatron.core.tensor_parallel.random", "_set_cuda_rng_state", lambda *_, **__: None)
    for name in ("moe_utils", "token_dispatcher"):  # they look for "cuda" before they make a list of sizes
        _replace(f"megatron.core.transformer.moe.{name}", "maybe_move_tensor_to_cpu", _on_host)
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor.to(device)  # type: ignore[method-assign]
    torch.Tensor.type = _type_for(torch.Tensor.type)  # type: ignore[method-assign]


def _replace(module: str, name: str, value: Any) -> None:
    if not hasattr(sys.modules[module], name):
        raise ConfigError(f"this megatron-core has no {module}.{name}; pip install 'areal-hpc[megatron]'")
    setattr(sys.modules[module], name, value)


class _Overlay(ModuleType):
    """A module with some names replaced."""

    def __init__(self, module: ModuleType, answers: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(answers)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def torch_for(device: str, cuda: ModuleType) -> ModuleType:
    """``torch`` with another ``torch.cuda``, and tensors for "cuda" made on the ``device``."""
    return _Overlay(torch, {"cuda": cuda, **{name: _on(device, getattr(torch, name)) for name in FACTORIES}})


def cuda_as(device: str) -> ModuleType:
    """``torch.cuda`` as the module of another device, which answers alike but for what Megatron makes tensors on."""
    module = torch.get_device_module(device)
    return _Overlay(module, {"current_device": lambda: torch.device(device, module.current_device())})


def _cuda_on_cpu() -> ModuleType:
    answers: dict[str, Any] = {
        "is_available": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: torch.device(accelerator.CPU.device),
        "get_rng_state": lambda *_, **__: torch.empty(0),
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": lambda *_, **__: nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
    }
    answers |= dict.fromkeys(("synchronize", "empty_cache", "set_device", "manual_seed", "set_rng_state"), _nothing)
    answers |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), lambda *_: 0)
    return _Overlay(torch.cuda, answers)


def _on(device: str, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The factory, with "cuda" read as what the process has instead."""

    def made(*args: Any, **options: Any) -> torch.Tensor:
        if str(options.get("device")).startswith("cuda"):
            options["device"] = device
        return make(*args, **options)

    return made


def _type_for(real: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type``, by which Megatron's optimizers tell float32 from others: they know CUDA's names only."""

    def of(tensor: torch.Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
        answer = real(tensor, dtype, *args, **options)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if dtype is None and caller.startswith("megatron.core.optimizer"):
            return f"torch.cuda.{answer.rpartition('.')[2]}"
        return answer

    return of


def _on_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return tensor.cpu().numpy() if as_numpy else tensor.cpu()


def _nothing(*_: Any, **__: Any) -> None: ...


class _Event:
    """A CPU does one thing after the other: every event has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    record = wait = synchronize = _nothing


class _Stream:
    """The one order in which a CPU works."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()
