"""Where a service listens: errors that say what to do, and an end that waits for nobody."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
from aiohttp import web
from served import run

from areal_hpc.errors import ConfigError
from areal_hpc.proxy.access import listening


def test_a_service_ends_while_somebody_waits_for_an_answer() -> None:
    """``run`` gives the whole scenario 30 s; a server that waits for its clients takes two minutes."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun")
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def scenario() -> None:
        application = web.Application()
        application.add_routes([web.get("/", answer)])
        async with aiohttp.ClientSession() as http:
            async with listening(application, "127.0.0.1", 0) as url:
                asked = await http.get(url)
                assert await asked.content.readexactly(5) == b"begun"
            with pytest.raises(aiohttp.ClientPayloadError):
                await asked.content.read()

    run(scenario())


def test_a_port_that_is_taken_or_none_is_named_with_what_to_do() -> None:
    async def scenario(port: int) -> None:
        async with listening(web.Application(), "127.0.0.1", port):
            raise AssertionError("it listens")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 1 << 16):
            with pytest.raises(ConfigError, match=rf"port {port}: .*agent\.online\.port, or --port"):
                run(scenario(port))
