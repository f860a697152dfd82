"""The client against a fake engine: answers, faults, and what it is refused."""

from __future__ import annotations

import asyncio
import base64
import math
import pickle
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driven import GROUP, PROMPT, drive, request, until, update
from fake_engine import TOKEN, FakeEngine, expected_tokens

from areal_hpc.errors import GenerationError, RequestRefused, WeightUpdateError
from areal_hpc.generation.client import EngineClient, Limits
from areal_hpc.generation.connection import EngineLost, EngineRefused
from areal_hpc.routing import Routing
from areal_hpc.types import StopReason


def test_an_answer_is_a_completion() -> None:
    completion = drive(FakeEngine(version="4"), lambda client: client.generate(request()))
    assert completion.token_ids.tolist() == expected_tokens(PROMPT, 8)
    assert completion.logprobs.tolist() == [-token / 256 for token in completion.token_ids]
    assert completion.versions.tolist() == [4] * 8
    assert (completion.stop, completion.text) == (StopReason.LENGTH, "x" * 8)


@pytest.mark.parametrize("cuts", [[0], [1], [7], [3, 0, 0, 2], [0, 7], [5, 3], [8]], ids=str)
def test_F1_F2_an_interrupted_answer_equals_an_uninterrupted_one(cuts: list[int]) -> None:
    engine = FakeEngine(interrupt_at=list(cuts))
    completion = drive(engine, lambda client: client.generate(request()))
    assert completion.token_ids.tolist() == expected_tokens(PROMPT, 8)
    assert completion.stop is StopReason.LENGTH
    for body in engine.bodies("/generate"):
        done = len(body["input_ids"]) - len(PROMPT)
        assert body["sampling_params"]["max_new_tokens"] == 8 - done > 0
    assert len({body["rid"] for body in engine.bodies("/generate")}) == len(engine.bodies("/generate"))


def experts_of(body: dict[str, Any], num_sampled: int) -> list[list[list[int]]]:
    """Of each place that SGLang would tell of, experts by the place: one layer, two of them."""
    places = range(body["routed_experts_start_len"], len(body["input_ids"]) + num_sampled - 1)
    return [[[place % 8, (place + 3) % 8]] for place in places]


