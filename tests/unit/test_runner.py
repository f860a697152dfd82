"""The rollout loops against a ring, a stream and an engine of a few lines each."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import pytest

from areal_hpc.config.schema import FilterConfig, RolloutConfig, SamplingConfig
from areal_hpc.errors import ConfigError, DataError, Fenced, GenerationError, RewardError
from areal_hpc.protocols import Episode
from areal_hpc.rollout.episodes import derive_seed
from areal_hpc.rollout.runner import Runner
from areal_hpc.types import (
    Completion,
    Drop,
    GenerationRequest,
    Message,
    Prompt,
    StopReason,
    Ticket,
    Trajectory,
    TrajectoryGroup,
    WeightVersion,
)

Answer = Callable[[GenerationRequest, int], Awaitable[None]]


class Stream:
    """Prompts 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.position = -1

    def next(self) -> Prompt:
        self.position += 1
        return self.at(self.position)

    def at(self, position: int) -> Prompt:
        return Prompt(
            position=position, id=f"prompt-{position}", messages=({"role": "user", "content": str(position)},)
        )


class Ring:
    """``slots`` tickets; a group that is sealed keeps its slot until ``free``, one that is dropped gives it back."""

    version = WeightVersion(1, 4)

    def __init__(self, slots: int, *, reissued: Sequence[int] = (), done: int = 10**9) -> None:
        self.free, self.reissued, self.done, self.number = slots, list(reissued), done, 0
        self.stop = asyncio.Event()  # set when ``done`` groups have ended
        self.outstanding: set[int] = set()
        self.order: list[int] = []
        self.sealed: dict[int, TrajectoryGroup] = {}
        self.dropped: dict[int, Drop] = {}

    def try_reserve(self, position: int) -> Ticket | None:
        if self.free == 0:
            return None
        self.free, self.number = self.free - 1, self.number + 1
        self.outstanding.add(self.number)
        self.order.append(position)
        return Ticket(chain="c", number=self.number, position=position, version=self.version)

    def seal(self, ticket: Ticket, group: TrajectoryGroup) -> None:
        self._end(ticket)
        self.sealed[ticket.position] = group

    def drop(self, ticket: Ticket, reason: Drop) -> None:
        self._end(ticket)
        self.free += 1
        self.dropped[ticket.position] = reason

    def _end(self, ticket: Ticket) -> None:
        self.outstanding.remove(ticket.number)
        self.done -= 1
        if self.done == 0:
            self.stop.set()

    def reissues(self) -> list[int]:
        given, self.reissued = self.reissued, []
        return given

    def close(self) -> None: ...


class Digits:
    """A renderer whose tokens are the digits of the position."""

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(int(digit) for digit in messages[0]["content"])

    def decode(self, token_ids: Sequence[int]) -> str:
        return ",".join(map(str, token_ids))


class Engine:
    """Answers with the parity of the sampling seed; ``before`` may fail, wait or look."""

    def __init__(self, before: Answer | None = None) -> None:
        self.before, self.requests, self.open, self.most_open = before, list[GenerationRequest](), 0, 0

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        count = len(self.requests)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(0)
            if self.before is not None:
                await self.before(request, count)
        finally:
            self.open -= 1
        assert request.sampling.seed is not None
        return Completion(
            token_ids=np.array([request.sampling.seed % 2], dtype=np.int32),
            logprobs=np.zeros(1, dtype=np.float32),
            versions=np.array([5], dtype=np.int32),
            stop=StopReason.STOP,
        )

    async def close(self) -> None: ...


class Alternating:
    """A workflow: one request; reward 0 for even samples and 1 for odd ones."""

    async def run(self, prompt: Prompt, episode: Episode) -> Sequence[Trajectory]:
        token_ids = episode.renderer.render(prompt.messages)
        request = GenerationRequest(request_id=episode.id, token_ids=token_ids, sampling=episode.sampling)
        completion = await episode.generator.generate(request)
        reward = await episode.score(episode.id, prompt)
        return [
            Trajectory(
                token_ids=completion.token_ids,
                loss_mask=np.ones(1, dtype=np.bool_),
                logprobs=completion.logprobs,
                versions=completion.versions,
                reward=reward,
                stop=completion.stop,
            )
        ]


def sample_of(episode_id: str) -> int:
    return int(episode_id.split(".s")[1].split(".", maxsplit=1)[0])


def position_of(episode_id: str) -> int:
    return int(episode_id.split(".p")[1].split(".", maxsplit=1)[0])


async def parity(text: str, prompt: Prompt) -> float:
    return float(sample_of(text) % 2)


