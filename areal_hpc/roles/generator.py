"""The generator: one engine replica behind its HTTP surface, until it is told to stop.

It owns the KV cache and the current weights. It serves from the first second, but nobody asks before the trainer has
brought it to the run's weight version: rollout workers get no ticket until then.
"""

from __future__ import annotations

import asyncio
import time

from areal_hpc.errors import GenerationError
from areal_hpc.exits import EXIT_STOPPED
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.serving import serve_engine

REPORT_S = 1.0


def main(process: RoleProcess) -> int:
    asyncio.run(_serve(process))
    return EXIT_STOPPED


async def _serve(process: RoleProcess) -> None:
    """Serve, and record the load once a second: so of a run of weeks the last line tells how long it was at work.

    Raises:
        GenerationError: the engine has ended, or it does not answer.
    """
    async with serve_engine(process) as engine:
        process.publish_endpoint({"url": engine.url})
        process.starting.close()
        stop = asyncio.create_task(process.watch_stop())
        began = looked = time.monotonic()
        busy_s = 0.0
        while not stop.done():
            await asyncio.wait([stop], timeout=REPORT_S)
            if not engine.alive():
                raise GenerationError(f"the engine of {process.name} has ended; see the log above")
            load = await engine.load()
            before, looked = looked, time.monotonic()
            busy_s += looked - before if load["running"] else 0.0
            process.recorder.record("generation", {**load, "busy_s": busy_s, "up_s": looked - began})
