"""Where our code stands in SGLang's, whose modules are stand-ins here."""

from __future__ import annotations

import asyncio
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from areal_hpc.generation.sglang import hooks, plugin
from areal_hpc.generation.sglang.pauses import tell_pauses


def test_without_a_word_in_the_environment_nothing_of_this_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(hooks, "register", lambda **options: told.append(options))
    monkeypatch.delenv(plugin.ORDER, raising=False)
    plugin.stage()
    assert told == []
    monkeypatch.setenv(plugin.ORDER, json.dumps({"limit_s": 7.0, "stages": False}))
    plugin.stage()
    assert told == [{"limit_s": 7.0, "stages": False}]


@pytest.mark.parametrize("lacks", ["", "end_weight_update"])
def test_an_sglang_that_lacks_one_of_the_places_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    """It would else say that it can do what it can do by half."""
    registered: list[str] = []
    around = SimpleNamespace(AROUND="around")
    registry = SimpleNamespace(register=lambda target, hook, kind: registered.append(target))
    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": around},
        "sglang.srt.managers": {},
        "sglang.srt.managers.scheduler_components": {},
    }
    methods = {
        hooks.SCHEDULER: ["get_internal_state"],
        hooks.TOKENIZER: [
            *("_weight_update_session_call", "update_weights_from_distributed"),
            *("init_weights_update_group", "get_loads"),
        ],
        hooks.UPDATER: [
            *("begin_weight_update", "end_weight_update"),
            *("update_weights_from_distributed", "update_weights_from_disk", "init_weights_update_group"),
            "destroy_weights_update_group",
        ],
    }
    for path, names in methods.items():
        module, _, name = path.rpartition(".")
        modules[module] = {name: SimpleNamespace(**{method: None for method in names if method != lacks})}
    for name, content in modules.items():
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)
    if lacks:
        with pytest.raises(AttributeError, match=lacks):
            hooks.register(limit_s=1.0, stages=True)
        assert registered == []
    hooks.register(limit_s=1.0, stages=False)  # which has no need of that place
    assert len(registered) == len(set(registered)) == 4
    if not lacks:
        registered.clear()
        hooks.register(limit_s=1.0, stages=True)
        assert len(registered) == len(set(registered)) == 11


@pytest.mark.parametrize("paused", [True, False])
def test_every_schedulers_load_tells_whether_sglang_is_paused(paused: bool) -> None:
    asked: list[Any] = []

    async def get_loads(self: Any, include: Any = None, dp_rank: Any = None) -> list[Any]:
        asked.append((self, include, dp_rank))
        return [SimpleNamespace(queues=SimpleNamespace(waiting=3, paused=0)) for _ in range(2)]

    tokenizer = SimpleNamespace(is_pause=paused)
    told = asyncio.run(tell_pauses(get_loads, tokenizer, include=["core"], dp_rank=1))
    assert [load.queues for load in told] == [SimpleNamespace(waiting=3, paused=paused)] * 2
    assert [type(load.queues.paused) for load in told] == [bool, bool], "a number is SGLang's own"
    assert asked == [(tokenizer, ["core"], 1)]
