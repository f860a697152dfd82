"""This replica's engine: the embedded one in this process, or a server of SGLang or vLLM in one of its own."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal_hpc import accelerator
from areal_hpc.config.derived import threads_of
from areal_hpc.config.schema import EngineName
from areal_hpc.errors import ArealError, GenerationError
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.engines import token_of
from areal_hpc.roles.wiring.servers import seed_of, started_server
from areal_hpc.roles.wiring.shares import ended, led, unless_stopped, watching
from areal_hpc.waits import LEADER, advance, waiting

if TYPE_CHECKING:
    from areal_hpc.generation.embedded.engine import EmbeddedEngine


SERVER = "its server"
AWAITED = {LEADER: "weights; it is paused", SERVER: "the first of what is queued there to be begun"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """One engine replica as its role process sees it."""

    url: str
    alive: Callable[[], bool]
    """Raises OSError where it cannot be seen whether the nodes of an engine that has several hold together."""
    load: Callable[[], Awaitable[Mapping[str, Any]]]
    """The version served, sequences running and queued, tokens sampled since the start and, of late, per second."""
    death: Callable[[], Awaitable[ArealError]]
    """The error to raise for an engine that has ended, or does not answer."""


def serve_engine(process: RoleProcess) -> AbstractAsyncContextManager[ServedEngine]:
    """This replica's engine, answering HTTP on this host's address in the run.

    Raises:
        GenerationError: an engine with a process of its own does not come up.
        StopRequested: nobody needs it any more before it is up.
    """
    return _embedded(process) if process.config.generation.backend is EngineName.EMBEDDED else _external(process)


@asynccontextmanager
async def _embedded(process: RoleProcess) -> AsyncIterator[ServedEngine]:
    from areal_hpc.generation.embedded.engine import EmbeddedEngine
    from areal_hpc.generation.embedded.server import start_server

    config = process.config
    if config.deterministic:
        accelerator.compute_deterministically()
    engine = EmbeddedEngine(
        config.model.path,
        dtype=config.model.dtype,
        max_running=config.generation.max_running,
        max_tokens=config.model.max_tokens,
        threads=threads_of(config, len(os.sched_getaffinity(0)))["generator"],
        seed=seed_of(config, process.index),
        version=str(config.evaluation.step),
        lora=config.model.lora,
        update_timeout_s=config.limits.weight_update_s,
    )
    engine.start()
    token = token_of(process, process.index, process.incarnation)
    url, server = await start_server(engine, host=process.host, token=token)

    async def death() -> ArealError:
        return GenerationError(f"the engine of {process.name} has ended: {engine.scheduler.failure}; see the log above")

    try:
        yield ServedEngine(
            url=url,
            alive=lambda: engine.scheduler.alive,
            load=Meter(_looking_at(engine)).load,
            death=death,
        )
    finally:
        await server.cleanup()
        engine.close()


def _looking_at(engine: EmbeddedEngine) -> Callable[[], Awaitable[Mapping[str, Any]]]:
    async def look() -> Mapping[str, Any]:
        stats = engine.scheduler.stats()
        return {
            "version": int(engine.scheduler.version),
            "running": stats["num_running"],
            "queued": stats["num_waiting"],
            "tokens": stats["num_generated_tokens"],
        }

    return look


class Meter:
    """An engine's load with the rate at which it samples: that since the last look."""

    def __init__(
        self, look: Callable[[], Awaitable[Mapping[str, Any]]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look, self._clock = look, clock
        self._sampled, self._since = 0, clock()

    async def load(self) -> Mapping[str, Any]:
        seen, now = await self._look(), self._clock()
        rate = (seen["tokens"] - self._sampled) / (now - self._since)
        self._sampled, self._since = seen["tokens"], now
        return {**seen, "tokens_per_s": rate}


class ActivityRelay:
    """Publishes what an engine's server achieves and waits for as if this process did.

    The server has no heartbeat of its own, so without this the watchdog would take it for hung as soon as somebody
    waits long for an answer. One that begins nothing of what it has queued does hang: its wait has no party in the run,
    by which the watchdog tells.
    """

    def __init__(self, look: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._look = look
        self._sampled, self._loading = 0, None
        self._waits_for = ""
        self._wait = ExitStack()

    async def look(self) -> Mapping[str, Any]:
        """The engine's load, asked now."""
        seen = dict(await self._look())
        loading, held = seen.pop("loading", None), bool(seen.pop("held"))
        if seen["tokens"] > self._sampled:
            advance("tokens generated", seen["tokens"] - self._sampled)
        if loading != self._loading:
            advance("looks at weights that it loads")
        self._sampled, self._loading = seen["tokens"], loading
        self._wait_for(LEADER if held else SERVER if seen["queued"] and not seen["running"] else "")
        return seen

    def _wait_for(self, party: str) -> None:
        if party != self._waits_for:
            self._wait.close()
            if party:
                self._wait.enter_context(waiting(AWAITED[party], party, limit_s=None))
            self._waits_for = party


@asynccontextmanager
async def _external(process: RoleProcess) -> AsyncIterator[ServedEngine]:
    async with AsyncExitStack() as stack:
        launch = stack.enter_context(led(process)) if process.seat is None else None
        over = stack.enter_context(watching(launch))
        server, load = await unless_stopped(process, over, stack.enter_async_context(started_server(process, launch)))
        if launch is not None:
            stack.callback(launch.end, ended(process))  # before the server, whose end would look like a share's death

        def alive() -> bool:
            return server.alive() and not (over.done() and over.result())

        async def death() -> ArealError:
            return GenerationError(over.result()) if over.done() else await server.death()

        yield ServedEngine(url=server.url, alive=alive, load=Meter(ActivityRelay(load).look).load, death=death)
