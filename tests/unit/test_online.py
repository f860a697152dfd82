"""Agents in daily use: keys and episodes, late rewards and rules, groups, and how they come into the ring."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from online_world import STANDING, World, world
from rollout_fakes import until
from served import ADMIN

from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.errors import RewardError
from areal_hpc.generation.scripted import scripted_logprob
from areal_hpc.types import Prompt


def test_a_standing_key_begins_an_episode_by_itself_and_a_refresh_the_next(hermes: ChatRenderer) -> None:
    async def scenario(world: World) -> None:
        await world.ask(STANDING, "one")
        await world.ask(STANDING, "one", "and more")
        first = world.served.sessions.of_key(STANDING)
        await world.post("/rl/set_reward", {"reward": 1.0})
        second = await world.post("/rl/start_session", {})
        assert second["api_key"] == STANDING and second["session_id"] != first.id
        await until(lambda: len(world.sealed()) == 1)
        (group,) = world.sealed()
        assert group.prompt_id == f"online/{first.id}" and group.position == 0
        assert {t.reward for t in group.trajectories} == {1.0} and {t.episode for t in group.trajectories} == {0}
        for trajectory in group.trajectories:
            sampled = np.flatnonzero(trajectory.loss_mask)
            assert trajectory.num_generated == len("yes") + 1 and (trajectory.versions[sampled] == 0).all()
            ids = trajectory.token_ids[sampled].tolist()
            expected = [scripted_logprob(token, t) for t, token in enumerate(ids)]
            np.testing.assert_allclose(trajectory.logprobs[sampled], expected)
        assert world.outcomes() == [("sealed", "")]
        assert world.noted == [(first.id, {"group": "", "outcome": "sealed", "reason": ""})]
        await world.ask(STANDING, "again")
        assert world.served.sessions.of_key(STANDING).id == second["session_id"]
        await world.post("/rl/end_session", {})
        await world.ask(STANDING, "and again")
        assert world.served.sessions.of_key(STANDING).id != second["session_id"]

    world(hermes, scenario)


def test_late_rewards_find_their_episode_by_interaction_or_session(hermes: ChatRenderer) -> None:
    """The key speaks for another episode by then; with the discount 0.5 the first turn gets half of the second's."""

    async def scenario(world: World) -> None:
        first = await world.ask(STANDING, "one")
        second = await world.ask(STANDING, "two")
        session = world.served.sessions.of_key(STANDING)
        await world.post("/rl/start_session", {})
        third = await world.ask(STANDING, "three")
        await world.post("/rl/set_reward", {"reward": 1.0, "interaction_id": first})
        await world.post("/rl/set_reward", {"reward": 0.25, "interaction_id": second})
        await world.post("/rl/set_reward", {"reward": 0.75, "interaction_id": third})
        assert world.sealed() == []  # more of them may come
        await world.post("/rl/set_reward", {"reward": 0.0, "session_id": session.id}, ADMIN)
        await until(lambda: len(world.sealed()) == 1)
        (group,) = world.sealed()
        assert sorted(t.reward for t in group.trajectories) == [0.25, 1.0]
        status, answer = await world.served.post("/rl/set_reward", {"reward": 9.0, "session_id": session.id}, STANDING)
        assert (status, answer["error"]["param"]) == (404, "session_id")

    world(hermes, scenario)


def test_a_reward_by_another_key_is_refused(hermes: ChatRenderer) -> None:
    async def scenario(world: World) -> None:
        interaction = await world.ask(STANDING, "one")
        session = world.served.sessions.of_key(STANDING)
        other = await world.post("/rl/start_session", {}, ADMIN)
        body = {"reward": 1.0, "session_id": session.id}
        assert (await world.served.post("/rl/set_reward", body, other["api_key"]))[0] == 401
        body = {"reward": 1.0, "interaction_id": interaction}
        assert (await world.served.post("/rl/set_reward", body, other["api_key"]))[0] == 404
        assert session.final is None and session.rewards == {}

    world(hermes, scenario)


