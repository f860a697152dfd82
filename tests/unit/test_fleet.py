"""Rank 0's engines as they die, come back and misbehave; the transport is a stub over a real membership."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

import pytest
from fleet_world import StubEngine, World

from areal_hpc.errors import WaitTimeout, WeightUpdateError
from areal_hpc.roles.wiring.fleet import LIVES, LOOK_S, TRIES


def test_a_publish_goes_on_with_the_engines_that_are_left() -> None:
    world = World()
    first, second = world.engines
    first.die()
    assert world.publish(1) == 2
    assert (first.version, second.version) == (0, 1)
    assert world.transport.calls == ["publish 1 to g0 g1", "publish 1 to g1"]
    assert world.records == [("g0", "lost")]
    assert world.walked == 2, "each try is a walk over the weights on every rank"


def test_an_engine_that_was_replaced_takes_part_in_the_next_publish() -> None:
    world = World()
    first, _ = world.engines
    first.die()
    world.publish(1)
    first.come_back()
    assert world.publish(2) == 1
    assert [engine.version for engine in world.engines] == [2, 2]
    assert world.records == [("g0", "lost"), ("g0", "back")]


def test_one_that_was_replaced_before_anybody_missed_it_costs_no_failed_publish() -> None:
    world = World()
    first, _ = world.engines
    world.publish(1)
    first.die()
    first.come_back()
    assert world.publish(2) == 1
    assert first.version == 2


def test_while_the_trainer_waits_a_replaced_engine_is_caught_up_alone() -> None:
    world = World()
    first, second = world.engines
    world.publish(1)
    assert not world.look()
    first.die()
    first.come_back()
    assert world.look()
    world.fleet.catch_up(1, world.weights())
    assert world.transport.calls[-1] == "catch up 1 g0"
    assert [engine.version for engine in world.engines] == [1, 1]
    assert not world.look()
    second.die()
    assert world.publish(2) == 2
    assert first.version == 2


def test_one_that_dies_again_before_it_was_caught_up_is_waited_for_by_nobody() -> None:
    world = World()
    first, _ = world.engines
    world.publish(1)
    first.die()
    first.come_back()
    first.die()
    assert not world.look()
    assert world.publish(2) == 1
    assert world.transport.calls[-1] == "publish 2 to g1"
    first.come_back()
    assert world.look()


def caught_up(world: World, engine: StubEngine, until: Callable[[], bool]) -> list[float]:
    """When an engine was tried that came back and serves nothing yet; another one serves."""
    engine.die()
    engine.come_back()
    tries = []
    while not until():
        assert world.now < 1000
        if world.look():
            tries.append(world.now)
            world.fleet.catch_up(1, world.weights())
    return tries


def test_one_that_fails_its_catching_up_is_tried_again_in_growing_pauses() -> None:
    world = World()
    first, _ = world.engines
    world.publish(1)
    first.fails = TRIES - 1
    tries = caught_up(world, first, lambda: first.version == 1)
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 4.0
    assert len(tries) == TRIES
    assert world.records == [("g0", "lost"), ("g0", "back")], "it was lost once, however often it was tried"
    assert world.given_up == []
    first.fails = TRIES - 1
    caught_up(world, first, lambda: first.version == 1)
    assert world.given_up == [], "what failed before it was back does not count"


def test_one_that_lives_and_takes_no_update_is_given_up_and_the_next_that_takes_none_is_tried_no_more() -> None:
    """Every try holds the trainer up, for as long as an update may take where it is one that comes too late."""
    world = World()
    first, second = world.engines
    world.publish(1)
    first.fails = 10**6
    tries = caught_up(world, first, lambda: world.now > 200)
    assert len(tries) == TRIES
    (given_up,) = world.given_up
    assert given_up[:2] == ("g0", 1), "the process that it is now, and not a later one"
    assert given_up[2].startswith(f"{TRIES} updates of its weights in a row have failed")
    assert given_up[2].endswith("g0 did not take the weights")

    first.come_back()
    tries = []
    while world.now < 500:
        if world.look():
            tries.append(world.now)
            world.fleet.catch_up(1, world.weights())
    assert len(tries) == TRIES
    assert len(world.given_up) == LIVES - 1
    assert world.records == [("g0", "lost"), ("g0", "given up"), ("g0", "left out")]
    assert world.publish(2) == 1
    assert (second.version, world.transport.calls[-1]) == (2, "publish 2 to g1")


def test_one_that_was_given_up_and_replaced_is_like_any_other_once_it_has_taken_an_update() -> None:
    world = World()
    first, _ = world.engines
    world.publish(1)
    first.fails = TRIES
    caught_up(world, first, lambda: bool(world.given_up))
    first.come_back()
    assert world.publish(2) == 1
    assert first.version == 2
    first.fails = TRIES * LIVES
    caught_up(world, first, lambda: len(world.given_up) == 2)
    assert world.records[-1] == ("g0", "given up")


def test_who_fails_does_not_spoil_what_another_is_brought_at_the_same_time() -> None:
    world = World(num=3)
    first, second, third = world.engines
    world.publish(1)
    for engine in (first, second):
        engine.die()
        engine.come_back()
    first.fails = 10**6
    while not world.given_up:
        if world.look():
            world.fleet.catch_up(1, world.weights())
    assert [name for name, *_ in world.given_up] == ["g0"]
    assert [second.version, third.version] == [1, 1]
    assert "catch up 1 g0 g1" in world.transport.calls


def test_the_only_engine_is_given_up_too_and_waited_for_as_long_as_any() -> None:
    world = World(num=1)
    (only,) = world.engines
    only.fails = TRIES
    assert world.publish(1) == TRIES + 1
    assert [told[:2] for told in world.given_up] == [("g0", 0)]
    assert only.version == 1


def test_one_that_lives_and_failed_an_update_is_caught_up_too() -> None:
    world = World()
    first, _ = world.engines
    first.fails = 1
    assert world.publish(1) == 2
    while not world.look():
        assert world.now < 10
    world.fleet.catch_up(1, world.weights())
    assert first.version == 1


def test_endpoints_are_read_once_a_second_at_most() -> None:
    world = World()
    first, _ = world.engines
    world.publish(1)
    first.come_back()
    world.now += LOOK_S
    assert world.fleet.behind()
    world.fleet.catch_up(1, world.weights())
    first.come_back()
    assert not world.fleet.behind()
    world.now += LOOK_S
    assert world.fleet.behind()


def test_without_an_engine_a_publish_waits_for_the_first_that_comes() -> None:
    world = World(num=1)
    (only,) = world.engines
    only.die()
    world.plan[5] = only.come_back
    assert world.publish(1) == 2
    assert only.version == 1
    assert 5 <= world.now <= 7
    assert world.transport.calls == ["publish 1 to g0", "publish 1 to g0"]


def test_without_an_engine_a_publish_waits_no_longer_than_the_limit_and_says_for_whom() -> None:
    world = World()
    for engine in world.engines:
        engine.die()
    said = (
        r"waited 30 s for an engine to take new weights, and none came back: g0: g0 takes no connection; g1: g1 takes"
    )
    with pytest.raises(WaitTimeout, match=said):
        world.publish(1)
    assert 30 <= world.now <= 33


def test_a_run_that_stops_needs_no_engine() -> None:
    """The step that was trained is committed all the same."""
    world = World(num=1)
    world.engines[0].die()
    world.plan[2] = lambda: setattr(world, "stop", True)
    assert world.publish(1) == 2
    assert world.now <= 3
    assert world.walked == 2, "the other ranks walk over the weights in any case"


def test_D24_an_engine_that_never_takes_an_update_does_not_keep_the_trainer_for_ever() -> None:
    world = World(num=1)
    (only,) = world.engines
    only.fails = 10**6
    with pytest.raises(WeightUpdateError, match="g0 did not take the weights"):
        world.publish(1)
    assert world.now <= 30 + 2 * LOOK_S


def test_one_that_joins_while_the_trainer_waits_is_caught_up_alone_and_takes_part_from_then_on() -> None:
    world = World()
    world.publish(1)
    satellite = world.join("g7")
    assert world.look()
    world.fleet.catch_up(1, world.weights())
    assert world.transport.calls[-1] == "catch up 1 g7"
    world.publish(2)
    assert world.transport.calls[-1] == "publish 2 to g0 g1 g7"
    assert satellite.version == 2
    assert world.records == [("g7", "joined")]


def test_one_that_joins_before_a_publish_takes_part_in_it() -> None:
    world = World()
    satellite = world.join("g7")
    assert world.publish(1) == 1
    assert satellite.version == 1
    assert world.records == [("g7", "joined")]


def test_one_that_joins_and_cannot_be_reached_yet_holds_nobody_up() -> None:
    world = World()
    satellite = world.join("g7")
    satellite.alive = False
    assert world.publish(1) == 1
    assert not world.look()
    satellite.alive = True
    while not world.look():
        assert world.now < 10
    world.fleet.catch_up(1, world.weights())
    assert satellite.version == 1


def test_one_that_has_left_is_not_asked_for_anything_until_its_seat_is_taken_again() -> None:
    world = World()
    satellite = world.join("g7")
    world.publish(1)
    satellite.die()
    world.away.add("g7")
    assert world.publish(2) == 1, "a publish does not fail over it"
    reached = satellite.reached
    for _ in range(100):
        assert not world.look()
    assert satellite.reached == reached, "its node may be gone, and to connect to it take as long as may be"
    satellite.come_back()
    world.comes_back(satellite)
    assert world.look()
    world.fleet.catch_up(2, world.weights())
    assert satellite.version == 2
    assert world.records == [("g7", "joined"), ("g7", "lost"), ("g7", "back")]


def test_a_run_without_engines_of_its_own_waits_for_the_first_that_joins() -> None:
    world = World(num=0)
    satellites: list[StubEngine] = []
    world.plan[20] = lambda: satellites.append(world.join("g0"))
    assert world.publish(0) == 1
    assert 20 <= world.now <= 22
    assert world.transport.calls == ["publish 0 to g0"]


def test_engines_that_leave_and_come_back_within_one_publish_are_told_of() -> None:
    world = World(num=0)
    satellite = world.join("g0")
    world.publish(0)
    satellite.die()
    world.away.add("g0")

    def again() -> None:
        satellite.come_back()
        world.comes_back(satellite)

    world.plan[20] = again
    assert world.publish(1) == 1
    assert world.records == [("g0", "joined"), ("g0", "lost"), ("g0", "back")]


def test_and_no_longer_than_its_limit() -> None:
    with pytest.raises(WaitTimeout, match=r"waited 30 s for an engine to take new weights.*: none has ever joined"):
        World(num=0).publish(0)


def test_time_without_any_engine_is_counted_and_has_a_limit_where_satellites_are_awaited() -> None:
    world = World(num=0, desert_s=100.0)
    satellite = world.join("g0")
    world.publish(0)
    world.look()
    assert world.fleet.deserted_s() == 0.0
    world.away.add("g0")
    for _ in range(50):
        assert not world.look()
    assert world.fleet.deserted_s() == 49.0
    world.comes_back(satellite)
    assert world.look()
    world.fleet.catch_up(0, world.weights())
    world.look()
    so_far = world.fleet.deserted_s()
    assert so_far == 50.0
    world.look()
    assert world.fleet.deserted_s() == so_far, "it stands still while an engine is there"
    world.away.add("g0")
    with pytest.raises(WaitTimeout, match=r"waited 100 s for an engine .*: g0: it has left"):
        for _ in range(200):
            world.look()


@pytest.mark.parametrize("publishing", [True, False])
def test_time_in_slurms_queue_is_no_time_out_and_what_counts_begins_when_no_satellite_is_there_any_more(
    publishing: bool,
) -> None:
    """A queue of 28 hours, a limit of 100 s; and the same while the trainer waits for groups."""
    world = World(num=0, desert_s=100.0)
    world.in_the_queue = True
    world.plan[100_000] = lambda: setattr(world, "in_the_queue", False)
    with pytest.raises(WaitTimeout, match=r"waited 100 s .*, while no satellite was in Slurm's queue"):
        if publishing:
            world.publish(0)
        while not publishing:
            world.sleep(LOOK_S)
            assert not world.fleet.behind()
    assert 100_100 <= world.now <= 100_103


def test_a_satellite_that_never_takes_an_update_does_not_keep_the_trainer_for_as_long_as_the_queue_may() -> None:
    world = World(num=0, desert_s=86400.0)
    world.plan[5000] = lambda: setattr(world.join("g0"), "fails", 10**6)
    with pytest.raises(WeightUpdateError, match="g0 did not take the weights"):
        world.publish(0)
    assert 5030 <= world.now <= 5040


def test_where_only_the_runs_own_engines_are_expected_their_launcher_counts() -> None:
    world = World(num=0)
    for _ in range(200):
        world.look()
    assert world.fleet.deserted_s() == 0.0


def test_D17_weights_that_crawl_are_warned_of_once_with_the_engines_and_the_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """117 MiB in 10 s are the 11.7 MB/s of a management network of 100 Mbit/s."""
    caplog.set_level(logging.WARNING)
    world = World()
    world.transport.seconds = 10.0
    for version in (1, 2):
        world.publish(version)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("version 1 took 10 s to reach g0, g1: 11.7 MiB/s, below weights.min_mb_per_s = 50.")
    assert "It went by gloo from 10.0.0.1;" in said


@pytest.mark.parametrize(
    ("seconds", "floor"),
    [(2.0, 50.0), (4.9, 50.0), (10.0, 11.7), (10.0, 0.0)],
    ids=["fast", "too short to matter", "exactly at the floor", "off"],
)
def test_D17_an_update_that_is_fast_enough_is_not_warned_of(
    seconds: float, floor: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    world = World(min_mb_per_s=floor)
    world.transport.seconds = seconds
    world.publish(1)
    assert caplog.records == []


def test_engines_that_may_be_gone_are_asked_at_once() -> None:
    """Each takes its time to be given up, and a rack that loses its power has many."""
    here = asyncio.Barrier(3)

    class Slow(StubEngine):
        async def reach(self) -> None:
            async with asyncio.timeout(5.0):
                await here.wait()
            await super().reach()

    world = World(num=0, desert_s=60.0)
    world.joining = [Slow("s0", alive=False), Slow("s1"), Slow("s2", alive=False)]
    assert world.fleet.behind()
    world.fleet.catch_up(3, world.weights())
    assert [target.name for target in world.transport.membership.members] == ["s1"]
    assert set(world.transport.membership.lost) == {"s0", "s2"}
