"""Connections are kept, never trusted beyond their time, and what was sent on one is never sent twice."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
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


def test_a_call_that_is_made_while_old_connections_close_goes_to_the_new_address() -> None:
    old, new = FakeEngine(), FakeEngine()

    async def scenario(http: Connection) -> None:
        assert await generate(http) == 200
        async with running(new) as url:
            moving = asyncio.create_task(http.move(url, "another"))
            await asyncio.sleep(0)  # it waits for the kept connection to close
            assert not moving.done()
            assert [await generate(http) for _ in range(2)] == [200] * 2
            await moving
            assert await generate(http) == 200

    drive(old, scenario)
    assert (len(old.calls), len(new.calls)) == (1, 3)
    assert [headers.get("Authorization") for headers in new.headers] == ["Bearer another"] * 3


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_events_are_told_one_by_one_however_they_are_cut(chunk: int) -> None:
    events = [{"output_ids": list(range(number))} for number in range(4)]
    data = b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n"
    told: list[Any] = []
    assert _streamed([data[at : at + chunk] for at in range(0, len(data), chunk)], told) == (200, events[-1])
    assert told == events


def test_H3_a_stream_that_ends_without_saying_so_is_lost() -> None:
    told: list[Any] = []
    with pytest.raises(EngineLost, match="its stream broke off"):
        _streamed([b'data: {"output_ids": [1]}\n\n'], told)
    assert told == [{"output_ids": [1]}]


def _streamed(chunks: list[bytes], told: list[Any]) -> tuple[int, Any]:
    """The outcome of a call whose answer is a stream of these chunks."""

    async def send(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        return response

    async def body() -> tuple[int, Any]:
        async with answering(send) as http:
            return await http.call("POST", "/generate", {}, 10.0, each=told.append)

    return asyncio.run(body())


@asynccontextmanager
async def answering(handler: Callable[[web.Request], Any]) -> AsyncIterator[Connection]:
    """A connection to a server that answers every request so."""

    async def handle(request: web.Request) -> web.StreamResponse:
        answer = handler(request)
        return answer if isinstance(answer, web.StreamResponse) else await answer

    application = web.Application()
    application.router.add_post("/generate", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    http = Connection("engine-0", f"http://127.0.0.1:{runner.addresses[0][1]}", token="", connect_s=5.0)
    try:
        yield http
    finally:
        await http.close()
        await runner.cleanup()


@pytest.mark.parametrize(("sent", "told"), [(b"[NaN]", "[nan]"), (b"no \xff JSON", "no \ufffd JSON")])
def test_an_answer_that_is_no_json_is_told_as_it_is(sent: bytes, told: str) -> None:
    """A reader of log-probs then refuses the NaN."""

    async def body() -> tuple[int, Any]:
        async with answering(lambda _: web.Response(body=sent)) as http:
            return await http.call("POST", "/generate", {}, 10.0)

    status, answer = asyncio.run(body())
    assert (status, str(answer)) == (200, told)