@pytest.mark.parametrize("rule", [True, False])
def test_an_episode_that_nobody_rewards_is_scored_by_the_rule_or_left_out(hermes: ChatRenderer, rule: bool) -> None:
    seen: list[tuple[str, Prompt]] = []

    async def score(text: str, prompt: Prompt) -> float:
        seen.append((text, prompt))
        return 0.5

    async def scenario(world: World) -> None:
        await world.ask(STANDING, "one", "two")
        world.clock.ahead_s += 31  # idle
        await until(lambda: world.served.sessions.of_key(STANDING).ended is not None)
        assert world.outcomes() == []
        world.clock.ahead_s += 61
        await until(lambda: len(world.outcomes()) == 1)
        if not rule:
            assert world.outcomes() == [("skipped", "no reward came")] and world.sealed() == []
            return
        assert world.sealed()[0].rewards.tolist() == [0.5]
        ((text, prompt),) = seen
        assert text == "yes"
        assert [m["content"] for m in prompt.messages] == ["one", "two", "yes"]

    world(hermes, scenario, score=score if rule else None)


def test_a_rule_that_fails_leaves_its_episode_out(hermes: ChatRenderer) -> None:
    async def score(text: str, prompt: Prompt) -> float:
        raise RewardError("no idea")

    async def scenario(world: World) -> None:
        await world.ask(STANDING, "one")
        await world.post("/rl/end_session", {})
        await until(lambda: world.outcomes() == [("skipped", "the rule failed")])

    world(hermes, scenario, score=score, reward_wait_s=0.0)


def test_an_episode_waits_for_the_answer_that_is_under_way(hermes: ChatRenderer) -> None:
    async def scenario(world: World) -> None:
        asking = asyncio.create_task(world.ask(STANDING, "one"))
        await until(lambda: len(world.served.sessions) == 1 and world.served.sessions.of_key(STANDING).num_open == 1)
        session = world.served.sessions.of_key(STANDING)
        await world.post("/rl/set_reward", {"reward": 1.0})
        await world.post("/rl/end_session", {})
        assert world.online.take() == [] and session.transcript.turns == []
        await asking
        await until(lambda: len(world.sealed()) == 1)
        assert world.sealed()[0].trajectories[0].num_generated == 4

    world(hermes, scenario, token_s=0.05)


def test_the_sessions_of_a_group_are_one_group_of_the_ring(hermes: ChatRenderer) -> None:
    """One of the three crashed: its session was never used, and ended as idle."""

    async def scenario(world: World) -> None:
        started = await world.post("/rl/start_group", {"size": 3, "metadata": {"task": "add"}}, ADMIN)
        keys = [session["api_key"] for session in started["sessions"]]
        assert len(set(keys)) == 3
        for key, reward in zip(keys[:2], (0.0, 1.0), strict=True):
            await world.ask(key, "one")
            await world.post("/rl/set_reward", {"reward": reward}, key)
            await world.post("/rl/end_session", {}, key)
        assert (await world.served.post("/rl/start_session", {}, keys[0]))[0] == 400
        assert world.sealed() == []
        world.clock.ahead_s += 31
        await until(lambda: len(world.sealed()) == 1)
        (group,) = world.sealed()
        assert group.prompt_id == f"online/{started['group_id']}" and group.baseline is None
        assert [(t.episode, t.reward) for t in group.trajectories] == [(0, 0.0), (1, 1.0)]
        assert [said["group"] for _, said in world.noted] == [started["group_id"]] * 3

    world(hermes, scenario)


@pytest.mark.parametrize(("size", "status"), [(0, 400), (1025, 400), (True, 400)])
def test_a_group_has_a_size(hermes: ChatRenderer, size: Any, status: int) -> None:
    async def scenario(world: World) -> None:
        assert (await world.served.post("/rl/start_group", {"size": size}, ADMIN))[0] == status
        assert (await world.served.post("/rl/start_group", {"size": 2}, STANDING))[0] == 401

    world(hermes, scenario)


def test_a_group_that_is_too_large_leaves_no_session_behind(hermes: ChatRenderer) -> None:
    async def scenario(world: World) -> None:
        for _ in range(2):
            assert (await world.served.post("/rl/start_group", {"size": 4}, ADMIN))[0] == 429
        assert len(world.served.sessions) == 0
        assert len((await world.post("/rl/start_group", {"size": 3}, ADMIN))["sessions"]) == 3

    world(hermes, scenario, max_sessions=3)
