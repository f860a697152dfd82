"""Connections are kept, never trusted beyond their time, and what was sent on one is never sent twice."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_engine import FakeEngine, running

from areal_hpc.generation.connection import Connection, EngineLost

REQUEST_IDS = map(str, itertools.count())


def drive(engine: FakeEngine, scenario: Callable[[Connection], Awaitable[Any]], **options: Any) -> Any:
    """Run ``scenario`` with a connection to ``engine``, both in this process and loop."""

    async def body() -> Any:
        async with running(engine) as url:
            http = Connection("engine fake-0", url, token="", connect_s=5.0, **options)
            try:
                return await scenario(http)
            finally:
                await http.close()

    return asyncio.run(body())


async def generate(http: Connection) -> int:
    body = {"rid": next(REQUEST_IDS), "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
    status, _ = await http.call("POST", "/generate", body, 10.0)
    return status


def num_connections(engine: FakeEngine) -> int:
    return len({id(transport) for transport in engine.connections})  # they are kept, so ids are not used again


def test_one_connection_serves_one_request_after_the_other() -> None:
    async def scenario(http: Connection) -> None:
        assert [await generate(http) for _ in range(5)] == [200] * 5

    engine = FakeEngine()
    drive(engine, scenario)
    assert num_connections(engine) == 1
    assert len(engine.calls) == 5


def test_requests_at_once_have_a_connection_each_and_leave_them_to_the_next() -> None:
    async def scenario(http: Connection) -> None:
        for _ in range(2):
            await asyncio.gather(*(generate(http) for _ in range(8)))

    engine = FakeEngine()
    drive(engine, scenario)
    assert num_connections(engine) == 8


def test_a_connection_that_the_server_closed_meanwhile_is_not_used() -> None:
    async def scenario(http: Connection) -> None:
        assert await generate(http) == 200
        engine.connections[0].close()
        await asyncio.sleep(0.01)  # the hang-up crosses the loopback
        assert await generate(http) == 200

    engine = FakeEngine()
    drive(engine, scenario)
    assert (num_connections(engine), len(engine.calls)) == (2, 2)


def test_a_connection_that_lay_idle_for_long_is_not_used() -> None:
    async def scenario(http: Connection) -> None:
        for _ in range(2):
            assert await generate(http) == 200
            await asyncio.sleep(0.01)

    engine = FakeEngine()
    drive(engine, scenario, idle_s=0.001)
    assert num_connections(engine) == 2


def test_F14_a_request_that_broke_off_on_a_kept_connection_is_not_sent_again() -> None:
    async def scenario(http: Connection) -> None:
        assert await generate(http) == 200
        with pytest.raises(EngineLost, match=r"engine fake-0 at http.* did not answer /generate"):
            await generate(http)
        assert await generate(http) == 200

    engine = FakeEngine()
    engine.faults["/generate"] = [None, "drop"]
    drive(engine, scenario)
    assert len(engine.calls) == 3
    assert engine.connections[0] is engine.connections[1] is not engine.connections[2]


def test_an_order_that_broke_off_on_a_kept_connection_is_given_again() -> None:
    async def scenario(http: Connection) -> None:
        assert await generate(http) == 200
        await http.order("/continue_generation", {}, 10.0)

    engine = FakeEngine()
    engine.faults["/continue_generation"] = ["drop"]
    drive(engine, scenario)
    assert engine.paths() == ["/generate", "/continue_generation", "/continue_generation"]


def test_a_cancelled_request_leaves_no_connection_behind_for_the_next() -> None:
    async def scenario(http: Connection) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(generate(http), 0.05)
        assert await generate(http) == 200

    engine = FakeEngine()
    engine.faults["/generate"] = ["hang"]
    drive(engine, scenario)
    assert num_connections(engine) == 2
