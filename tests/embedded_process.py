"""Embedded engines in processes of their own, as a run has them: for tests that need a real engine, or kill one."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

MAX_RUNNING = 8


def _serve(model: Path, dtype: str, pipe: Connection) -> None:
    import torch

    from areal_hpc.generation.embedded.engine import EmbeddedEngine
    from areal_hpc.generation.embedded.server import start_server

    torch.set_num_threads(1)

    async def forever() -> None:
        engine = EmbeddedEngine(model, dtype=dtype, max_running=MAX_RUNNING, max_tokens=1024, seed=1)
        engine.start()
        url, _ = await start_server(engine, token="secret")
        pipe.send(url)
        await asyncio.sleep(3600)

    asyncio.run(forever())


@contextmanager
def embedded(model: Path, num: int = 1, dtype: str = "float32") -> Iterator[list[str]]:
    """``num`` engines that serve ``model``; yields their URLs. The token is "secret"."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(num)]
    processes = [spawn.Process(target=_serve, args=(model, dtype, theirs), daemon=True) for _, theirs in pipes]
    for process in processes:
        process.start()
    try:
        for ours, _ in pipes:
            assert ours.poll(120), "an engine did not come up"
        yield [ours.recv() for ours, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
