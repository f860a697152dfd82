"""The embedded engine behind its HTTP server, as a test's client sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from areal_hpc.generation.embedded.engine import EmbeddedEngine
from areal_hpc.generation.embedded.server import start_server

TOKEN = "a-token"
LIMIT_S = 60.0
PROMPT = list(range(40, 60))
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
ENDLESS = {"temperature": 1.0, "max_new_tokens": 1900, "ignore_eos": True}


@dataclass
class Api:
    """The engine's server as a client sees it."""

    engine: EmbeddedEngine
    url: str
    session: aiohttp.ClientSession
    runner: aiohttp.web.AppRunner

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def generate(self, **body: Any) -> Any:
        status, answer = await self.post("/generate", **{"input_ids": PROMPT, "return_logprob": True, **body})
        assert status == 200, answer
        return answer

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Ask ``/server_info`` until ``condition`` holds."""
        async with asyncio.timeout(LIMIT_S):
            while not condition((await self.get("/server_info"))[1]):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(directory: Path, token: str = TOKEN, **options: Any) -> AsyncIterator[Api]:
    defaults = {"max_running": 4, "max_tokens": 2048, "seed": 0, "version": "1", "update_timeout_s": 20.0}
    engine = EmbeddedEngine(directory, **(defaults | options))
    engine.start()
    url, runner = await start_server(engine, token=token)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        yield Api(engine, url, session, runner)
    await runner.cleanup()
    engine.close()


def run(directory: Path, use: Callable[[Api], Awaitable[None]], **options: Any) -> None:
    async def within() -> None:
        async with asyncio.timeout(3 * LIMIT_S), serving(directory, **options) as api:
            await use(api)

    asyncio.run(within())
