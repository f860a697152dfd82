"""An engine on several nodes: its launch, who watches over it, and the share of a node that has no generator.

The generator (``serving.py``) leads a launch; each part joins it. All of them watch it while they start and while they
serve, and the first that has to end takes the others along.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

from areal_hpc.cluster.components import engine_of_part, nodes_of_engine
from areal_hpc.collective import bracketed
from areal_hpc.errors import GenerationError
from areal_hpc.roles.launches import Launch, begin, newest
from areal_hpc.roles.process import RoleProcess, StopRequested
from areal_hpc.roles.wiring.servers import started_server
from areal_hpc.waits import waiting

log = logging.getLogger(__name__)

LOOK_S = 1.0
T = TypeVar("T")


@contextmanager
def led(process: RoleProcess) -> Iterator[Launch | None]:
    """A launch of this generator's engine, over when this ends; None where it is whole on this node."""
    if nodes_of_engine(process.config) == 1:
        yield None
        return
    from areal_hpc.generation.external.process import reserved_port

    with reserved_port(process.host) as port:
        launch = begin(process.attempt, process.index, process.incarnation, f"{bracketed(process.host)}:{port}")
        try:
            yield launch
        finally:
            launch.end(ended(process))


def ended(process: RoleProcess) -> str:
    """Why a launch is over that this process was in."""
    return f"{process.name} on {process.host} has ended"


@contextmanager
def watching(launch: Launch | None) -> Iterator[asyncio.Task[str]]:
    """A task that ends when the launch is over, with the reason."""
    watch = asyncio.create_task(_until_over(launch))
    try:
        yield watch
    finally:
        watch.cancel()


async def _until_over(launch: Launch | None) -> str:
    if launch is None:
        await asyncio.Event().wait()
    assert launch is not None
    while not (why := await asyncio.to_thread(launch.why_over)):  # noqa: ASYNC110  other processes say it, in files
        await asyncio.sleep(LOOK_S)
    log.warning("the engine of generator-%d ends on all of its nodes: %s", launch.engine, why)
    return why


async def unless_stopped(process: RoleProcess, over: asyncio.Task[str], coming: Coroutine[Any, Any, T]) -> T:
    """What ``coming`` returns.

    Raises:
        StopRequested: the stop flag went up first.
        GenerationError: the launch was over first.
    """
    start, stop = asyncio.create_task(coming), asyncio.create_task(process.watch_stop())
    await asyncio.wait({start, stop, over}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if start.done():
        return start.result()
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    if over.done():
        raise GenerationError(f"the engine of {process.name} did not come up: {over.result()}")
    raise StopRequested


async def hold_shares(process: RoleProcess) -> None:
    """This part's shares of its engine, one launch after the other, until this process is told to stop.

    Raises:
        StopRequested: it was told while a share came up.
        OSError: it cannot see whether a launch is over.
    """
    stop = asyncio.create_task(process.watch_stop())
    engine, _ = engine_of_part(process.config, process.index)
    last = None
    while not stop.done():
        with waiting(f"generator-{engine} to start its engine", f"generator-{engine}", limit_s=None):
            while (launch := await asyncio.to_thread(newest, process.attempt, engine)) in (None, last):
                await asyncio.wait([stop], timeout=LOOK_S)
                if stop.done():
                    return
        assert launch is not None
        last = launch
        if launch.join(process.name):
            await _hold(process, launch, stop)
        else:
            launch.end(ended(process))  # this is the process that has replaced it


async def _hold(process: RoleProcess, launch: Launch, stop: asyncio.Task[None]) -> None:
    """This node's share, from its start to the launch's end."""
    why = ended(process)
    try:
        async with AsyncExitStack() as stack:
            over = stack.enter_context(watching(launch))
            coming = stack.enter_async_context(started_server(process, launch))
            server, _ = await unless_stopped(process, over, coming)
            while server.alive() and not over.done() and not stop.done():
                await asyncio.wait([over, stop], timeout=LOOK_S)
            if over.done():
                over.result()
            if not server.alive():
                why = f"the server of {process.name} on {process.host} has ended; see its log"
    except GenerationError as error:
        log.warning("%s", error)
        why = f"the server of {process.name} on {process.host} did not come up; see its log"
    finally:
        launch.end(why)
