"""The generator: one engine replica behind its HTTP surface, until it is told to stop.

It owns the KV cache and the current weights. It serves from the first second, but nobody asks before the trainer has
brought it to the run's weight version: rollout workers get no ticket until then.
"""

from __future__ import annotations

import asyncio

from areal_hpc.roles.process import EXIT_STOPPED, RoleProcess
from areal_hpc.roles.wiring import make_engine

REPORT_S = 1.0


def main(process: RoleProcess) -> int:
    asyncio.run(_serve(process))
    return EXIT_STOPPED


async def _serve(process: RoleProcess) -> None:
    engine = make_engine(process)
    url = await engine.start()
    process.publish_endpoint({"url": url})
    stop = asyncio.create_task(process.watch_stop())
    generated = 0
    try:
        while not stop.done():
            await asyncio.wait([stop], timeout=REPORT_S)
            engine.check()
            load = engine.load()
            tokens = load["tokens"]
            process.recorder.record("generation", {**load, "tokens_per_s": (tokens - generated) / REPORT_S})
            generated = tokens
    finally:
        stop.cancel()
        await engine.close()
