"""Real SGLang and vLLM servers for tests, where an environment has one: ``examples/..._environment`` makes it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.accelerator import CPU
from areal_hpc.generation.external.process import ServerProcess
from areal_hpc.generation.external.spec import ServerSpec
from areal_hpc.generation.sglang.server import load as load_of_sglang
from areal_hpc.generation.sglang.server import serving as serving_sglang
from areal_hpc.generation.vllm.process import load as load_of_vllm
from areal_hpc.generation.vllm.process import serving as serving_vllm

START_S = 280.0
MAX_TOKENS = 1024
MAX_RUNNING = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RealEngine:
    """One that is installed in an environment of its own, which a variable names."""

    name: str
    serving: Callable[..., AbstractAsyncContextManager[ServerProcess]]
    load: Callable[[ServerProcess], Awaitable[Mapping[str, Any]]]

    @property
    def python(self) -> Path:
        beside = Path(__file__).resolve().parents[1] / f".venv-{self.name}/bin/python"
        return Path(os.environ.get(f"AREAL_HPC_{self.name.upper()}_PYTHON", beside))

    @property
    def needed(self) -> bool:
        """Whether its tests must not be skipped."""
        return bool(os.environ.get(f"AREAL_HPC_NEED_{self.name.upper()}"))

    def unusable(self) -> str:
        """Why there can be none; empty if there can."""
        return "" if self.python.exists() else f"there is no {self.python}; run examples/{self.name}_environment"


SGLANG = RealEngine(name="sglang", serving=serving_sglang, load=load_of_sglang)
VLLM = RealEngine(name="vllm", serving=serving_vllm, load=load_of_vllm)
REAL = (SGLANG, VLLM)


def spec(model: Path, **fields: Any) -> ServerSpec:
    """A server on the CPU, its key "secret"."""
    values: dict[str, Any] = {"dtype": "float32", "max_running": MAX_RUNNING, "max_tokens": MAX_TOKENS, "seed": 1}
    return ServerSpec(model_path=str(model), host="127.0.0.1", key="secret", accelerator=CPU, **(values | fields))


@contextmanager
def served(engine: RealEngine, model: Path, log: Path, **fields: Any) -> Iterator[ServerProcess]:
    """A server of ``model`` that is up, kept by a thread of its own."""
    assert not engine.unusable(), engine.unusable()
    up: Future[ServerProcess] = Future()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def keep() -> None:
        async with engine.serving(spec(model, **fields), python=str(engine.python), log=log, start_s=START_S) as server:
            up.set_result(server)
            await over.wait()

    def run() -> None:
        try:
            loop.run_until_complete(keep())
        except BaseException as error:
            if up.done():
                raise
            up.set_exception(error)

    keeper = threading.Thread(target=run, name=f"keeps-{engine.name}")
    keeper.start()
    try:
        yield up.result(START_S + 20)
    finally:
        loop.call_soon_threadsafe(over.set)
        keeper.join()
        loop.close()
