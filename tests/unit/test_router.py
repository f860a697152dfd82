from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.errors import GenerationError
from areal_hpc.generation import router as router_module
from areal_hpc.generation.connection import EngineLost, EngineRefused
from areal_hpc.generation.router import MAX_PASSED, Capacity, Router
from areal_hpc.generation.scripted import ScriptedGenerator
from areal_hpc.types import Completion, GenerationRequest, Sampling, StopReason


@dataclass
class Stub:
    """An engine that answers when told to, and fails as told."""

    name: str
    version: int = 0
    trouble: Exception | None = None
    sick: bool = False
    unread: OSError | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    breaks: asyncio.Event = field(default_factory=asyncio.Event)  # what runs ends in its trouble
    probed: int = 0
    served: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    closed: bool = False

    async def generate(self, request: GenerationRequest) -> Completion:
        self.served.append(request.request_id)
        if self.trouble is not None:
            raise self.trouble
        ways = {asyncio.ensure_future(event.wait()) for event in (self.gate, self.breaks)}
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        if self.breaks.is_set():
            assert self.trouble is not None
            raise self.trouble
        return await ScriptedGenerator([[1]], version=self.version).generate(request)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def probe(self) -> int:
        self.probed += 1
        if self.unread is not None:
            raise self.unread
        if self.sick:
            raise GenerationError(f"{self.name} is not healthy")
        return self.version

    async def close(self) -> None:
        self.closed = True


def request(request_id: str, session: str = "", num: int = 10) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, token_ids=(1,) * 5, sampling=Sampling(max_new_tokens=num), session=session
    )


def drive(scenario: Callable[[Router, list[Stub]], Awaitable[Any]], num: int = 2, **options: Any) -> None:
    async def body() -> None:
        stubs = [Stub(f"engine-{k}") for k in range(num)]
        router = Router(stubs, **{"probe_s": 0.01, "wait_s": 5.0} | options)
        await scenario(router, stubs)
        await router.close()
        assert all(stub.closed for stub in stubs)

    asyncio.run(body())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


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
