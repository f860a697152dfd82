"""Sessions over HTTP: opened, limited, rewarded, ended, exported; and who may do so."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dialogues import said
from online_world import Clock
from rollout_fakes import until
from served import ADMIN, USER, Gated, Served, run, served

from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.dialogue.transcript import Transcript, Turn
from areal_hpc.errors import GenerationError
from areal_hpc.generation.scripted import ScriptedGenerator
from areal_hpc.proxy.calls import Call
from areal_hpc.proxy.sessions import Limits, Session
from areal_hpc.types import Completion, GenerationRequest


def test_H6_sessions_are_opened_without_asking_anybody(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, [], max_sessions=600) as service:
            answers = await asyncio.gather(*(service.post("/rl/start_session", {}, ADMIN) for _ in range(500)))
            assert len({answer["api_key"] for _, answer in answers}) == 500
            assert service.engine.requests == []

    run(scenario())


def test_H12_no_secret_is_a_default_and_admin_routes_need_theirs(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, [], admin_token="") as service:
            for key in ("", "-", "areal-admin-key", service.session.key):
                assert (await service.post("/rl/start_session", {}, key))[0] == 401
        async with served(hermes, []) as service:
            assert service.url.startswith("http://127.0.0.1:")
            assert (await service.post("/rl/start_session", {}, "wrong"))[0] == 401
            assert (await service.post("/rl/export", {"session_id": service.session.id}))[0] == 401
            assert (await service.post("/v1/chat/completions", {"messages": [USER]}, ADMIN))[0] == 401

    run(scenario())


def test_a_session_over_http_from_its_start_to_its_export(hermes: ChatRenderer) -> None:
    """H14: a session without a completion is exported as nothing, without a crash."""

    async def scenario() -> None:
        async with served(hermes, ["one", "two"]) as service:
            _, session = await service.post("/rl/start_session", {}, ADMIN)
            key = session["api_key"]
            _, first = await service.post("/v1/chat/completions", {"messages": [USER]}, key)
            history = [USER, {"role": "assistant", "content": "one"}, USER]
            await service.post("/v1/chat/completions", {"messages": history}, key)
            assert (await service.post("/rl/set_reward", {"reward": 0.5, "interaction_id": first["id"]}, key))[0] == 200
            assert (await service.post("/rl/set_reward", {"reward": 2}, key))[0] == 200
            assert (await service.post("/rl/set_reward", {"reward": 1, "interaction_id": "no"}, key))[0] == 404
            assert (await service.post("/rl/set_reward", {"reward": float("nan")}, key))[0] == 400
            assert (await service.post("/rl/set_reward", {}, key))[0] == 400
            assert (await service.post("/rl/end_session", {}, key))[1]["interaction_count"] == 2
            assert (await service.post("/v1/chat/completions", {"messages": [USER]}, key))[0] == 400
            assert (await service.post("/rl/set_reward", {"reward": 1}, key))[0] == 200  # late, and the last word
            _, told = await service.post("/rl/export", {"session_id": session["session_id"], "discount": 0.5}, ADMIN)
            assert told["drifts"] == {"start": 1, "clean": 1}
            (merged,) = told["trajectories"]  # the first turn is worth 0.5 + 0.5 * 1.0, the second 1.0
            assert merged["reward"] == 1.0
            assert sum(merged["loss_mask"]) == len("one") + len("two") + 2
            assert (await service.post("/rl/set_reward", {"reward": 1}, key))[0] == 401
            _, empty = await service.post("/rl/export", {"session_id": service.session.id}, ADMIN)
            assert (empty["trajectories"], empty["turns"]) == ([], [])

    run(scenario())


def test_experts_that_are_known_are_not_asked_for_again(hermes: ChatRenderer) -> None:
    class Telling(ScriptedGenerator):
        async def generate(self, request: GenerationRequest) -> Completion:
            completion = await super().generate(request)
            num_tokens = len(request.token_ids) + completion.token_ids.size - request.experts_from
            return replace(completion, experts=np.full((num_tokens, 1, 1), 7, dtype=np.uint8))

    async def scenario() -> None:
        engine = Telling([said(hermes, "one"), said(hermes, "two")])
        async with served(hermes, [], generator=engine) as service:
            await service.post("/v1/chat/completions", {"messages": [USER]})
            await service.post(
                "/v1/chat/completions", {"messages": [USER, {"role": "assistant", "content": "one"}, USER]}
            )
            first, second = service.session.transcript.turns
            assert len(second.completion.experts) == len(second.token_ids) - len(first.token_ids) + 1
            (trajectory,) = service.session.transcript.trajectories(final=1.0)
            assert trajectory.experts.shape == (trajectory.token_ids.size, 1, 1)

    run(scenario())


def test_idle_sessions_are_closed_and_their_number_is_bounded(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, [], idle_s=0.0) as service:
            assert (await service.post("/rl/start_session", {}, ADMIN))[0] == 200
            assert len(service.sessions) == 1
        async with (
            served(hermes, [], max_sessions=1) as service,
            service.http.post(
                f"{service.url}/rl/start_session", headers={"Authorization": f"Bearer {ADMIN}"}
            ) as answer,
        ):
            assert (answer.status, "retry-after" in answer.headers) == (429, True)

    run(scenario())


def test_a_session_has_a_limit_of_turns(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "yes", max_turns=3) as service:
            body = {"messages": [USER], "n": 2}
            assert (await service.post("/v1/chat/completions", body))[0] == 200
            status, answer = await service.post("/v1/chat/completions", body)
            assert (status, answer["error"]["code"]) == (400, "max_turns_exceeded")

    run(scenario())


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


CHAT = "/v1/chat/completions"
ASKING: Mapping[str, Any] = {"messages": [USER]}


@pytest.mark.parametrize("num_choices", [1, 3])
def test_requests_at_once_never_sample_more_tokens_than_the_session_may(hermes: ChatRenderer, num_choices: int) -> None:
    """Answers have four tokens and six may be sampled; what is promised to one is not given to another."""

    async def scenario() -> None:
        limits = Limits(max_turns=99, max_tokens=6)
        async with served(hermes, lambda _: "yes", limits=limits, max_new_tokens=4, token_s=0.01) as service:
            body = {**ASKING, "n": num_choices}
            answers = await asyncio.gather(*(service.post(CHAT, body) for _ in range(5)))
            used = [answer["usage"]["completion_tokens"] for status, answer in answers if status == 200]
            assert 0 < sum(used) == service.session.num_sampled <= 6
            waiting = [answer["error"] for status, answer in answers if status == 429]
            assert len(waiting) + len(used) == 5
            assert {error["code"] for error in waiting} == {"max_tokens"}
            while service.session.num_sampled < 6:
                await service.post(CHAT, ASKING)
            assert (await service.post(CHAT, ASKING))[1]["error"]["code"] == "max_tokens_exceeded"
            assert service.session.num_sampled == 6

    run(scenario())


def test_requests_that_come_together_keep_to_the_limit_of_those_at_once(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        limits = Limits(max_turns=99, max_open=2)
        async with served(hermes, lambda _: "yes", limits=limits, token_s=0.01) as service:
            for stream in (False, True):
                body = {**ASKING, "stream": stream}
                answers = await asyncio.gather(*(service.post(CHAT, body) for _ in range(6)))
                assert sorted(status for status, _ in answers) == [200, 200, 429, 429, 429, 429]
                assert service.session.num_open == 0

    run(scenario())


def test_a_request_that_nobody_waits_for_is_open_no_more(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        engine = Gated(said(hermes, "abc"))
        engine.next()
        async with served(hermes, [], generator=engine, limits=Limits(max_turns=9, max_open=1)) as service:
            headers = {"Authorization": f"Bearer {service.session.key}"}
            answer = await service.http.post(service.url + CHAT, json={**ASKING, "stream": True}, headers=headers)
            await answer.content.readline()
            assert service.session.num_open == 1
            answer.close()
            await until(lambda: service.session.num_open == 0)

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_being_answered_when_a_sessions_time_is_up_is_broken_off(hermes: ChatRenderer, stream: bool) -> None:
    """The engine gives one token and then none; it hears that the rest is not wanted."""

    async def scenario() -> None:
        engine = Gated(said(hermes, "abc"))
        engine.next()
        async with served(hermes, [], generator=engine, limits=Limits(max_turns=9, max_s=0.2)) as service:
            status, answer = await service.post(CHAT, {**ASKING, "stream": stream})
            error = answer[-1][1]["error"] if stream else answer["error"]
            assert error["code"] == "max_s_exceeded" and "used its 0.2 seconds up" in error["message"]
            assert status == (200 if stream else 400) and engine.cancelled
            assert service.session.transcript.turns == [] and bool(service.session.broken) == stream
            assert (await service.post(CHAT, ASKING))[1]["error"]["code"] == "max_s_exceeded"

    run(scenario())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """That of the sessions."""
    made = Clock()
    monkeypatch.setattr("areal_hpc.proxy.sessions.monotonic", made)
    return made


def test_a_key_that_was_idle_for_too_long_opens_nothing_though_no_other_session_was_opened(
    hermes: ChatRenderer, clock: Clock
) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "yes", idle_s=60.0) as service:
            for _ in range(2):
                clock.ahead_s += 59.0
                await service.chat("hi")  # it is used again
            clock.ahead_s += 61.0
            assert (await service.post(CHAT, ASKING))[0] == 401

    run(scenario())


def test_a_session_is_not_idle_while_it_is_answered(hermes: ChatRenderer, clock: Clock) -> None:
    async def scenario() -> None:
        engine = Gated(said(hermes, ""))
        async with served(hermes, [], generator=engine, idle_s=60.0) as service:
            asking = asyncio.create_task(service.post(CHAT, {**ASKING, "stream": True}))
            await until(lambda: service.session.num_open == 1)
            clock.ahead_s += 1000.0
            assert (await service.post("/rl/start_session", {}, ADMIN))[0] == 200
            engine.next()
            assert (await asking)[0] == 200
            assert (await service.post("/rl/set_reward", {"reward": 1.0}))[0] == 200

    run(scenario())


def test_those_that_are_idle_are_closed_whoever_was_opened_before_them(hermes: ChatRenderer, clock: Clock) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "yes", idle_s=60.0) as service:
            told = [(await service.post("/rl/start_session", {}, ADMIN))[1] for _ in range(4)]
            clock.ahead_s += 50.0
            for number in (0, 2):
                await service.post(CHAT, ASKING, told[number]["api_key"])
            clock.ahead_s += 20.0
            _, last = await service.post("/rl/start_session", {}, ADMIN)
            assert [one.id for one in service.sessions] == [one["session_id"] for one in (told[0], told[2], last)]

    run(scenario())


def test_three_hundred_sessions_leave_nothing_behind(hermes: ChatRenderer) -> None:
    """Whole, streamed, refused and broken off; closed by their export, or as idle when the next one is opened."""

    async def episode(service: Served, number: int) -> None:
        _, opened = await service.post("/rl/start_session", {}, ADMIN)
        key = opened["api_key"]
        await service.post(CHAT, {**ASKING, "stream": number % 2 == 0}, key)
        await service.post(CHAT, {"messages": []}, key)
        await service.post("/rl/set_reward", {"reward": 1.0}, key)
        await service.post("/rl/export", {"session_id": opened["session_id"]}, ADMIN)

    def living() -> Counter[str]:
        gc.collect()
        kinds = (Session, Transcript, Turn, Call)
        return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in kinds)

    async def scenario() -> None:
        def says(request: GenerationRequest) -> str:
            if request.sampling.seed is not None and len(service.engine.requests) % 7 == 0:
                raise GenerationError("the engine is gone")
            return "yes"

        async with served(hermes, says) as service:
            before = living()
            for _ in range(6):
                await asyncio.gather(*(episode(service, number) for number in range(50)))
                assert len(service.sessions) == 1
            service.engine.requests.clear()
            assert living() - before == Counter()

    run(scenario())
