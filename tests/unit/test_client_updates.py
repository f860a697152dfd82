"""New weights through the client: the recipe, what an engine may lack, lost orders, and one that missed an update."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from driven import PROMPT, SPECS, drive, request, until, update
from fake_engine import FakeEngine, expected_tokens

from areal_hpc.errors import GenerationError, WeightUpdateError
from areal_hpc.generation import manifest
from areal_hpc.generation.capabilities import SGLANG_QUEUE_S, Capabilities, Narrowed, PauseMode
from areal_hpc.generation.client import EngineClient
from areal_hpc.generation.connection import ATTEMPTS
from areal_hpc.types import StopReason

UPDATE = [
    "/pause_generation",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/update_weight_version",
    "/flush_cache",
    "/continue_generation",
]


def orders(engine: FakeEngine) -> list[str]:
    return [path for path in engine.paths() if path in UPDATE]


def test_an_update_follows_the_recipe() -> None:
    engine = FakeEngine()
    drive(engine, update)
    assert orders(engine) == UPDATE
    assert engine.bodies("/pause_generation") == [{"mode": "retract"}]
    assert engine.bodies("/update_weight_version") == [{"new_version": "9", "abort_all_requests": False}]
    for body in engine.bodies("/update_weights_from_distributed"):
        assert body == {
            "names": ["w"],
            "dtypes": ["float32"],
            "shapes": [[2]],
            "group_name": "w-0-0",
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "abort_all_requests": False,
        }


def test_an_engine_without_sessions_and_spans_is_updated_by_interrupting() -> None:
    engine = FakeEngine(info={"version": "0.5.17"}, sessions=False, spans=False)
    drive(engine, update)
    assert [p for p in orders(engine) if p != "/begin_weight_update"] == [
        p for p in UPDATE if "_weight_update" not in p
    ]
    assert orders(engine).count("/begin_weight_update") == 1  # asked once, 404, never again
    assert engine.bodies("/pause_generation") == [{"mode": "abort"}]


def test_checksums_go_only_to_an_engine_that_announces_them() -> None:
    engine = FakeEngine(info={"version": "x", "areal_hpc": {"checksums": True}})
    drive(engine, update)
    assert [body["checksums"] for body in engine.bodies("/update_weights_from_distributed")] == [[77], [77]]


def test_changes_go_only_to_an_engine_that_takes_them() -> None:
    changes = [replace(SPECS[0], num_changed=1), replace(SPECS[0], name="v")]

    async def scenario(client: EngineClient) -> None:
        await client.prepare()
        await client.load_bucket("w-0-0", changes)

    engine = FakeEngine(info={"version": "x", "areal_hpc": {"checksums": True, "deltas": True}})
    drive(engine, scenario)
    assert [body["nums_changed"] for body in engine.bodies("/update_weights_from_distributed")] == [[1, None]]
    with pytest.raises(WeightUpdateError, match=r"fake-0.*takes whole tensors only; set weights\.delta=false"):
        drive(FakeEngine(info={"version": "0.5.21"}), scenario)


def test_sglang_with_our_code_in_its_workers_reads_what_a_bucket_holds_from_its_load_format() -> None:
    changes = [replace(SPECS[0], num_changed=1), replace(SPECS[0], name="v")]

    async def scenario(client: EngineClient) -> None:
        assert (await client.prepare()).stages, "it takes buckets before the pause"
        await client.load_bucket("w-0-0", changes)

    engine = FakeEngine(info={"version": "0.5.21", "internal_states": [{"areal_hpc": {"deltas": True}}, {}]})
    drive(engine, scenario)
    (body,) = engine.bodies("/update_weights_from_distributed")
    assert not body.keys() & {"checksums", "nums_changed"}
    assert manifest.read(body["load_format"], body["names"], body["dtypes"], body["shapes"]) == tuple(changes)
    told = Capabilities.read({"version": "0.5.21", "internal_states": [{"areal_hpc": {"deltas": False}}]})
    assert (told.stages, told.deltas, told.narrowed) == (True, False, Narrowed.ASKED)


def test_the_order_of_a_queue_is_an_sglangs_only_where_it_was_told_to_keep_one() -> None:
    ordered = {"version": "0.5.21", "enable_priority_scheduling": True, "schedule_low_priority_values_first": True}
    assert Capabilities.read(ordered).queue_s == SGLANG_QUEUE_S
    for name in ("enable_priority_scheduling", "schedule_low_priority_values_first"):
        assert Capabilities.read({**ordered, name: False}).queue_s is None
    assert Capabilities.read({"version": "0.5.21"}).queue_s is None


@pytest.mark.parametrize(("stages", "ended"), [(True, 0), (False, 1)])
def test_what_an_update_left_open_is_ended_but_not_where_that_would_put_it_into_place(stages: bool, ended: int) -> None:
    engine = FakeEngine(info={"version": "x", "areal_hpc": {"checksums": True, "stages": stages}})

    async def scenario(client: EngineClient) -> None:
        assert (await client.prepare()).stages is stages
        await client.load_bucket("w-0-0", SPECS)
        await client.prepare()
        assert engine.paths().count("/end_weight_update") == ended
        engine.begun = False  # as in an engine that begins anew
        await client.load_bucket("w-0-0", SPECS)
        assert engine.paths().count("/begin_weight_update") == 2

    drive(engine, scenario)


@pytest.mark.parametrize(
    ("info", "mode"),
    [
        ({"version": "0.5.18"}, PauseMode.ABORT),
        ({"version": "0.5.19"}, PauseMode.IN_PLACE),
        ({"version": "0.5.20.post1"}, PauseMode.IN_PLACE),
        ({"version": "0.5.21"}, PauseMode.RETRACT),
        ({"version": "0.6.0rc1"}, PauseMode.RETRACT),
        ({"version": "1.0"}, PauseMode.RETRACT),
        ({}, PauseMode.ABORT),
        ({"version": "areal-embedded", "areal_hpc": {"checksums": True}}, PauseMode.IN_PLACE),
    ],
)
def test_running_requests_go_through_an_update_as_the_engine_can(info: dict[str, Any], mode: PauseMode) -> None:
    engine = FakeEngine(info=info, sessions=mode is PauseMode.RETRACT, spans=mode is not PauseMode.ABORT)
    drive(engine, update)
    assert engine.bodies("/pause_generation") == [{"mode": mode}]


def test_D18_an_engine_that_keeps_what_old_weights_have_cached_is_not_resumed() -> None:
    engine = FakeEngine(faults={"/flush_cache": [400] * 4})

    async def scenario(client: EngineClient) -> None:
        with pytest.raises(WeightUpdateError, match="flush_cache"):
            await update(client)
        assert engine.frozen

    drive(engine, scenario)


def test_an_update_in_the_middle_keeps_the_tokens_and_gives_two_versions() -> None:
    """Once frozen in place with spans from the engine, once interrupted without any: the caller sees the same."""
    for engine in (
        FakeEngine(version="3", token_s=0.001),
        FakeEngine(version="3", token_s=0.001, info={"version": "0.5.17"}, sessions=False, spans=False),
    ):

        async def scenario(client: EngineClient, engine: FakeEngine = engine) -> None:
            asking = asyncio.create_task(client.generate(request(40)))
            await until(lambda: engine.runs and len(next(iter(engine.runs.values())).tokens) > 5)
            await update(client, 4)
            completion = await asking
            assert completion.token_ids.tolist() == expected_tokens(PROMPT, 40)
            assert completion.stop is StopReason.LENGTH
            before = completion.versions.tolist().count(3)
            assert 5 < before < 40
            assert completion.versions.tolist() == [3] * before + [4] * (40 - before)
            assert client.version == 4

        drive(engine, scenario)


@pytest.mark.parametrize(
    "path", ["/pause_generation", "/update_weight_version", "/flush_cache", "/continue_generation"]
)
@pytest.mark.parametrize("fault", ["drop", 503])
def test_D12_a_lost_order_is_given_again(path: str, fault: Any) -> None:
    engine = FakeEngine()
    engine.faults[path] = [fault, fault]
    drive(engine, update)
    assert engine.paths().count(path) == 3
    assert not engine.frozen
    assert engine.version == "9"


def test_D12_orders_are_given_a_bounded_number_of_times() -> None:
    engine = FakeEngine()
    engine.faults["/pause_generation"] = ["drop"] * 99
    with pytest.raises(WeightUpdateError, match="fake-0"):
        drive(engine, update)
    assert engine.paths().count("/pause_generation") == ATTEMPTS


@pytest.mark.parametrize(
    "path", ["/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"], ids=str
)
@pytest.mark.parametrize("fault", ["drop", 400])
def test_D26_an_engine_that_missed_an_update_serves_nothing_until_a_whole_one(path: str, fault: Any) -> None:
    engine = FakeEngine()
    engine.faults[path] = [fault]

    async def scenario(client: EngineClient) -> None:
        with pytest.raises(WeightUpdateError, match="fake-0"):
            await update(client)
        with pytest.raises(WeightUpdateError, match="not resumed"):
            await client.resume(9)
        with pytest.raises(GenerationError, match="serves nothing"):
            await client.generate(request())
        assert "/continue_generation" not in engine.paths()
        await update(client)
        assert (await client.generate(request(request_id="r2"))).versions.tolist() == [9] * 8

    drive(engine, scenario)


def test_an_update_from_a_directory() -> None:
    engine = FakeEngine()

    async def scenario(client: EngineClient) -> None:
        await client.pause()
        await client.load_directory("/some/where", 6)
        await client.resume(6)

    drive(engine, scenario)
    assert orders(engine) == ["/pause_generation", "/update_weight_version", "/flush_cache", "/continue_generation"]
    assert engine.bodies("/update_weights_from_disk") == [
        {"model_path": "/some/where", "weight_version": "6", "flush_cache": False, "abort_all_requests": False}
    ]
