"""What runs episodes is put together as the configuration says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from areal_hpc.config.schema import (
    Config,
    EvaluationConfig,
    ModelConfig,
    PromptsConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from areal_hpc.generation.connection import EngineLost
from areal_hpc.generation.router import Router
from areal_hpc.roles.wiring.episodes import (
    engines_text,
    evaluation_rollout,
    postpone_while_deserted,
    record_routing,
)
from areal_hpc.types import Completion, GenerationRequest, Sampling


def test_evaluation_samples_as_training_does_but_for_number_and_temperature() -> None:
    rollout = RolloutConfig(reward="m:f", group_size=8, sampling=SamplingConfig(top_p=0.9))
    whole = Config(
        name="run",
        model=ModelConfig(path="m"),
        prompts=PromptsConfig(train="m:C"),
        trainer=TrainerConfig(total_steps=1),
        rollout=rollout,
        evaluation=EvaluationConfig(samples=3, temperature=0.0),
    )
    expected = replace(rollout, group_size=3, sampling=SamplingConfig(top_p=0.9, temperature=0.0))
    assert evaluation_rollout(whole) == expected


class Broken:
    """An engine that loses the first request and then never answers."""

    version = 0

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, 0

    async def generate(self, request: GenerationRequest) -> Completion:
        self.asked += 1
        if self.asked == 1:
            raise EngineLost(f"{self.name} hung up")
        await asyncio.Event().wait()
        raise AssertionError

    async def abort(self, request_id: str) -> None: ...

    async def probe(self) -> int:
        raise EngineLost(f"{self.name} hung up")

    async def close(self) -> None: ...


def test_D27_a_stall_says_how_each_engine_stands() -> None:
    async def test() -> None:
        first, second = Broken("generator-0"), Broken("generator-1")
        second.asked = 1
        router = Router([first, second])
        request = GenerationRequest(request_id="a", token_ids=(1,) * 1000, sampling=Sampling(max_new_tokens=200))
        with pytest.raises(EngineLost):
            await router.generate(request)
        waiting = asyncio.create_task(router.generate(request))
        while second.asked != 2:
            await asyncio.sleep(0)
        expected = (
            "; the engines: generator-0 with 0 tokens and out: generator-0 hung up, generator-1 with 1,200 tokens"
        )
        assert engines_text(router) == expected
        waiting.cancel()
        await router.close()

    asyncio.run(test())


def test_a_worker_records_what_its_engines_have_to_do_and_which_is_out() -> None:
    """At once, and not only after the first pause."""

    async def body() -> None:
        router, records = Router([Broken("a"), Broken("b")], probe_s=100, wait_s=1), list[tuple[str, dict[str, Any]]]()
        request = GenerationRequest(request_id="r", token_ids=(1, 2), sampling=Sampling(max_new_tokens=5))
        with pytest.raises(EngineLost):
            await router.generate(request)
        asking = asyncio.create_task(router.generate(request))
        await asyncio.sleep(0)
        recording = asyncio.create_task(
            record_routing(router, lambda kind, values: records.append((kind, dict(values))))
        )
        await asyncio.sleep(0)
        assert records == [("routing", {"a": "a hung up", "b": 7})]
        for task in (asking, recording):
            task.cancel()
        await asyncio.gather(asking, recording, return_exceptions=True)
        await router.close()

    asyncio.run(body())


def test_episodes_are_postponed_for_as_long_as_no_engine_is_there() -> None:
    class Flickering:
        def __init__(self) -> None:
            self.states = [False, True, True, True, False, False]

        def is_deserted(self) -> bool:
            if len(self.states) == 1:
                task.cancel()
            return self.states.pop(0) if self.states else False

    async def body() -> None:
        await asyncio.wait({task})

    postponed: list[float] = []
    loop = asyncio.new_event_loop()
    task = loop.create_task(postpone_while_deserted(Flickering(), postponed.append, 0.001))  # type: ignore[arg-type]
    loop.run_until_complete(body())
    loop.close()
    assert len(postponed) == 1, "asked before and after each pause: there between two of them is there"
    assert postponed[0] >= 0.001
