"""The generator: one engine replica behind its HTTP surface, until it is told to stop.

It owns the KV cache and the current weights. It serves from the first second, but nobody asks before the trainer has
brought it to the run's weight version: rollout workers get no ticket until then.

One that has joined a run has a seat. It leaves it before it ends, so that nobody asks it any more, and then lets what
it has begun come to its end, for as long as a stop may take.
"""

from __future__ import annotations

import asyncio
import logging
import time

from areal_hpc.errors import GenerationError
from areal_hpc.exits import EXIT_STOPPED
from areal_hpc.liveness.given_up import why_given_up
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.serving import ServedEngine, serve_engine
from areal_hpc.telemetry import RecordReader

log = logging.getLogger(__name__)

REPORT_S = 1.0
NOTICE_S = 1.5
"""How long all who ask may take to notice that a seat was left: they look once a second."""
END_S = 2.5
"""What the end of the engine itself may take of ``limits.stop_s``."""
POLL_S = 0.1
LAST_BYTES = 1 << 12
"""Enough of an engine's records for one of them."""


def main(process: RoleProcess) -> int:
    asyncio.run(_serve(process))
    return EXIT_STOPPED


async def _serve(process: RoleProcess) -> None:
    """Serve, and record the load once a second, until a stop is asked for or somebody has given this engine's seat up.

    ``busy_s`` and ``up_s`` go on from those of the processes that were this engine before, so the last record alone
    tells how long the engine was at work in a run of weeks.

    Raises:
        GenerationError: the engine has ended, or it does not answer, or the trainer has given it up.
        ConfigError: it has ended because of what a person has to change.
    """
    async with serve_engine(process) as engine:
        process.publish_endpoint({"url": engine.url})
        if process.seat is not None:
            process.seat.come_up()
        process.starting.close()
        stop = asyncio.create_task(process.watch_stop())
        looked = time.monotonic()
        busy_s, up_s = await asyncio.to_thread(_times_so_far, process)
        while not stop.done():
            await asyncio.wait([stop], timeout=REPORT_S)
            if why := await asyncio.to_thread(why_given_up, process.attempt, process.name, process.incarnation):
                raise GenerationError(f"{process.name} is given up: {why}")
            if not engine.alive():
                raise await engine.death()
            try:
                load = await engine.load()
            except GenerationError as error:  # it is about to end, more often than not, and says why
                raise await engine.death() from error
            before, looked = looked, time.monotonic()
            up_s += looked - before
            busy_s += looked - before if load["running"] else 0.0
            process.recorder.record("generation", {**load, "busy_s": busy_s, "up_s": up_s})
            if process.seat is not None and not await asyncio.to_thread(process.seat.is_held):
                log.warning("the run has given %s up: nothing was heard of it for too long", process.name)
                break
        if process.seat is not None:
            process.seat.leave()
            await _finish(engine, process.config.limits.stop_s - END_S)
        stop.cancel()


def _times_so_far(process: RoleProcess) -> tuple[float, float]:
    """``busy_s`` and ``up_s`` of the processes that were this engine before in the attempt."""
    last = None
    if process.incarnation:
        records = RecordReader(process.attempt.telemetry, (process.role,), last_bytes=LAST_BYTES).poll()
        last = next((one for one in reversed(list(records)) if one.index == process.index and one.number("up_s")), None)
    return (0.0, 0.0) if last is None else (last.number("busy_s") or 0.0, last.number("up_s") or 0.0)


async def _finish(engine: ServedEngine, limit_s: float) -> None:
    """Let the requests that run come to their end."""
    deadline = time.monotonic() + limit_s
    await asyncio.sleep(max(0.0, min(NOTICE_S, limit_s)))
    while time.monotonic() < deadline and engine.alive():
        load = await engine.load()
        if not load["running"] + load["queued"]:
            return
        await asyncio.sleep(POLL_S)
