"""Agents in daily use: a service, the ring that their episodes go into, and a clock that a test moves."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from rollout_fakes import Records
from served import Served, run, served

from areal_hpc.buffer.memory import MemoryRing
from areal_hpc.config.schema import AgentConfig, FilterConfig, OnlineConfig
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.proxy.online import Online, Score
from areal_hpc.rollout.online import OnlineRunner, RunningBaseline
from areal_hpc.types import Prompt, TrajectoryGroup, WeightVersion

STANDING = "sk-of-a-person"
ETA, GROUPS = 2, 2


class Clock:
    """The monotonic clock, and what a test adds to it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Positions:
    """The stream's positions: 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.used = -1

    def next(self) -> Prompt:
        self.used += 1
        return self.at(self.used)

    def at(self, position: int) -> Prompt:
        return Prompt(position=position, id="", messages=())


@dataclass(slots=True, kw_only=True)
class World:
    """A service for agents in daily use, and the ring that their episodes go into."""

    served: Served
    online: Online
    clock: Clock
    ring: MemoryRing
    records: Records
    noted: list[tuple[str, dict[str, Any]]]

    async def ask(self, key: str, *contents: str, **more: Any) -> str:
        """The interaction's id."""
        messages = [{"role": "user", "content": content} for content in contents]
        status, answer = await self.served.post("/v1/chat/completions", {"messages": messages} | more, key)
        assert status == 200, answer
        return str(answer["id"])

    async def post(self, path: str, body: Any, key: str = STANDING) -> Any:
        status, answer = await self.served.post(path, body, key)
        assert status == 200, answer
        return answer

    def sealed(self) -> list[TrajectoryGroup]:
        return [self.ring.groups[key] for key in sorted(self.ring.groups)]

    def outcomes(self) -> list[tuple[str, str]]:
        return [(values["outcome"], values["reason"]) for values in self.records.kept["group"]]

    def publish(self, step: int) -> None:
        self.ring.reader.release(WeightVersion(self.ring.epoch, step))
        self.served.engine.version = step


def world(
    hermes: ChatRenderer,
    scenario: Any,
    *,
    score: Score | None = None,
    reward_wait_s: float = 60.0,
    concurrency: int = 8,
    filters: FilterConfig | None = None,
    **options: Any,
) -> None:
    """Run ``scenario(world)`` beside the loop that seals episodes."""
    config = AgentConfig(online=OnlineConfig(enabled=True, idle_s=30.0, reward_wait_s=reward_wait_s), discount=0.5)
    clock, noted, records = Clock(), list[tuple[str, dict[str, Any]]](), Records()
    ring = MemoryRing((ETA + 1) * GROUPS, ETA)
    writer = ring.writer(0)

    def make(sessions: Any, open_session: Any) -> Online:
        return Online(
            sessions,
            open_session,
            config,
            standing_key=STANDING,
            score=score,
            note=lambda session, said: noted.append((session.id, dict(said))),
            clock=clock,
        )

    async def play() -> None:
        async with served(hermes, options.pop("script", lambda _: "yes"), online=make, **options) as service:
            assert service.online is not None
            service.sessions.close(service.session)
            made = World(served=service, online=service.online, clock=clock, ring=ring, records=records, noted=noted)
            made.publish(0)
            stop = asyncio.Event()
            runner = OnlineRunner(
                take=made.online.take,
                stream=Positions(),
                writer=writer,
                filters=filters or FilterConfig(),
                baseline=RunningBaseline(4),
                max_staleness=ETA,
                concurrency=concurrency,
                patience_s=60.0,
                record=records,
                poll_s=0.001,
            )
            working = asyncio.create_task(runner.run(stop))
            try:
                await scenario(made)
            finally:
                stop.set()
                await working

    run(play())
