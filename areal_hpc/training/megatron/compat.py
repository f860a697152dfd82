"""Megatron-core on a CPU: what it asks of CUDA, answered.

    bootstrap()         once in a process, before anything else of megatron is used

Megatron-core asks ``torch.cuda`` where tensors live, says device="cuda" when it makes some, and keeps books on streams
and random states. On a CPU each of these has a plain meaning. Its modules, and only they, get a stand-in as their
global name ``torch`` that gives it; whoever else imports torch has the real one. Two methods of ``Tensor`` cannot be
replaced for some callers only: ``cuda()``, which could do nothing but raise here, and ``type()``, which answers
Megatron's optimizers as they expect and everybody else as ever.

Nothing in a language model that is trained by reinforcement is random, so random states are no states here.
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
CPU = torch.device("cpu")


@functools.cache
def bootstrap() -> None:
    """Import Megatron and make it fit this process's device.

    Raises:
        ConfigError: megatron-core is missing, or not as this module knows it, or the device is one it was not made for.
    """
    require_megatron()
    device = accelerator.detect()
    if device is accelerator.NPU:
        raise ConfigError(
            "trainer.backend=megatron has not been brought to Ascend yet; use trainer.backend=reference, or hide the "
            f"devices with {device.visible_devices}="
        )
    # Of Transformer Engine and Apex, which are not installed, and of settings that nobody here has made.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    for name in MODULES:
        importlib.import_module(name)
    _define_what_only_transformer_engine_brings()
    if device is accelerator.CPU:
        _answer_for_cpu()


def _define_what_only_transformer_engine_brings() -> None:
    """The router of 0.16 looks up ``te_general_gemm`` without having imported it where Transformer Engine is absent."""
    module = sys.modules["megatron.core.transformer.moe.moe_utils"]
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None  # type: ignore[attr-defined]


def _answer_for_cpu() -> None:
    # Megatron wraps small functions in torch.compile; on a CPU each would wait for a C++ compiler.
    importlib.import_module("torch._dynamo").config.disable = True
    answers = _torch_for_megatron()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = answers  # type: ignore[attr-defined]
    _replace("megatron.core.tensor_parallel.random", "_get_cuda_rng_state", lambda *_, **__: torch.empty(0))
    _replace("megatron.core.tensor_parallel.random", "_set_cuda_rng_state", lambda *_, **__: None)
    _replace("megatron.core.tensor_parallel.random", "_CUDA_RNG_STATE_TRACKER", _NoRandomStates())
    _replace("megatron.core.tensor_parallel.random", "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
    for name in ("moe_utils", "token_dispatcher"):  # they look for "cuda" before they make a list of sizes
        _replace(f"megatron.core.transformer.moe.{name}", "maybe_move_tensor_to_cpu", _as_it_is)
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
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


def _torch_for_megatron() -> ModuleType:
    device_module: dict[str, Any] = {
        "is_available": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: CPU,
        "get_rng_state": lambda *_, **__: torch.empty(0),
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": lambda *_, **__: nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
    }
    device_module |= dict.fromkeys(("synchronize", "empty_cache", "set_device", "set_rng_state"), _nothing)
    device_module |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), lambda *_: 0)
    answers = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
    return _Overlay(torch, {**answers, "cuda": _Overlay(torch.cuda, device_module)})


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The factory, with "cuda" read as what the process has instead."""

    def made(*args: Any, **options: Any) -> torch.Tensor:
        if str(options.get("device")).startswith("cuda"):
            options["device"] = CPU
        return make(*args, **options)

    return made


def _type_for(real: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type``, by which Megatron's optimizers tell float32 from others: they know CUDA's names only."""

    def of(tensor: torch.Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
        answer = real(tensor, dtype, *args, **options)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if dtype is None and caller.startswith("megatron.core.optimizer"):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return of


def _as_it_is(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


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


class _NoRandomStates:
    """In the place of Megatron's tracker of random states: dropout is off and weights are loaded."""

    def is_initialized(self) -> bool:
        return True

    def fork(self, *_: Any) -> nullcontext[None]:
        return nullcontext()

    def get_states(self) -> dict[str, Any]:
        return {}

    add = reset = set_states = _nothing
