"""What agents in daily use have finished, on its way into the ring: tickets, staleness, filters, the baseline."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from online_world import ETA, GROUPS, STANDING, World, world
from rollout_fakes import until
from served import ADMIN

from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.rollout.online import RunningBaseline
from areal_hpc.types import WeightVersion


def test_H14_an_episode_without_a_completion_is_skipped_and_counted(hermes: ChatRenderer) -> None:
    async def scenario(world: World) -> None:
        session = await world.post("/rl/start_session", {}, ADMIN)
        await world.post("/rl/set_reward", {"reward": 1.0}, session["api_key"])
        await world.post("/rl/end_session", {}, session["api_key"])
        await until(lambda: world.outcomes() == [("skipped", "nothing was asked")])
        assert world.records.kept["group"][0]["left_out_nothing_was_asked"] == 1 and len(world.served.sessions) == 0
        assert world.ring.ledger.issued[0].low == 0  # no position was used up
        status, _ = await world.served.post("/rl/set_reward", {"reward": 1.0}, session["api_key"])
        assert status == 401

    world(hermes, scenario)


def test_a_group_is_filtered_as_every_group_is(hermes: ChatRenderer) -> None:
    async def scenario(world: World) -> None:
        started = await world.post("/rl/start_group", {"size": 2}, ADMIN)
        for session in started["sessions"]:
            await world.ask(session["api_key"], "one")
            await world.post("/rl/set_reward", {"reward": 1.0}, session["api_key"])
            await world.post("/rl/end_session", {}, session["api_key"])
        await until(lambda: world.outcomes() == [("filtered", "zero_variance")])

    world(hermes, scenario)


def test_lone_episodes_are_held_against_those_before_them(hermes: ChatRenderer) -> None:
    async def scenario(world: World) -> None:
        for number, reward in enumerate((1.0, 0.0, 1.0)):
            await world.ask(STANDING, "one")
            await world.post("/rl/set_reward", {"reward": reward})
            await world.post("/rl/end_session", {})
            await until(lambda wanted=number + 1: len(world.sealed()) == wanted)  # type: ignore[misc]
        assert [group.baseline for group in world.sealed()] == [None, (1.0, 0.0), (0.5, 0.5)]

    world(hermes, scenario)


def test_E1_no_token_older_than_the_bound_is_trained_however_long_a_person_takes(hermes: ChatRenderer) -> None:
    """The ticket of an episode that spans versions is of its oldest; one beyond the bound gets none."""

    async def scenario(world: World) -> None:
        slow = await world.post("/rl/start_session", {}, ADMIN)
        await world.ask(slow["api_key"], "one")  # by version 0
        for step in (1, 2):
            world.publish(step)
        spanning = await world.post("/rl/start_session", {}, ADMIN)
        await world.ask(spanning["api_key"], "one")  # by version 2
        world.publish(3)
        await world.ask(spanning["api_key"], "two")
        for key in (slow["api_key"], spanning["api_key"]):
            await world.post("/rl/set_reward", {"reward": 1.0}, key)
            await world.post("/rl/end_session", {}, key)
        await until(lambda: len(world.outcomes()) == 2)
        assert sorted(world.outcomes()) == [("sealed", ""), ("stale", "sampled by weights that are too old")]
        (ref,) = world.ring.ledger.waiting.values()
        assert (ref.prompt_id, ref.version.step) == (f"online/{spanning['session_id']}", 2)
        assert ref.position == 0  # what was too old has used none up

    world(hermes, scenario)


def test_without_a_free_ticket_episodes_wait_and_the_oldest_of_too_many_go(hermes: ChatRenderer) -> None:
    async def scenario(world: World) -> None:
        capacity = (ETA + 1) * GROUPS
        for number in range(capacity + 4):
            await world.ask(STANDING, f"{number}")
            await world.post("/rl/set_reward", {"reward": float(number)})
            await world.post("/rl/end_session", {})
        await until(lambda: ("stale", "too many are complete") in world.outcomes())  # also while one waits
        assert len(world.sealed()) == capacity
        refs = world.ring.reader.claim(GROUPS, WeightVersion(world.ring.epoch, 0))
        assert refs is not None and [ref.rewards for ref in refs] == [(0.0,), (1.0,)]
        world.publish(1)
        await until(lambda: len(world.sealed()) == capacity + 2)
        rewards = [group.rewards.tolist() for group in world.sealed()]
        # Number 6 was waiting for its ticket; of 7, 8 and 9 there was room for two.
        assert rewards == [[0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [8.0]]

    world(hermes, scenario, concurrency=2)


def test_sessions_end_as_idle_while_an_episode_waits_for_its_ticket(hermes: ChatRenderer) -> None:
    async def scenario(world: World) -> None:
        for number in range((ETA + 1) * GROUPS + 1):
            await world.ask(STANDING, f"{number}")
            await world.post("/rl/set_reward", {"reward": float(number)})
            await world.post("/rl/end_session", {})
        await until(lambda: len(world.sealed()) == (ETA + 1) * GROUPS)  # and the last one waits for its ticket
        await world.ask(STANDING, "and now I am away")
        left = world.served.sessions.of_key(STANDING)
        world.clock.ahead_s += 31.0
        await until(lambda: left.ended is not None)
        await world.post("/rl/set_reward", {"reward": 9.0})
        await until(lambda: left not in list(world.served.sessions))  # it is complete, and waits as well

    world(hermes, scenario)


def test_a_position_that_must_be_used_again_is_used_first(hermes: ChatRenderer) -> None:
    async def scenario(world: World) -> None:
        async def episode() -> None:
            before = len(world.outcomes())
            await world.ask(STANDING, "one")
            await world.post("/rl/set_reward", {"reward": 1.0})
            await world.post("/rl/end_session", {})
            await until(lambda: len(world.outcomes()) == before + 1)

        await episode()
        world.publish(ETA + 1)
        assert world.ring.reader.claim(1, WeightVersion(world.ring.epoch, ETA + 1)) is None  # the first is too old
        await episode()
        await episode()
        assert [ref.position for ref in world.ring.ledger.waiting.values()] == [0, 1]

    world(hermes, scenario)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_the_first_rewards_have_their_plain_mean_and_deviation(rewards: list[float]) -> None:
    value = RunningBaseline(30, rewards).value
    assert value is not None
    np.testing.assert_allclose(value, [np.mean(rewards), np.std(rewards)], atol=1e-6)


def test_old_rewards_are_forgotten() -> None:
    value = RunningBaseline(8, [0.0] * 50 + [1.0] * 100).value
    assert value is not None and value.mean > 0.99 and value.deviation < 0.01
    assert RunningBaseline(8).value is None