@pytest.mark.parametrize("cuts", [[], [1], [3, 0, 0, 2], [0, 7]], ids=str)
@pytest.mark.parametrize("first", [0, 2])
def test_an_answer_comes_with_the_experts_of_every_token_once(cuts: list[int], first: int) -> None:
    """However often it was interrupted: what was told of the tokens so far is not asked for again."""

    def tell(answer: dict[str, Any]) -> dict[str, Any]:
        experts = np.array(experts_of(engine.bodies("/generate")[-1], len(answer["output_ids"])), dtype=np.int32)
        if answer["output_ids"]:
            answer["meta_info"]["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
        return answer

    engine = FakeEngine(interrupt_at=list(cuts), spoil=tell)
    wanted = replace(request(), experts_from=first)
    completion = drive(engine, lambda client: client.generate(wanted), routing=Routing(1, 2, 8))
    assert completion.token_ids.tolist() == expected_tokens(PROMPT, 8)
    expected = experts_of({"input_ids": PROMPT, "routed_experts_start_len": first}, 8)
    assert completion.experts.tolist() == [*expected, [[255, 255]]]
    assert all(body["return_routed_experts"] for body in engine.bodies("/generate"))


def test_an_engine_that_tells_no_experts_is_named() -> None:
    with pytest.raises(GenerationError, match=r"fake-0.*does not say which experts"):
        drive(FakeEngine(), lambda client: client.generate(request()), routing=Routing(1, 2, 8))
    engine = FakeEngine()
    assert drive(engine, lambda client: client.generate(request())).experts is None
    assert "return_routed_experts" not in engine.bodies("/generate")[0]


def test_an_answer_under_a_schema_that_was_interrupted_in_its_middle_is_not_continued() -> None:
    """Its rest would be held to the whole schema again; before its first token nothing is lost."""
    under = replace(request(), sampling=replace(request().sampling, json_schema="{}"))
    engine = FakeEngine(interrupt_at=[3])
    with pytest.raises(GenerationError, match="in the middle of a grammar"):
        drive(engine, lambda client: client.generate(under))
    engine = FakeEngine(interrupt_at=[0])
    assert drive(engine, lambda client: client.generate(under)).token_ids.tolist() == expected_tokens(PROMPT, 8)
    assert {body["sampling_params"]["json_schema"] for body in engine.bodies("/generate")} == {"{}"}


@pytest.mark.parametrize(("version", "complaint"), [("0.5.21", ""), ("0.5.20", "log-probs of the whole distribution")])
def test_E2_a_narrowed_request_says_so_and_an_engine_that_cannot_tell_its_log_probs_is_not_asked(
    version: str, complaint: str
) -> None:
    narrowed = replace(request(), sampling=replace(request().sampling, top_p=0.9))
    engine = FakeEngine(info={"version": version})
    if complaint:
        with pytest.raises(GenerationError, match=f"fake-0.*{complaint}"):
            drive(engine, lambda client: client.generate(narrowed))
        assert engine.bodies("/generate") == []
        return
    completion = drive(engine, lambda client: client.generate(narrowed))
    assert [body["return_sampling_mask"] for body in engine.bodies("/generate")] == [True]
    assert completion.logprobs.tolist() == [-token / 512 for token in completion.token_ids.tolist()]

    def forget(answer: dict[str, Any]) -> dict[str, Any]:
        del answer["meta_info"]["output_token_sampling_logprobs"]
        return answer

    with pytest.raises(GenerationError, match="of the whole distribution"):
        drive(FakeEngine(info={"version": version}, spoil=forget), lambda client: client.generate(narrowed))


def test_F14_a_request_that_was_sent_is_never_sent_again() -> None:
    engine = FakeEngine()
    engine.faults["/generate"] = ["drop"]
    with pytest.raises(EngineLost, match="fake-0"):
        drive(engine, lambda client: client.generate(request()))
    assert len(engine.bodies("/generate")) == 1


def test_a_refused_connection_is_tried_again_and_then_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    async def ask() -> None:
        client = EngineClient("gone", f"http://127.0.0.1:{port}")
        try:
            await client.generate(request())
        finally:
            await client.close()

    with pytest.raises(EngineRefused, match=f"engine gone at http://127.0.0.1:{port}"):
        asyncio.run(ask())


def test_an_engine_that_comes_up_late_is_reached() -> None:
    async def scenario() -> int:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        client = EngineClient("late", f"http://127.0.0.1:{port}")
        asking = asyncio.create_task(client.generate(request()))
        await asyncio.sleep(0.05)
        from aiohttp import web

        runner = web.AppRunner(FakeEngine().application(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            return len((await asking).token_ids)
        finally:
            await client.close()
            await runner.cleanup()

    assert asyncio.run(scenario()) == 8


def spoiled(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    def spoil(answer: dict[str, Any]) -> Any:
        change(answer)
        return answer

    return spoil


def test_D23_F5_garbage_is_an_error_that_names_the_engine() -> None:
    def nan(answer: dict[str, Any]) -> None:
        answer["meta_info"]["output_token_logprobs"][2][0] = math.nan

    def bare(answer: dict[str, Any]) -> None:
        del answer["meta_info"]["output_token_logprobs"]

    for change in (nan, bare):
        with pytest.raises(GenerationError, match="fake-0 at http"):
            drive(FakeEngine(spoil=spoiled(change)), lambda client: client.generate(request()))


def test_D9_an_engine_that_fell_back_to_older_weights_is_refused() -> None:
    engine = FakeEngine(version="5")

    async def scenario(client: EngineClient) -> None:
        await client.generate(request())
        engine.version = "4"  # restarted from an older checkpoint behind the same address
        with pytest.raises(GenerationError, match="version 4 after it had served version 5"):
            await client.generate(request(request_id="r2"))
        assert await client.probe() == 4

    drive(engine, scenario)


def test_an_engine_error_is_an_error() -> None:
    engine = FakeEngine()
    engine.faults["/generate"] = [500]
    with pytest.raises(GenerationError, match="status 500") as caught:
        drive(engine, lambda client: client.generate(request()))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("streamed", [False, True])
def test_what_an_engine_says_is_wrong_with_a_request_is_told_as_such(streamed: bool) -> None:
    engine = FakeEngine()
    engine.faults["/generate"] = [400]
    asked = replace(request(), on_tokens=(lambda _: None) if streamed else None)
    with pytest.raises(RequestRefused, match=r"fake-0 at http.* refuses the request: ") as caught:
        drive(engine, lambda client: client.generate(asked))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_request_that_takes_too_long_is_lost() -> None:
    engine = FakeEngine()
    engine.faults["/generate"] = ["hang"]
    with pytest.raises(EngineLost, match=r"0\.2 s"):
        drive(engine, lambda client: client.generate(request()), limits=Limits(generate_s=0.2))


def test_A17_proxies_in_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert drive(FakeEngine(), lambda client: client.generate(request())).stop is StopReason.LENGTH


def test_A16_an_engine_on_ipv6_is_reached_and_told_a_bracketed_address() -> None:
    engine = FakeEngine()
    engine.faults["/init_weights_update_group"] = [400]

    async def scenario(client: EngineClient) -> None:
        await client.generate(request())
        with pytest.raises(WeightUpdateError):
            await client.join(GROUP, 2)

    drive(engine, scenario, host="::1")
    assert engine.bodies("/init_weights_update_group") == [
        {
            "master_address": "[::1]",
            "master_port": 1234,
            "rank_offset": 2,
            "world_size": 3,
            "group_name": "w-3-1",
            "backend": "gloo",
        }
    ]


def test_the_token_is_sent_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    for token in (TOKEN, path):
        engine = FakeEngine()
        engine.faults["/generate"] = [401]
        with pytest.raises(GenerationError) as caught:
            drive(engine, lambda client: client.generate(request()), token=token)
        assert {headers["Authorization"] for headers in engine.headers} == {f"Bearer {TOKEN}"}
        assert TOKEN not in str(caught.value)
        assert TOKEN not in repr(EngineClient("e", "http://h:1", token=token))


def test_an_abort_returns_what_there_is() -> None:
    engine = FakeEngine(token_s=0.001)

    async def scenario(client: EngineClient) -> None:
        asking = asyncio.create_task(client.generate(request(100_000)))
        await until(lambda: engine.runs and len(engine.runs["r"].tokens) > 2)
        await client.abort("r")
        completion = await asking
        assert completion.stop is StopReason.ABORT
        assert completion.token_ids.tolist() == expected_tokens(PROMPT, len(completion.token_ids))
        await client.abort("r")  # over: nothing happens
        await client.abort("never heard of")

    drive(engine, scenario)
    assert len(engine.bodies("/generate")) == 1


def test_D15_an_abort_that_does_nothing_is_an_error() -> None:
    engine = FakeEngine(token_s=0.01, deaf_to_abort=True)

    async def scenario(client: EngineClient) -> None:
        asking = asyncio.create_task(client.generate(request(100_000)))
        await until(lambda: engine.runs)
        with pytest.raises(GenerationError, match="runs request r"):
            await client.abort("r")
        asking.cancel()

    drive(engine, scenario, limits=Limits(admin_s=0.3))


def test_D15_a_pause_that_ends_no_request_is_found_before_the_engine_goes_on() -> None:
    engine = FakeEngine(info={"version": "0.5.17"}, sessions=False, spans=False, token_s=0.001, deaf_to_abort=True)

    async def scenario(client: EngineClient) -> None:
        asking = asyncio.create_task(client.generate(request(100_000)))
        await until(lambda: engine.runs)
        with pytest.raises(WeightUpdateError, match="pending"):
            await update(client)
        assert engine.frozen
        asking.cancel()

    drive(engine, scenario)


def test_an_engine_is_asked_once_what_it_can_do() -> None:
    engine = FakeEngine()

    async def scenario(client: EngineClient) -> None:
        await asyncio.gather(*(client.generate(request(request_id=str(k))) for k in range(5)))

    drive(engine, scenario)
    assert engine.paths().count("/server_info") == 1


def test_leaving_a_group_that_the_engine_does_not_know_is_leaving() -> None:
    engine = FakeEngine()
    drive(engine, lambda client: client.leave("w-0-0"))
    engine.faults["/destroy_weights_update_group"] = [403]
    with pytest.raises(WeightUpdateError, match="status 403"):
        drive(engine, lambda client: client.leave("w-0-0"))


def test_a_probe_tells_the_version_or_fails() -> None:
    assert drive(FakeEngine(version="12"), lambda client: client.probe()) == 12
    assert drive(FakeEngine(), lambda client: client.probe(), version=7) == 7  # "default" is what it was started with
    sick = FakeEngine()
    sick.faults["/health"] = [503]
    with pytest.raises(GenerationError, match="status 503"):
        drive(sick, lambda client: client.probe())
    with pytest.raises(GenerationError, match="quarantined"):
        drive(FakeEngine(info={"quarantined": True}), lambda client: client.probe())
    with pytest.raises(GenerationError, match="'v1'"):
        drive(FakeEngine(version="v1"), lambda client: client.probe())
