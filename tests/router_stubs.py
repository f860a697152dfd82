"""Engines that do as a test of the router tells them, and a router over some."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from areal_hpc.errors import GenerationError
from areal_hpc.generation.router import Router
from areal_hpc.generation.scripted import ScriptedGenerator
from areal_hpc.types import Completion, GenerationRequest, Sampling


@dataclass
class Stub:
    """An engine that answers when told to, and fails as told."""

    name: str
    version: int = 0
    trouble: Exception | None = None
    sick: bool = False
    unread: OSError | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    breaks: asyncio.Event = field(default_factory=asyncio.Event)  # what runs ends in its trouble
    probed: int = 0
    served: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    closed: bool = False

    async def generate(self, request: GenerationRequest) -> Completion:
        self.served.append(request.request_id)
        if self.trouble is not None:
            raise self.trouble
        ways = {asyncio.ensure_future(event.wait()) for event in (self.gate, self.breaks)}
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        if self.breaks.is_set():
            assert self.trouble is not None
            raise self.trouble
        return await ScriptedGenerator([[1]], version=self.version).generate(request)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def probe(self) -> int:
        self.probed += 1
        if self.unread is not None:
            raise self.unread
        if self.sick:
            raise GenerationError(f"{self.name} is not healthy")
        return self.version

    async def close(self) -> None:
        self.closed = True


def request(request_id: str, session: str = "", num: int = 10) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, token_ids=(1,) * 5, sampling=Sampling(max_new_tokens=num), session=session
    )


def drive(scenario: Callable[[Router, list[Stub]], Awaitable[Any]], num: int = 2, **options: Any) -> None:
    async def body() -> None:
        stubs = [Stub(f"engine-{k}") for k in range(num)]
        router = Router(stubs, **{"probe_s": 0.01, "wait_s": 5.0} | options)
        await scenario(router, stubs)
        await router.close()
        assert all(stub.closed for stub in stubs)

    asyncio.run(body())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)
