"""Stub engines that die and come back, a stub transport over a real membership, and a fleet of them on a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_hpc.errors import GenerationError, WeightUpdateError
from areal_hpc.roles.wiring.fleet import LOOK_S, MIB, Fleet, Satellites
from areal_hpc.weights.membership import Membership


@dataclass
class StubEngine:
    """An engine in some process of its own: ``process`` runs, ``incarnation`` is the one that the trainer talks to."""

    name: str
    process: int = 0
    incarnation: int = 0
    alive: bool = True
    fails: int = 0  # so many more updates
    version: int = 0
    num_ranks: int = 1
    reached: int = 0

    def die(self) -> None:
        self.alive = False

    def come_back(self) -> None:
        self.alive, self.process, self.version = True, self.process + 1, 0

    def moved(self) -> object | None:
        return None if self.process == self.incarnation else self.process

    async def reach(self) -> None:
        self.reached += 1
        self.incarnation = self.process
        if not self.alive:
            raise GenerationError(f"{self.name} takes no connection")

    async def close(self) -> None: ...

    async def take(self, version: int) -> None:
        if not self.alive or self.incarnation != self.process:
            raise WeightUpdateError(f"{self.name} does not answer")
        if self.fails:
            self.fails -= 1
            raise WeightUpdateError(f"{self.name} did not take the weights")
        self.version = version


class StubTransport:
    """Membership is the real one; an update is one call."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self.membership = Membership(engines, 10.0)
        self.calls: list[str] = []
        self.route = "gloo from 10.0.0.1"
        self.seconds = 1.0

    async def _update(self, membership: Membership, version: int) -> Mapping[str, float]:
        membership.require()
        await membership.all("take weights", lambda target: target.take(version))  # type: ignore[attr-defined]
        return {"seconds": self.seconds, "bytes": 117.0 * MIB}

    async def publish(self, version: int, weights: Iterable[Any]) -> Mapping[str, float]:
        self.calls.append(f"publish {version} to {' '.join(target.name for target in self.membership.members)}")
        return await self._update(self.membership, version)

    async def catch_up(self, version: int, weights: Iterable[Any], targets: Sequence[Any]) -> Mapping[str, float]:
        self.calls.append(f"catch up {version} {' '.join(target.name for target in targets)}")
        with self.membership.catching_up(targets) as newcomers:
            return await self._update(newcomers, version)

    async def close(self) -> None: ...


@dataclass
class World:
    """A fleet of two on a clock that only sleeping moves."""

    num: int = 2
    now: float = 0.0
    stop: bool = False
    min_mb_per_s: float = 50.0
    records: list[tuple[str, str]] = field(default_factory=list)
    desert_s: float | None = None
    in_the_queue: bool = False
    joining: list[StubEngine] = field(default_factory=list)
    away: set[str] = field(default_factory=set)
    given_up: list[tuple[str, int, str]] = field(default_factory=list)
    plan: dict[int, Any] = field(default_factory=dict)  # so many sleeps from now -> what happens then
    walked: int = 0

    def __post_init__(self) -> None:
        self.engines = [StubEngine(f"g{k}") for k in range(self.num)]
        self.transport = StubTransport(self.engines)
        self.fleet = Fleet(
            self.engines,  # type: ignore[arg-type]
            self.transport,
            run=asyncio.run,
            satellites=Satellites(
                look=self.look_around, desert_s=self.desert_s, in_the_queue=lambda: self.in_the_queue
            ),
            wait_s=30.0,
            min_mb_per_s=self.min_mb_per_s,
            stopping=lambda: self.stop,
            record=lambda _, values: self.records.append((values["engine"], values["event"])),
            give_up=lambda *told: self.given_up.append(told),
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    def look_around(self) -> tuple[Any, set[str]]:
        joined, self.joining = self.joining, []
        return joined, set(self.away)

    def join(self, name: str) -> StubEngine:
        self.joining.append(engine := StubEngine(name))
        return engine

    def comes_back(self, engine: StubEngine) -> None:
        """Its seat is taken again."""
        self.away.discard(engine.name)
        self.joining.append(engine)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if happens := self.plan.pop(round(self.now), None):
            happens()

    def weights(self) -> Iterator[Any]:
        self.walked += 1
        yield "w", None

    def publish(self, version: int) -> int:
        """Publish until it goes well; how many tries that took."""
        tries = 1
        while self.fleet.publish(version, self.weights()) is None:
            tries += 1
        return tries

    def look(self) -> bool:
        self.now += LOOK_S
        return self.fleet.behind()