class Records:
    def __init__(self) -> None:
        self.kept: dict[str, list[Mapping[str, Any]]] = defaultdict(list)

    def __call__(self, kind: str, values: Mapping[str, Any]) -> None:
        self.kept[kind].append(values)

    def outcomes(self) -> Counter[tuple[str, str]]:
        return Counter((str(v["outcome"]), str(v["reason"])) for v in self.kept["group"])


def config(**knobs: Any) -> RolloutConfig:
    return RolloutConfig(
        **{"reward": "m:f", "group_size": 4, "concurrency": 4, "sampling": SamplingConfig(max_new_tokens=8)} | knobs
    )


def runner_of(ring: Ring, engine: Engine, records: Records | None = None, **parts: Any) -> Runner:
    knobs = {
        "stream": Stream(),
        "writer": ring,
        "workflow": Alternating(),
        "generator": engine,
        "renderer": Digits(),
        "score": parity,
        "config": config(),
        "max_tokens": 64,
        "record": records or Records(),
        "poll_s": 0.0,
        "retry_pause_s": 0.0,
    }
    return Runner(**knobs | parts)


def run(test: Awaitable[None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test, 20)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left running"

    asyncio.run(limited())


async def until(ready: Callable[[], Any]) -> None:
    while not ready():
        await asyncio.sleep(0)


def failing(*wanted: tuple[int, int, int], error: Exception) -> Answer:
    """Fail the (position, sample, attempt) triples that are named."""

    async def before(request: GenerationRequest, count: int) -> None:
        attempt = int(request.request_id.rpartition(".a")[2])
        if (position_of(request.request_id), sample_of(request.request_id), attempt) in wanted:
            raise error

    return before


def test_groups_are_run_and_sealed_and_the_ring_sets_the_pace() -> None:
    async def test() -> None:
        ring, engine, records = Ring(6, done=6), Engine(), Records()
        await runner_of(ring, engine, records).run(ring.stop)
        assert sorted(ring.sealed) == ring.order == list(range(6))
        assert ring.outstanding == set()
        for position, group in ring.sealed.items():
            assert (group.position, group.prompt_id) == (position, f"prompt-{position}")
            assert [t.episode for t in group.trajectories] == [0, 1, 2, 3]
            assert group.rewards.tolist() == [0.0, 1.0, 0.0, 1.0]
        assert records.outcomes() == {("sealed", ""): 6}
        values = records.kept["group"][0]
        assert {k: values[k] for k in ("reward_mean", "reward_std", "trajectories", "tokens", "truncated")} == {
            "reward_mean": 0.5,
            "reward_std": 0.5,
            "trajectories": 4,
            "tokens": 4,
            "truncated": 0.0,
        }
        assert [values[k] for k in ("version_min", "version_max", "ticket_version", "attempts")] == [5, 5, 4, 1]

    run(test())


def test_no_ticket_no_episode() -> None:
    async def test() -> None:
        ring, engine, stop = Ring(2), Engine(), asyncio.Event()
        working = asyncio.create_task(runner_of(ring, engine).run(stop))
        await until(lambda: len(ring.sealed) == 2)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(engine.requests) == 8
        ring.free += 1
        await until(lambda: len(ring.sealed) == 3)
        stop.set()
        await working

    run(test())


def test_at_most_concurrency_groups_are_in_flight() -> None:
    async def test() -> None:
        ring, engine = Ring(30, done=30), Engine()
        await runner_of(ring, engine, config=config(concurrency=3)).run(ring.stop)
        assert engine.most_open == 3 * 4

    run(test())


def test_reissued_positions_come_first_and_once() -> None:
    async def test() -> None:
        ring = Ring(6, reissued=[40, 17], done=6)
        await runner_of(ring, Engine(), config=config(concurrency=1)).run(ring.stop)
        assert ring.order == [40, 17, 0, 1, 2, 3]
        assert ring.sealed[40].prompt_id == "prompt-40"

    run(test())


def test_a_reissue_that_the_ring_still_shows_is_not_run_twice() -> None:
    class Slow(Ring):
        def reissues(self) -> list[int]:
            return [40] if 40 not in self.sealed else []

    async def test() -> None:
        ring = Slow(6, done=6)
        await runner_of(ring, Engine()).run(ring.stop)
        assert ring.order.count(40) == 1

    run(test())


def test_a_filtered_group_gives_its_slot_to_the_next_prompt() -> None:
    async def all_right(text: str, prompt: Prompt) -> float:
        return 1.0 if prompt.position < 5 else await parity(text, prompt)

    async def test() -> None:
        ring, records = Ring(2, done=7), Records()
        await runner_of(ring, Engine(), records, score=all_right).run(ring.stop)
        assert ring.dropped == dict.fromkeys(range(5), Drop.FILTERED)
        assert sorted(ring.sealed) == [5, 6]
        assert records.outcomes() == {("filtered", "zero_variance"): 5, ("sealed", ""): 2}

    run(test())


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


@pytest.mark.parametrize("method", ["try_reserve", "seal", "reissues"])
def test_D14_a_ring_that_fences_us_ends_the_run(method: str) -> None:
    async def test() -> None:
        ring = Ring(8)

        def fenced(*_: Any) -> Any:
            raise Fenced("attempt 2 owns the run")

        setattr(ring, method, fenced)
        with pytest.raises(Fenced, match="attempt 2"):
            await runner_of(ring, Engine()).run(asyncio.Event())
        assert ring.sealed == {}

    run(test())


def test_C6_a_stop_cancels_what_is_in_flight_and_seals_nothing_half() -> None:
    async def hang_on_the_last(request: GenerationRequest, count: int) -> None:
        if sample_of(request.request_id) == 3:
            await asyncio.Event().wait()

    async def test() -> None:
        ring, engine, stop = Ring(8), Engine(hang_on_the_last), asyncio.Event()
        working = asyncio.create_task(runner_of(ring, engine).run(stop))
        await until(lambda: engine.open == 4 and len(engine.requests) == 16)
        stop.set()
        await working
        assert engine.open == 0
        assert ring.sealed == ring.dropped == {}
        assert len(ring.outstanding) == 4

    run(test())


def test_a_cancelled_runner_leaves_nothing_running() -> None:
    async def test() -> None:
        engine = Engine(lambda *_: asyncio.Event().wait())  # type: ignore[arg-type,return-value]
        working = asyncio.create_task(runner_of(Ring(8), engine).run(asyncio.Event()))
        await until(lambda: engine.open == 16)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert engine.open == 0

    run(test())


def test_failures_without_end_end_the_run_with_the_last_one() -> None:
    async def broken(text: str, prompt: Prompt) -> float:
        raise RewardError("division by zero")

    async def test() -> None:
        ring = Ring(4)
        with pytest.raises(RewardError, match="division by zero") as caught:
            await runner_of(ring, Engine(), score=broken, config=config(concurrency=2)).run(asyncio.Event())
        assert caught.value.__notes__ == ["16 prompts in a row failed for good; this is the last one's failure"]
        assert len(ring.dropped) == 16

    run(test())


def test_a_success_between_failures_lets_the_run_go_on() -> None:
    async def mostly_broken(text: str, prompt: Prompt) -> float:
        if prompt.position % 10:
            raise RewardError("no")
        return await parity(text, prompt)

    async def test() -> None:
        ring = Ring(50, done=100)
        await runner_of(ring, Engine(), score=mostly_broken, config=config(attempts=1)).run(ring.stop)
        assert len(ring.sealed) == 10

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


def test_D27_a_stall_names_whom_it_waits_for() -> None:
    async def hang_in_reward(text: str, prompt: Prompt) -> float:
        if sample_of(text) == 1:
            await asyncio.Event().wait()
        return 0.0

    async def test() -> None:
        records, stop, release = Records(), asyncio.Event(), asyncio.Event()

        async def hang(request: GenerationRequest, count: int) -> None:
            if sample_of(request.request_id) > 1:
                await release.wait()

        engine = Engine(hang)
        runner = runner_of(Ring(2), engine, records, score=hang_in_reward, stall_s=0.01)
        assert "waiting for a prompt" in runner.waiting_for()
        working = asyncio.create_task(runner.run(stop))
        await until(lambda: records.kept["stall"])
        sentence = records.kept["stall"][0]["waiting_for"]
        assert sentence == runner.waiting_for()
        for part in (
            "the trainer to free a slot for the prompt at position 2",
            "2 of 4 groups in flight",
            "prompt 'prompt-0' at position 0, attempt 1 of 3",
            "2 generating, 1 scoring",
        ):
            assert part in sentence
        stop.set()
        await working

    run(test())


def test_J8_memory_is_flat_over_thousands_of_groups() -> None:
    async def test() -> None:
        async def groups(count: int) -> None:
            ring = Ring(count, done=count)
            ring.sealed = Forgetful()
            ring.dropped = Forgetful()
            engine = Engine()
            engine.requests = Forgetful()  # type: ignore[assignment]
            await runner_of(ring, engine, record=lambda kind, values: None).run(ring.stop)

        await groups(500)
        gc.collect()
        before, objects = psutil.Process().memory_info().rss, len(gc.get_objects())
        await groups(2000)
        gc.collect()
        assert len(gc.get_objects()) - objects < 200
        assert psutil.Process().memory_info().rss - before < 8 << 20

    run(test())


class Forgetful(dict[Any, Any]):
    """Takes everything, keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...
