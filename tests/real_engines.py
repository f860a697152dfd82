"""Real SGLang servers for tests, where an environment has one: ``examples/sglang_environment`` makes it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal_hpc.accelerator import CPU
from areal_hpc.generation.sglang.arguments import ServerSpec
from areal_hpc.generation.sglang.server import SglangServer, serving

PYTHON = Path(
    os.environ.get("AREAL_HPC_SGLANG_PYTHON", Path(__file__).resolve().parents[1] / ".venv-sglang/bin/python")
)
START_S = 280.0
MAX_TOKENS = 1024
MAX_RUNNING = 8


def unusable() -> str:
    """Why there can be none; empty if there can."""
    return "" if PYTHON.exists() else f"there is no {PYTHON}; run examples/sglang_environment"


def spec(model: Path, **fields: Any) -> ServerSpec:
    """A server on the CPU, its key "secret"."""
    values: dict[str, Any] = {"dtype": "float32", "max_running": MAX_RUNNING, "max_tokens": MAX_TOKENS, "seed": 1}
    return ServerSpec(model_path=str(model), host="127.0.0.1", key="secret", accelerator=CPU, **(values | fields))


@contextmanager
def served(model: Path, log: Path) -> Iterator[SglangServer]:
    """A server of ``model`` that is up, kept by a thread of its own."""
    assert not unusable(), unusable()
    up: Future[SglangServer] = Future()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def keep() -> None:
        async with serving(spec(model), python=str(PYTHON), log=log, start_s=START_S) as server:
            up.set_result(server)
            await over.wait()

    def run() -> None:
        try:
            loop.run_until_complete(keep())
        except BaseException as error:
            if up.done():
                raise
            up.set_exception(error)

    keeper = threading.Thread(target=run, name="keeps-sglang")
    keeper.start()
    try:
        yield up.result(START_S + 20)
    finally:
        loop.call_soon_threadsafe(over.set)
        keeper.join()
        loop.close()
