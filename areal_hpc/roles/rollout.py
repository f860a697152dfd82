"""The rollout worker: prompts in, sealed groups out, on CPU, until it is told to stop."""

from __future__ import annotations

import asyncio

from areal_hpc.exits import EXIT_STOPPED
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.episodes import make_rollout


def main(process: RoleProcess) -> int:
    asyncio.run(_roll(process))
    return EXIT_STOPPED


async def _roll(process: RoleProcess) -> None:
    async with make_rollout(process) as runner:
        process.starting.close()
        stop = asyncio.Event()
        watcher = asyncio.create_task(process.watch_stop())
        watcher.add_done_callback(lambda _: stop.set())
        await runner.run(stop)
        watcher.cancel()
