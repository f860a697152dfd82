"""A ring, a stream, an engine and a workflow of a few lines each, for what runs episodes."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from areal_hpc.config.schema import RolloutConfig, SamplingConfig
from areal_hpc.protocols import Episode
from areal_hpc.rollout.episodes import EpisodeRunner
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

    def lacks(self) -> tuple[str, str]:
        return "a free ticket", ""

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


def episodes_of(engine: Engine, **parts: Any) -> EpisodeRunner:
    knobs: dict[str, Any] = {
        "workflow": Alternating(),
        "generator": engine,
        "renderer": Digits(),
        "score": parity,
        "config": config(),
        "max_tokens": 64,
        "record": Records(),
        "seed": 1,
        "retry_pause_s": 0.0,
    }
    return EpisodeRunner(**knobs | parts)


def runner_of(
    ring: Ring,
    engine: Engine,
    records: Records | None = None,
    *,
    engines: Callable[[], str] = str,
    stall_s: float = 60.0,
    **parts: Any,
) -> Runner:
    """``parts`` are of the episodes; configuration and records are the runner's as well."""
    parts = {"config": config(), "record": records or Records(), **parts}
    return Runner(
        episodes=episodes_of(engine, **parts),
        stream=Stream(),
        writer=ring,
        config=parts["config"],
        record=parts["record"],
        engines=engines,
        poll_s=0.0,
        stall_s=stall_s,
    )


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
