"""A client and a fake engine in this process, for tests of either."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fake_engine import FakeEngine, running

from areal_hpc.generation.client import EngineClient, Limits
from areal_hpc.transfer import GroupAddress, TensorSpec
from areal_hpc.types import GenerationRequest, Sampling

PROMPT = (5, 6, 7)
SPECS = [TensorSpec(name="w", dtype="float32", shape=(2,), checksum=77)]
GROUP = GroupAddress(host="::1", port=1234, name="w-3-1", world_size=3, backend="gloo")


def request(num: int = 8, request_id: str = "r") -> GenerationRequest:
    return GenerationRequest(request_id=request_id, token_ids=PROMPT, sampling=Sampling(max_new_tokens=num))


def drive(
    engine: FakeEngine, scenario: Callable[[EngineClient], Awaitable[Any]], host: str = "127.0.0.1", **options: Any
) -> Any:
    """Run ``scenario`` with a client of ``engine``, both in this process and loop."""

    async def body() -> Any:
        async with running(engine, host) as url:
            options.setdefault("limits", Limits(admin_s=5, generate_s=20, load_s=5))
            client = EngineClient("fake-0", url, **options)
            try:
                return await scenario(client)
            finally:
                await client.close()

    return asyncio.run(body())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def update(client: EngineClient, version: int = 9) -> None:
    await client.prepare()
    await client.pause()
    await client.load_bucket("w-0-0", SPECS)
    await client.load_bucket("w-0-0", SPECS)
    await client.resume(version)
