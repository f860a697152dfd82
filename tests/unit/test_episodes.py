"""The episodes of one prompt: failures and attempts, limits, seeds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
from rollout_fakes import (
    Alternating,
    Digits,
    Engine,
    Records,
    Ring,
    Stream,
    config,
    episodes_of,
    failing,
    position_of,
    run,
    runner_of,
    sample_of,
)

from areal_hpc.config.schema import FilterConfig, SamplingConfig
from areal_hpc.errors import ConfigError, DataError, Fenced, GenerationError, RewardError, RewardRaised
from areal_hpc.protocols import Episode
from areal_hpc.rollout.episodes import Running, derive_seed
from areal_hpc.types import Drop, GenerationRequest, Message, Prompt, Trajectory


@pytest.mark.parametrize("error", [GenerationError("g"), RewardError("r"), TimeoutError(), ValueError("broken array")])
def test_F4_a_failed_sample_is_tried_again_and_only_that_one(error: Exception) -> None:
    async def test() -> None:
        ring, records = Ring(1, done=1), Records()
        engine = Engine(failing((0, 2, 0), (0, 2, 1), error=error))
        await runner_of(ring, engine, records).run(ring.stop)
        asked = Counter(sample_of(request.request_id) for request in engine.requests)
        assert asked == {0: 1, 1: 1, 2: 3, 3: 1}
        assert len({request.request_id for request in engine.requests}) == 6
        assert ring.sealed[0].rewards.tolist() == [0.0, 1.0, 0.0, 1.0]
        assert [(f["sample"], f["attempt"], f["error"], f["stage"]) for f in records.kept["failure"]] == [
            (2, 0, type(error).__name__, "generating"),
            (2, 1, type(error).__name__, "generating"),
        ]
        assert records.kept["group"][0]["attempts"] == 3

    run(test())


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_second_attempt_has_the_seed_of_the_first_only_in_deterministic_training(deterministic: bool) -> None:
    async def test() -> None:
        ring = Ring(1, done=1)
        engine = Engine(failing((0, 2, 0), error=GenerationError("lost")))
        await runner_of(ring, engine, deterministic=deterministic).run(ring.stop)
        first, second = (r.sampling.seed for r in engine.requests if sample_of(r.request_id) == 2)
        assert first == derive_seed(1, 0, 2, 0)
        assert second == derive_seed(1, 0, 2, 0 if deterministic else 1)

    run(test())


@pytest.mark.parametrize("error", [GenerationError("lost"), RewardError("did not return in 3 s"), TimeoutError()])
def test_deterministic_training_ends_rather_than_drop_what_might_not_fail_again(error: Exception) -> None:
    async def test() -> None:
        ring, attempts = Ring(1, done=1), [(0, 2, attempt) for attempt in range(3)]
        with pytest.raises(type(error)) as raised:
            await runner_of(ring, Engine(failing(*attempts, error=error)), deterministic=True).run(ring.stop)
        assert "cannot drop this sample, since it might not fail again: resume the run" in raised.value.__notes__[0]
        assert (ring.sealed, ring.dropped) == ({}, {})

    run(test())


@pytest.mark.parametrize("error", [RewardRaised("ZeroDivisionError"), DataError("too long"), ValueError("no digits")])
def test_deterministic_training_drops_what_fails_every_time(error: Exception) -> None:
    async def test() -> None:
        ring, attempts = Ring(2, done=2), [(0, 2, attempt) for attempt in range(3)]
        engine = Engine(failing(*attempts, error=error))
        strict = config(filter=FilterConfig(min_group_size=4))
        await runner_of(ring, engine, deterministic=True, config=strict).run(ring.stop)
        assert ring.dropped == {0: Drop.FAILED}
        assert sorted(ring.sealed) == [1]

    run(test())


@pytest.mark.parametrize(("min_group_size", "outcome"), [(3, "sealed"), (4, "failed")])
def test_E11_what_is_left_of_a_group_is_kept_if_it_is_enough(min_group_size: int, outcome: str) -> None:
    async def test() -> None:
        ring, records = Ring(1, done=1), Records()
        engine = Engine(failing(*((0, 1, attempt) for attempt in range(3)), error=GenerationError("gone")))
        knobs = config(filter=FilterConfig(min_group_size=min_group_size), group_size=4)
        await runner_of(ring, engine, records, config=knobs, score=by_half).run(ring.stop)
        assert records.kept["group"][0]["outcome"] == outcome
        if outcome == "sealed":
            assert [t.episode for t in ring.sealed[0].trajectories] == [0, 2, 3]
        else:
            assert ring.dropped == {0: Drop.FAILED}

    run(test())


async def by_half(text: str, prompt: Prompt) -> float:
    return float(sample_of(text) > 1)


def test_a_prompt_that_cannot_be_used_is_dropped_without_another_attempt() -> None:
    async def test() -> None:
        ring, records = Ring(2, done=2), Records()
        engine = Engine(failing(*((0, sample, 0) for sample in range(4)), error=DataError("too long")))
        await runner_of(ring, engine, records).run(ring.stop)
        assert ring.dropped == {0: Drop.FAILED}
        assert sum(position_of(request.request_id) == 0 for request in engine.requests) == 4
        assert records.outcomes() == {("failed", "DataError"): 1, ("sealed", ""): 1}
        assert {failure["message"] for failure in records.kept["failure"]} == {"too long"}

    run(test())


def test_an_episode_has_a_time_limit() -> None:
    async def hang(request: GenerationRequest, count: int) -> None:
        if position_of(request.request_id) == 0:
            await asyncio.Event().wait()

    async def test() -> None:
        ring, records = Ring(2, done=2), Records()
        await runner_of(ring, Engine(hang), records, config=config(timeout_s=0.01, attempts=2)).run(ring.stop)
        assert ring.dropped == {0: Drop.FAILED}
        assert sorted(ring.sealed) == [1]
        assert len(records.kept["failure"]) == 8
        assert {f["message"] for f in records.kept["failure"]} == {"not finished within 0.01 s"}

    run(test())


def test_a_cancellation_from_within_an_episode_fails_it_and_loses_no_ticket() -> None:
    async def cancelled_once(request: GenerationRequest, count: int) -> None:
        if count == 1:
            raise asyncio.CancelledError

    async def test() -> None:
        ring, records = Ring(1, done=1), Records()
        await runner_of(ring, Engine(cancelled_once), records).run(ring.stop)
        assert len(ring.sealed) == 1
        assert [failure["error"] for failure in records.kept["failure"]] == ["GenerationError"]

    run(test())


class Bug(Exception):
    pass


@pytest.mark.parametrize("error", [Bug("b"), Fenced("newer"), ConfigError("no such reward")])
def test_D14_what_is_not_a_samples_failure_ends_the_run(error: Exception) -> None:
    async def test() -> None:
        waiting = asyncio.Event()

        async def before(request: GenerationRequest, count: int) -> None:
            if position_of(request.request_id) == 2:
                raise error
            await waiting.wait()

        ring = Ring(8)
        engine = Engine(before)
        with pytest.raises(type(error)) as caught:
            await runner_of(ring, engine).run(asyncio.Event())
        assert caught.value is error
        assert engine.open == 0
        assert ring.sealed == ring.dropped == {}

    run(test())


def test_F10_seeds_differ_between_samples_and_repeat_between_runs() -> None:
    async def seeds_of(seed: int) -> dict[tuple[int, int], int | None]:
        ring, engine = Ring(8, done=8), Engine()
        await runner_of(ring, engine, seed=seed).run(ring.stop)
        requests = engine.requests
        return {(position_of(r.request_id), sample_of(r.request_id)): r.sampling.seed for r in requests}

    async def test() -> None:
        one, again, other = await seeds_of(1), await seeds_of(1), await seeds_of(2)
        assert one == again
        assert len(set(one.values())) == 32
        assert set(one.values()).isdisjoint(other.values())

    run(test())
    seeds = [derive_seed(1, p, n, a) for p in range(50) for n in range(8) for a in range(3)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed(1, 23, 4, 0) != derive_seed(12, 3, 4, 0)


def test_the_sampling_is_the_configured_one() -> None:
    async def test() -> None:
        ring, engine = Ring(1, done=1), Engine()
        wanted = SamplingConfig(max_new_tokens=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, stop=("x",))
        await runner_of(ring, engine, config=config(sampling=wanted)).run(ring.stop)
        got = engine.requests[0].sampling
        assert (got.max_new_tokens, got.temperature, got.top_p, got.top_k, got.min_p, got.stop) == (
            *(3, 0.5, 0.9, 7, 0.1),
            ("x",),
        )

    run(test())


class Counting(Digits):
    """Counts what it renders; refuses the prompt at position 3."""

    def __init__(self) -> None:
        self.rendered: list[str] = []

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        self.rendered.append(messages[0]["content"])
        if messages[0]["content"] == "3":
            raise DataError("the template refuses it")
        return super().render(messages)


class TwoTurns(Alternating):
    """Renders the prompt, and then a message that the episode has made."""

    async def run(self, prompt: Prompt, episode: Episode) -> Sequence[Trajectory]:
        found = await super().run(prompt, episode)
        assert episode.renderer.render([{"role": "user", "content": "77"}]) == (7, 7)
        return found


def test_a_prompt_is_rendered_once_for_its_group_and_other_messages_each_time() -> None:
    async def test() -> None:
        ring, engine, renderer = Ring(4, done=5), Engine(), Counting()
        await runner_of(ring, engine, renderer=renderer, workflow=TwoTurns(), config=config(concurrency=1)).run(
            ring.stop
        )
        assert [text for text in renderer.rendered if text != "77"][:3] == ["0", "1", "2"]
        assert renderer.rendered.count("77") == 4 * 4
        assert {request.token_ids for request in engine.requests} == {(0,), (1,), (2,), (4,)}
        assert ring.dropped == {3: Drop.FAILED}

    run(test())


def test_an_episode_that_is_postponed_has_so_much_more_time() -> None:
    async def test() -> None:
        may_answer = asyncio.Event()

        async def wait(request: GenerationRequest, count: int) -> None:
            await may_answer.wait()

        episodes = episodes_of(engine := Engine(wait), config=config(timeout_s=0.2, attempts=1, group_size=3))
        running = asyncio.create_task(episodes.run(Running(Stream().next(), "g")))
        while not engine.requests:
            await asyncio.sleep(0)
        episodes.postpone(60.0)
        await asyncio.sleep(0.3)
        may_answer.set()
        trajectories, failure = await running
        assert [trajectory.episode for trajectory in trajectories] == [0, 1, 2]
        assert failure is None

    run(test())
