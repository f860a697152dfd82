"""This replica's engine: the embedded one in this process, or SGLang's server in one of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from areal_hpc import accelerator
from areal_hpc.config.cluster import Shape
from areal_hpc.config.derived import threads_of
from areal_hpc.config.schema import Config, EngineName
from areal_hpc.errors import ConfigError
from areal_hpc.roles.process import RoleProcess, StopRequested
from areal_hpc.roles.wiring.engines import token_of

if TYPE_CHECKING:
    from areal_hpc.generation.embedded.engine import EmbeddedEngine
    from areal_hpc.generation.sglang.arguments import ServerSpec

T = TypeVar("T")

FINDS_SGLANG = """
from importlib.metadata import entry_points, version
print(version("sglang"), "areal_cpu" in {found.name for found in entry_points(group="sglang.srt.platforms")})
"""
FIND_LIMIT_S = 60.0
HOW_TO_INSTALL = "make one with examples/sglang_environment DIR and set generation.python=DIR/bin/python"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """One engine replica as its role process sees it."""

    url: str
    alive: Callable[[], bool]
    load: Callable[[], Awaitable[Mapping[str, Any]]]
    """The version served, sequences running and queued, tokens sampled since the start and, of late, per second."""


def serve_engine(process: RoleProcess) -> AbstractAsyncContextManager[ServedEngine]:
    """This replica's engine, answering HTTP on this host's address in the run.

    Raises:
        GenerationError: an engine with a process of its own does not come up.
        StopRequested: nobody needs it any more before it is up.
    """
    if process.config.generation.backend is EngineName.SGLANG:
        return _sglang(process)
    assert process.config.generation.backend is EngineName.EMBEDDED, "preflight lets no other pass"
    return _embedded(process)


def _seed(process: RoleProcess) -> int:
    """Replicas differ in what they sample."""
    return process.config.seed * 1009 + process.index


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
        seed=_seed(process),
        version=str(config.evaluation.step),
        lora=config.model.lora,
        update_timeout_s=config.limits.weight_update_s,
    )
    engine.start()
    token = token_of(process, process.index, process.incarnation)
    url, server = await start_server(engine, host=process.host, token=token)
    try:
        yield ServedEngine(url=url, alive=lambda: engine.scheduler.alive, load=Meter(_looking_at(engine)).load)
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


@asynccontextmanager
async def _sglang(process: RoleProcess) -> AsyncIterator[ServedEngine]:
    from areal_hpc.generation.sglang.server import serving

    opening = serving(
        sglang_spec(process),
        python=process.config.generation.python or sys.executable,
        log=process.attempt.log("sglang", process.index),
        start_s=process.config.limits.start_s,
    )
    async with AsyncExitStack() as stack:
        server = await _unless_stopped(process, stack.enter_async_context(opening))
        yield ServedEngine(url=server.url, alive=server.alive, load=Meter(server.load).load)


def sglang_spec(process: RoleProcess) -> ServerSpec:
    """What this replica's server is started with."""
    from areal_hpc.generation.sglang.arguments import ServerSpec

    config = process.config
    return ServerSpec(
        model_path=config.model.path,
        dtype=config.model.dtype,
        host=process.host,
        key=token_of(process, process.index, process.incarnation),
        accelerator=accelerator.detect(),
        max_running=config.generation.max_running,
        max_tokens=config.model.max_tokens,
        tensor_parallel=config.generation.tensor_parallel,
        pipeline_parallel=config.generation.pipeline_parallel,
        seed=_seed(process),
        version=str(config.evaluation.step),
        extra=config.generation.server_args,
    )


async def _unless_stopped(process: RoleProcess, coming: Coroutine[Any, Any, T]) -> T:
    """What ``coming`` returns.

    Raises:
        StopRequested: the stop flag went up first.
    """
    start, stop = asyncio.create_task(coming), asyncio.create_task(process.watch_stop())
    await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not start.done():
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        raise StopRequested
    return start.result()


def check_sglang(config: Config) -> None:
    """See to it that SGLang can be started, before a run exists.

    Raises:
        ConfigError: generation.python does not run, has no SGLang, or lacks our CPU platform where there is no device.
    """
    interpreter = config.generation.python or sys.executable
    try:
        found = subprocess.run(  # noqa: S603  the interpreter that the person named
            [interpreter, "-c", FINDS_SGLANG], capture_output=True, text=True, timeout=FIND_LIMIT_S, check=False
        )
    except OSError as error:
        raise ConfigError(f"generation.python: {interpreter} cannot be run: {error}; {HOW_TO_INSTALL}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"generation.python: {interpreter} has not said in {FIND_LIMIT_S:g} s which SGLang it has; if it lies on a "
            f"file system that is slow to start with, try again, else {HOW_TO_INSTALL}"
        ) from error
    if found.returncode != 0:
        last = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"generation.python: {interpreter} has no SGLang ({last}); {HOW_TO_INSTALL}")
    version, has_platform = found.stdout.split()
    here = config.cluster.shape is Shape.LOCAL  # elsewhere other nodes, with other devices, run the engines
    if here and has_platform != "True" and accelerator.detect() is accelerator.CPU:
        raise ConfigError(
            f"generation.python: SGLang {version} of {interpreter} cannot run on a CPU without this package beside it; "
            f"{HOW_TO_INSTALL}"
        )
