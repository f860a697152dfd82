"""Where our code stands in SGLang's: around methods of its own, through its interface for plugins (entry points
``sglang.srt.plugins``).

Imported by SGLang alone, in the environment that SGLang is installed in.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from areal_hpc.generation.sglang.joining import Joining, join_patiently
from areal_hpc.generation.sglang.pauses import tell_pauses
from areal_hpc.generation.sglang.staging import Staged, begin_at_once, receive_at_once

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
TOKENIZER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"

Hooks = Mapping[str, Callable[..., Any]]


def register(*, limit_s: float, stages: bool, keeps: bool = False, adapters: Mapping[str, Any] | None = None) -> None:
    """Have SGLang of this process take weights as ``plugin.ORDER`` says, and tell whether it is paused.

    Raises:
        AttributeError, ImportError: this SGLang lacks one of the places, so that none is taken. SGLang logs that, and
            takes weights as ever.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: Hooks = {**joining_hooks(Joining(limit_s=limit_s)), f"{TOKENIZER}.get_loads": tell_pauses}
    if stages:
        hooks = {**hooks, **staging_hooks(Staged(limit_s=limit_s, keeps=keeps, adapters=adapters))}
    for target in hooks:
        pkgutil.resolve_name(target)
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def joining_hooks(joining: Joining) -> Hooks:
    return {
        f"{TOKENIZER}.init_weights_update_group": join_patiently,
        f"{UPDATER}.init_weights_update_group": joining.join,
        f"{UPDATER}.destroy_weights_update_group": joining.leave,
    }


def staging_hooks(staged: Staged) -> Hooks:
    return {
        f"{TOKENIZER}._weight_update_session_call": begin_at_once,
        f"{TOKENIZER}.update_weights_from_distributed": receive_at_once,
        f"{UPDATER}.begin_weight_update": staged.begin,
        f"{UPDATER}.update_weights_from_distributed": staged.receive,
        f"{UPDATER}.end_weight_update": staged.end,
        f"{UPDATER}.update_weights_from_disk": staged.read,
        f"{SCHEDULER}.get_internal_state": staged.tell,  # which its /server_info shows
    }
