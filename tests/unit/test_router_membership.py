"""Engines that join and leave: what the router asks of them, and what becomes of that when they go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from router_stubs import Stub, drive, request, until

from areal_hpc.generation.connection import EngineLost
from areal_hpc.generation.router import Capacity, Router


class Fluctuating:
    """Engines that join and leave as told, by the name."""

    def __init__(self) -> None:
        self.joining: list[Stub] = []
        self.away: set[str] = set()

    def look(self) -> tuple[list[Stub], set[str]]:
        joined, self.joining = self.joining, []
        return joined, set(self.away)


def fluctuate(
    scenario: Callable[[Router, list[Stub], Fluctuating], Awaitable[Any]], num: int = 1, **options: Any
) -> None:
    world = Fluctuating()

    async def body(router: Router, stubs: list[Stub]) -> None:
        await scenario(router, stubs, world)

    drive(body, num, **{"look": world.look, "look_s": 0.001} | options)


def test_without_an_engine_a_request_waits_for_the_first_that_joins() -> None:
    async def scenario(router: Router, _: list[Stub], world: Fluctuating) -> None:
        assert router.is_deserted()
        asking = asyncio.create_task(router.generate(request("a")))
        await asyncio.sleep(0.02)
        assert not asking.done()
        newcomer = Stub("satellite")
        newcomer.gate.set()
        world.joining.append(newcomer)
        await asking
        assert newcomer.served == ["a"]
        assert not router.is_deserted()

    fluctuate(scenario, num=0)


def test_one_that_has_joined_gets_nothing_before_it_has_the_newest_weights() -> None:
    async def scenario(router: Router, stubs: list[Stub], world: Fluctuating) -> None:
        stubs[0].version = 7
        stubs[0].gate.set()
        await router.expect(7)
        newcomer = Stub("satellite")
        newcomer.gate.set()
        world.joining.append(newcomer)
        await router.generate(request("a"))
        await until(lambda: "expected" in router.out().get("satellite", ""))
        newcomer.version = 7
        await until(lambda: not router.out())

    fluctuate(scenario)


def test_what_an_engine_took_along_when_it_left_is_asked_anew_of_another() -> None:
    """However often that happens: it is no fault of the request, so it costs no attempt of the episode."""

    async def scenario(router: Router, stubs: list[Stub], world: Fluctuating) -> None:
        asking = asyncio.create_task(router.generate(request("a")))
        served = stubs[0]
        for number in range(5):
            await until(lambda: served.served == ["a"])  # noqa: B023  awaited at once
            world.joining.append(another := Stub(f"satellite-{number}"))
            world.away.add(served.name)
            served.trouble = EngineLost(f"{served.name} hung up")
            served.breaks.set()
            served = another
        await until(lambda: served.served == ["a"])
        served.gate.set()
        await asking

    fluctuate(scenario)


def test_an_answer_that_somebody_has_heard_a_part_of_is_not_begun_anew() -> None:
    async def scenario(router: Router, stubs: list[Stub], world: Fluctuating) -> None:
        heard = replace(request("a"), on_tokens=lambda _: None)
        asking = asyncio.create_task(router.generate(heard))
        await until(lambda: stubs[0].served)
        world.away.add("engine-0")
        stubs[0].trouble = EngineLost("engine-0 hung up")
        stubs[0].breaks.set()
        with pytest.raises(EngineLost, match="engine-0 hung up"):
            await asking

    fluctuate(scenario)


def test_one_that_left_while_it_was_asked_whether_it_lives_is_not_taken_back() -> None:
    async def scenario(router: Router, stubs: list[Stub], world: Fluctuating) -> None:
        leaving, other = stubs
        lives = asyncio.Event()

        async def probe() -> int:
            await lives.wait()
            return 1

        leaving.probe, other.version = probe, 1  # type: ignore[method-assign]
        running = [asyncio.create_task(router.generate(request(name, num=num))) for name, num in (("a", 10), ("b", 25))]
        await until(lambda: leaving.served and other.served)
        expecting = asyncio.create_task(router.expect(1))
        await asyncio.sleep(0)
        world.away.add(leaving.name)
        await until(lambda: leaving.name in router.out())
        waiting = asyncio.create_task(router.generate(request("c", num=10)))
        await asyncio.sleep(0.01)
        lives.set()
        await expecting
        leaving.gate.set()
        other.gate.set()
        await asyncio.gather(*running, waiting)
        assert (leaving.served, other.served) == (["a"], ["b", "c"])

    fluctuate(scenario, num=2, capacity=Capacity(max_tokens=30))


def test_one_that_is_leaving_finishes_what_it_has_and_gets_nothing_new() -> None:
    async def scenario(router: Router, stubs: list[Stub], world: Fluctuating) -> None:
        leaving, other = stubs
        running = asyncio.create_task(router.generate(request("a", "session")))
        await until(lambda: leaving.served == ["a"])
        world.away.add("engine-0")
        await until(lambda: router.out() == {"engine-0": "it has left"})
        other.gate.set()
        await router.generate(request("b", "session"))
        other.version = 1
        await router.expect(1)  # which those that stay are brought to
        assert not running.done()
        leaving.gate.set()
        assert (await running).versions.tolist() == [0]
        assert (leaving.served, other.served) == (["a"], ["b"])

    fluctuate(scenario, num=2)


def test_nobody_asks_one_that_has_left_whether_it_lives_until_its_seat_is_taken_again() -> None:
    """Its node may be gone: a connection to it is refused by nobody, for as long as a time limit lasts."""

    async def scenario(router: Router, stubs: list[Stub], world: Fluctuating) -> None:
        for stub in stubs:
            stub.gate.set()
        world.away.add("engine-0")
        await router.generate(request("a", num=1))
        await until(lambda: "engine-0" not in router.outstanding())
        probed = stubs[0].probed
        await asyncio.sleep(0.05)
        assert stubs[0].probed == probed
        world.away.clear()
        world.joining.append(stubs[0])
        await until(lambda: router.outstanding().keys() == {"engine-0", "engine-1"} and not router.out())

    fluctuate(scenario, num=2)


def test_a_disk_that_does_not_say_where_an_engine_is_now_is_asked_again() -> None:
    async def scenario(router: Router, stubs: list[Stub]) -> None:
        stubs[0].trouble, stubs[0].unread = EngineLost("it died"), OSError("no such device")
        for stub in stubs:
            stub.gate.set()
        await asyncio.gather(*(router.generate(request(name)) for name in "ab"), return_exceptions=True)
        await until(lambda: "no such device" in str(router.out()))
        stubs[0].trouble = stubs[0].unread = None
        await until(lambda: not router.out())

    drive(scenario)


def test_of_engines_that_have_left_nothing_is_kept_once_they_have_nothing_to_do() -> None:
    """A run of weeks sees more of them than it has at once."""

    async def scenario(router: Router, stubs: list[Stub], world: Fluctuating) -> None:
        for number in range(5):
            running = asyncio.create_task(router.generate(request(f"r{number}", f"session-{number}")))
            world.joining.append(satellite := Stub(f"satellite-{number}"))
            await until(lambda: satellite.served)
            world.away.add(satellite.name)
            await until(lambda: satellite.name in router.out())
            assert not satellite.closed
            satellite.gate.set()
            await running
            await until(lambda: satellite.closed)
        assert router.outstanding() == {}
        assert router._sessions == {}

    fluctuate(scenario, num=0)


def test_a_roster_that_cannot_be_read_any_more_is_said() -> None:
    def look() -> Any:
        raise PermissionError("seats")

    async def scenario(router: Router, stubs: list[Stub]) -> None:
        stubs[0].gate.set()
        await router.generate(request("a"))
        with pytest.raises(PermissionError):
            await router.generate(request("b"))

    drive(scenario, num=1, look=look)
