"""Agents in daily use: keys and episodes, late rewards and rules, groups, and how they come into the ring."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialogues import make_dialogue
from hypothesis import given
from hypothesis import strategies as st
from rollout_fakes import Records, until
from served import ADMIN, Served, run, served

from areal_hpc.buffer.memory import MemoryRing
from areal_hpc.config.schema import AgentConfig, FilterConfig, OnlineConfig
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.errors import RewardError, RunDirError
from areal_hpc.generation.scripted import scripted_logprob
from areal_hpc.proxy.online import Online, Score
from areal_hpc.proxy.sessions import Limits, Session
from areal_hpc.roles.wiring.online import standing_key
from areal_hpc.rollout.online import OnlineRunner, RunningBaseline
from areal_hpc.types import Prompt, TrajectoryGroup, WeightVersion

STANDING = "sk-of-a-person"
ETA, GROUPS = 2, 2


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return make_dialogue(tmp_path_factory.mktemp("hermes"), "hermes")


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


def test_a_group_is_filtered_as_every_group_is(hermes: ChatRenderer) -> None:
    async def scenario(world: World) -> None:
        started = await world.post("/rl/start_group", {"size": 2}, ADMIN)
        for session in started["sessions"]:
            await world.ask(session["api_key"], "one")
            await world.post("/rl/set_reward", {"reward": 1.0}, session["api_key"])
            await world.post("/rl/end_session", {}, session["api_key"])
        await until(lambda: world.outcomes() == [("filtered", "zero_variance")])

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
        await until(lambda: len(world.sealed()) == capacity)
        refs = world.ring.reader.claim(GROUPS, WeightVersion(world.ring.epoch, 0))
        assert refs is not None and [ref.rewards for ref in refs] == [(0.0,), (1.0,)]
        world.publish(1)
        await until(lambda: len(world.sealed()) == capacity + 2)
        rewards = [group.rewards.tolist() for group in world.sealed()]
        # Number 6 was waiting for its ticket; of 7, 8 and 9 there was room for two.
        assert rewards == [[0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [8.0]]
        assert ("stale", "too many are complete") in world.outcomes()

    world(hermes, scenario, concurrency=2)


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


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        (Limits(max_turns=2), "max_turns_exceeded"),
        (Limits(max_turns=9, max_tokens=6), "max_tokens_exceeded"),
        (Limits(max_turns=9, max_s=0.0), "max_s_exceeded"),
    ],
)
def test_a_session_has_limits_of_turns_tokens_and_seconds(hermes: ChatRenderer, limits: Limits, wanted: str) -> None:
    """Answers have four tokens; the second one gets the two that are left of six."""

    async def scenario() -> None:
        async with served(hermes, lambda _: "yes", limits=limits) as service:
            answers = []
            for _ in range(3):
                body = {"messages": [{"role": "user", "content": "hi"}]}
                answers.append(await service.post("/v1/chat/completions", body))
            status, refused = answers[-1]
            assert (status, refused["error"]["code"]) == (400, wanted)
            if limits.max_tokens is not None:
                assert [answer["usage"]["completion_tokens"] for _, answer in answers[:2]] == [4, 2]
                assert answers[1][1]["choices"][0]["finish_reason"] == "length"

    run(scenario())


def test_a_session_has_a_limit_of_requests_at_once(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "yes", limits=Limits(max_turns=9, max_open=1), token_s=0.05) as service:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            first = asyncio.create_task(service.post("/v1/chat/completions", body))
            await until(lambda: service.session.num_open == 1)
            status, refused = await service.post("/v1/chat/completions", body)
            assert (status, refused["error"]["code"], refused["error"]["type"]) == (429, "max_open", "rate_limit_error")
            assert (await first)[0] == 200

    run(scenario())


def test_sessions_that_are_opened_over_http_sample_by_seeds_of_their_own(hermes: ChatRenderer) -> None:
    """Else the attempts of a group at one task would all be the same."""
    from areal_hpc.config.schema import Config, ModelConfig, PromptsConfig, RolloutConfig, TrainerConfig
    from areal_hpc.proxy.sessions import Sessions
    from areal_hpc.roles.wiring.agents import opener

    class Process:
        config = Config(
            name="c",
            model=ModelConfig(path="m"),
            prompts=PromptsConfig(train="a:B"),
            trainer=TrainerConfig(total_steps=1),
            rollout=RolloutConfig(workers=2),
        )
        epoch, incarnation, index = 1, 0, 0

    def seeds(process: Any) -> list[int | None]:
        open_session = opener(process, Sessions(hermes, idle_s=1.0), None)  # type: ignore[arg-type]
        sessions: Sequence[Session] = [open_session() for _ in range(4)]
        return [session.sampling.seed for session in sessions]

    again, beside, first = Process(), Process(), Process()
    again.incarnation, beside.index = 1, 1
    assert len({*seeds(first), *seeds(again), *seeds(beside)}) == 12 and seeds(first) == seeds(first)


def test_the_standing_key_is_made_once_for_its_owner_and_is_never_empty(tmp_path: Path) -> None:
    path = tmp_path / "agent-key"
    key = standing_key(path)
    assert standing_key(path) == key and len(key) > 40
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(b"")
    with pytest.raises(RunDirError, match=f"{path} holds no key; remove it"):
        standing_key(path)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_the_first_rewards_have_their_plain_mean_and_deviation(rewards: list[float]) -> None:
    value = RunningBaseline(30, rewards).value
    assert value is not None
    np.testing.assert_allclose(value, [np.mean(rewards), np.std(rewards)], atol=1e-6)


def test_old_rewards_are_forgotten() -> None:
    value = RunningBaseline(8, [0.0] * 50 + [1.0] * 100).value
    assert value is not None and value.mean > 0.99 and value.deviation < 0.01
    assert RunningBaseline(8).value is None
