"""Which engine gets a request, and what becomes of it where engines fill, fail and come back."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_stubs import Stub, drive, request, until

from areal_hpc.errors import GenerationError
from areal_hpc.generation import router as router_module
from areal_hpc.generation.connection import EngineLost, EngineRefused
from areal_hpc.generation.router import MAX_PASSED, Capacity, Router
from areal_hpc.generation.scripted import ScriptedGenerator
from areal_hpc.types import Completion, GenerationRequest, StopReason


def test_requests_go_where_the_fewest_tokens_are_outstanding() -> None:
    async def scenario(router: Router, stubs: list[Stub]) -> None:
        asking = []
        for name, num in (("big", 100), ("a", 10), ("b", 10), ("c", 10)):
            asking.append(asyncio.create_task(router.generate(request(name, num=num))))
            await asyncio.sleep(0)
        await until(lambda: len(stubs[0].served + stubs[1].served) == 4)
        assert stubs[0].served == ["big"]
        assert router.outstanding() == {"engine-0": 105, "engine-1": 45}
        for stub in stubs:
            stub.gate.set()
        await asyncio.gather(*asking)
        assert router.outstanding() == {"engine-0": 0, "engine-1": 0}

    drive(scenario)


@pytest.mark.parametrize("capacity", [Capacity(max_requests=2), Capacity(max_tokens=39)])  # a request is of 15 tokens
def test_an_engine_that_is_full_gets_no_more_until_something_ends(capacity: Capacity) -> None:
    async def scenario(router: Router, stubs: list[Stub]) -> None:
        asking = [asyncio.create_task(router.generate(request(f"r{k}", "one session"))) for k in range(7)]
        await until(lambda: len(stubs[0].served + stubs[1].served) == 4)
        for _ in range(20):
            await asyncio.sleep(0)
        assert router.outstanding() == {"engine-0": 30, "engine-1": 30}  # the session moved when its engine was full
        asking[0].cancel()
        await until(lambda: len(stubs[0].served + stubs[1].served) == 5)
        for stub in stubs:
            stub.gate.set()
        await asyncio.gather(*asking, return_exceptions=True)
        assert sorted(stubs[0].served + stubs[1].served) == [f"r{k}" for k in range(7)]
        assert router.outstanding() == {"engine-0": 0, "engine-1": 0}

    drive(scenario, capacity=capacity)


def test_a_request_longer_than_an_engine_may_have_goes_alone() -> None:
    async def scenario(router: Router, stubs: list[Stub]) -> None:
        asking = [asyncio.create_task(router.generate(request(name, num=100))) for name in ("long", "other")]
        await until(lambda: stubs[0].served)
        for _ in range(20):
            await asyncio.sleep(0)
        assert stubs[0].served == ["long"]
        stubs[0].gate.set()
        await asyncio.gather(*asking)
        assert stubs[0].served == ["long", "other"]

    drive(scenario, num=1, capacity=Capacity(max_tokens=50))


@pytest.mark.parametrize("num", [1, 2])
def test_a_large_request_does_not_starve_behind_small_ones_and_stops_no_other_engine(num: int) -> None:
    """Small ones come for ever, so that there is never room for it on its own account."""

    async def scenario(router: Router, stubs: list[Stub]) -> None:
        def ask(name: str, tokens: int) -> asyncio.Task[Any]:
            return asyncio.create_task(router.generate(request(name, num=tokens)))

        running = [ask(f"first{k}", 10) for k in range(2 * num)]
        await until(lambda: sum(len(stub.served) for stub in stubs) == 2 * num)
        large = ask("large", 35)  # with its prompt as much as an engine may have, where 30 are taken
        for stub in stubs:
            stub.gate.set()
        after = 0
        while not large.done():
            after += 1
            running.append(ask(f"later{after}", 10))
            await asyncio.sleep(0)
            assert after < 1000, "it has starved"
        passed = [stub.served[: stub.served.index("large")] for stub in stubs if "large" in stub.served]
        assert sum(name.startswith("later") for name in passed[0]) <= MAX_PASSED
        await asyncio.gather(*running)
        assert sorted(name for stub in stubs for name in stub.served if name.startswith("later")) == sorted(
            f"later{k}" for k in range(1, after + 1)
        )

    drive(scenario, num=num, capacity=Capacity(max_tokens=40))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_no_request_is_passed_by_more_than_so_many_younger_ones(costs: list[int], random: Random) -> None:
    """All ask at once, and what runs ends in any order."""

    async def body() -> None:
        router = Router([stub := Stub("engine-0")], wait_s=5.0, capacity=Capacity(max_tokens=65))
        begun: list[int] = []
        ends = [asyncio.Event() for _ in costs]

        async def generate(asked: GenerationRequest) -> Completion:
            begun.append(int(asked.request_id))
            await ends[begun[-1]].wait()
            return await ScriptedGenerator([[1]]).generate(asked)

        stub.generate = generate  # type: ignore[method-assign]
        tasks = [asyncio.create_task(router.generate(request(str(k), num=cost))) for k, cost in enumerate(costs)]
        ended: set[int] = set()
        async with asyncio.timeout(30):
            while len(ended) < len(costs):
                await asyncio.sleep(0)
                assert all(tokens <= 65 for tokens in router.outstanding().values())
                if running := [k for k in begun if k not in ended]:
                    ended.add(one := random.choice(running))
                    ends[one].set()
            await asyncio.gather(*tasks)
        for place, number in enumerate(begun):
            assert sum(younger > number for younger in begun[:place]) <= MAX_PASSED
        await router.close()

    asyncio.run(body())


def test_who_waits_for_room_goes_on_when_the_full_engine_is_lost_and_comes_back() -> None:
    async def scenario(router: Router, stubs: list[Stub]) -> None:
        stubs[0].gate.clear()
        first = asyncio.create_task(router.generate(request("first")))
        await until(lambda: stubs[0].served)
        second = asyncio.create_task(router.generate(request("second")))
        await asyncio.sleep(0)
        await router.expect(1)  # which engine-0 does not serve: it is out, and what it runs is failed
        with pytest.raises(EngineLost):
            await first
        stubs[0].version = 1
        stubs[0].gate.set()
        await second
        assert stubs[0].served == ["first", "second"]

    drive(scenario, num=1, capacity=Capacity(max_requests=1))


def test_a_session_stays_on_its_engine() -> None:
    async def scenario(router: Router, stubs: list[Stub]) -> None:
        for stub in stubs:
            stub.gate.set()
        for turn in range(4):
            for session in ("s", "t", "u"):
                await router.generate(request(f"{session}{turn}", session))
        by_engine = [{name[0] for name in stub.served} for stub in stubs]
        assert not set.intersection(*by_engine)

    drive(scenario)


def test_J18_a_failed_request_leaves_no_load_behind() -> None:
    async def scenario(router: Router, stubs: list[Stub]) -> None:
        for trouble in (GenerationError("garbage"), EngineLost("broken"), ValueError("a bug")):
            stubs[0].trouble = trouble
            with pytest.raises(type(trouble)):
                await router.generate(request("r"))
            assert router.outstanding() == {"engine-0": 0}
            await until(lambda: not router.out())
        stubs[0].trouble = None
        asking = asyncio.create_task(router.generate(request("cancelled")))
        await until(lambda: "cancelled" in stubs[0].served)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert router.outstanding() == {"engine-0": 0}

    drive(scenario, num=1)


def test_F14_a_lost_request_fails_but_one_that_was_never_sent_goes_to_another_engine() -> None:
    async def scenario(router: Router, stubs: list[Stub]) -> None:
        stubs[1].gate.set()
        stubs[0].trouble, stubs[0].sick = EngineRefused("engine-0 takes no connection"), True
        await router.generate(request("refused"))
        assert (stubs[0].served, stubs[1].served) == (["refused"], ["refused"])
        assert list(router.out()) == ["engine-0"]
        stubs[1].trouble, stubs[1].sick = EngineLost("engine-1 broke off"), True
        with pytest.raises(EngineLost, match="engine-1"):
            await router.generate(request("lost"))
        assert stubs[0].served == ["refused"]
        assert set(router.out()) == {"engine-0", "engine-1"}

    drive(scenario)


def test_the_dead_come_back_when_they_are_healthy_and_sessions_move_meanwhile() -> None:
    async def scenario(router: Router, stubs: list[Stub]) -> None:
        stubs[0].gate.set()
        stubs[1].gate.set()
        await router.generate(request("s0", "s"))
        assert stubs[0].served == ["s0"]
        stubs[0].trouble, stubs[0].sick = EngineRefused("gone"), True
        await router.generate(request("s1", "s"))
        stubs[0].trouble, stubs[0].sick = None, False
        await until(lambda: not router.out())
        await router.generate(request("s2", "s"))
        assert stubs[1].served == ["s1", "s2"]  # its cache is here now
        await router.generate(request("new"))
        assert stubs[0].served[-1] == "new"

    drive(scenario)


def test_D26_an_engine_behind_the_published_version_serves_nothing_until_it_catches_up() -> None:
    async def scenario(router: Router, stubs: list[Stub]) -> None:
        for stub in stubs:
            stub.gate.set()
        await router.generate(request("s0", "s"))
        stubs[1].version = 5
        await router.expect(5)
        await router.expect(4)  # an older announcement that comes late changes nothing
        assert router.out() == {"engine-0": "it serves version 0 where 5 is expected"}
        for k in range(3):
            await router.generate(request(f"r{k}", "s"))
        assert stubs[0].served == ["s0"]
        stubs[0].version = 5
        await until(lambda: not router.out())

    drive(scenario)


def test_D26_what_an_engine_runs_that_missed_an_update_is_failed_and_not_waited_for() -> None:
    async def scenario(router: Router, stubs: list[Stub]) -> None:
        asking = asyncio.create_task(router.generate(request("r")))
        await until(lambda: stubs[0].served)
        with pytest.raises(EngineLost, match="engine-0 was taken out"):
            await asyncio.gather(asking, router.expect(1))
        assert router.outstanding() == {"engine-0": 0}

    drive(scenario, num=1)


def test_when_all_are_out_a_request_waits_for_one_and_no_longer_than_the_limit() -> None:
    async def scenario(router: Router, stubs: list[Stub]) -> None:
        stubs[0].trouble, stubs[0].sick = EngineRefused("gone"), True
        stubs[0].gate.set()
        with pytest.raises(GenerationError, match=r"no engine came back in 0\.2 s.*engine-0"):
            await router.generate(request("r"))
        waiting = asyncio.create_task(router.generate(request("patient")))
        stubs[0].trouble, stubs[0].sick = None, False
        assert (await waiting).stop is StopReason.STOP

    drive(scenario, num=1, wait_s=0.2)


def test_an_abort_reaches_the_engine_that_runs_the_request() -> None:
    async def scenario(router: Router, stubs: list[Stub]) -> None:
        asking = [asyncio.create_task(router.generate(request(name))) for name in ("a", "b")]
        await until(lambda: stubs[0].served and stubs[1].served)
        await router.abort("b")
        await router.abort("unknown")
        holder = next(stub for stub in stubs if "b" in stub.served)
        assert [stub.aborted for stub in stubs] == [["b"] if stub is holder else [] for stub in stubs]
        for stub in stubs:
            stub.gate.set()
        await asyncio.gather(*asking)

    drive(scenario)


def test_sessions_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "MAX_SESSIONS", 2)

    async def scenario(router: Router, stubs: list[Stub]) -> None:
        stubs[0].gate.set()
        for session in ("a", "b", "a", "c"):
            await router.generate(request(session, session))
        assert list(router._sessions) == ["a", "c"]

    drive(scenario, num=1)


class Fates:
    """An engine that lets each request end as its id says."""

    version = 0

    def __init__(self, name: str, sick: bool) -> None:
        self.name, self.sick, self.holding = name, sick, asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Completion:
        fate = request.request_id.split("/")[1]
        await asyncio.sleep(0)
        if fate in FAILURES:
            raise FAILURES[fate](f"{self.name} lets it be {fate}")
        if fate == "held":
            await self.holding.wait()
        return await ScriptedGenerator([[1]]).generate(request)

    async def abort(self, request_id: str) -> None: ...

    async def probe(self) -> int:
        if self.sick:
            raise GenerationError(f"{self.name} is not healthy")
        return self.version

    async def close(self) -> None: ...


FAILURES: dict[str, type[Exception]] = {
    "failed": GenerationError,
    "lost": EngineLost,
    "refused": EngineRefused,
    "buggy": ValueError,
}


def test_engines_that_look_healthy_and_refuse_a_request_are_not_asked_for_ever() -> None:
    async def body() -> None:
        router = Router([Fates("engine-0", False)], probe_s=0.001, wait_s=0.05)
        async with asyncio.timeout(30):
            with pytest.raises(EngineRefused, match="engine-0 lets it be refused"):
                await router.generate(request("0/refused", "s", 1))
        assert router.outstanding() == {"engine-0": 0}
        await router.close()

    asyncio.run(body())


FATE = st.sampled_from(["answered", "held", *FAILURES])
WHEN = st.sampled_from(["cancelled", "left", "outdated"])


@settings(max_examples=60)
@given(
    st.lists(st.tuples(FATE, st.integers(0, 99), st.integers(0, 2)), max_size=12),
    st.lists(st.booleans()),
    WHEN,
    st.builds(Capacity, max_requests=st.integers(0, 3), max_tokens=st.integers(0, 200)),
)
def test_J18_no_load_is_left_however_requests_end(
    asked: list[tuple[str, int, int]], sick: list[bool], rest: str, capacity: Capacity
) -> None:
    """Answered, failed, lost, refused and tried elsewhere, cancelled, taken from an engine that fell behind, or waiting
    for room at full ones."""

    async def body() -> None:
        engines = [Fates(f"engine-{k}", ill) for k, ill in enumerate([False, *sick[:2]])]
        router = Router(engines, probe_s=0.001, wait_s=0.02, capacity=capacity)
        tasks = [
            asyncio.create_task(router.generate(request(f"{number}/{fate}", f"s{session}", num)))
            for number, (fate, num, session) in enumerate(asked)
        ]
        await asyncio.sleep(0.001)
        assert all(tokens >= 0 for tokens in router.outstanding().values())
        if rest == "cancelled":
            for task in tasks:
                task.cancel()
        elif rest == "outdated":
            await router.expect(1)
        for engine in engines:
            engine.holding.set()
        async with asyncio.timeout(30):
            await asyncio.gather(*tasks, return_exceptions=True)
        assert set(router.outstanding().values()) == {0}
        assert router._serving == {}
        await router.close()

    asyncio.run(body())
