"""What goes out of a streamed answer, while it is sampled and at its end, well or not.

a call ── tells ──> Progress ── outgoing() ──> bytes, as soon as there is anything new, or silence has lasted
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress

from areal_hpc.dialogue.parts import Parts
from areal_hpc.errors import GenerationError
from areal_hpc.proxy.calls import Call, Told
from areal_hpc.proxy.events import KEEP_ALIVE, Stream
from areal_hpc.proxy.requests import Refused, own_fault

log = logging.getLogger(__name__)


class Progress:
    """What a call has told and its client has not been told yet; of each choice the newest, which has all before it."""

    def __init__(self) -> None:
        self._news: dict[int, Parts] = {}
        self._wake = asyncio.Event()
        self.over = False

    def tell(self, choice: int, parts: Parts) -> None:
        self._news[choice] = parts
        self._wake.set()

    def end(self) -> None:
        self.over = True
        self._wake.set()

    async def wait(self, until: float) -> None:
        """Wait until anything is new, the call has ended, or it is ``until`` on the loop's clock."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._wake.wait()

    def take(self) -> Mapping[int, Parts]:
        """What is new."""
        self._wake.clear()
        news, self._news = self._news, {}
        return news


async def outgoing(
    stream: Stream, call: Call, running: asyncio.Future[list[Told]], progress: Progress, keep_alive_s: float
) -> AsyncGenerator[bytes]:
    """What goes out of a streamed answer, from its beginning to its end, well or not.

    Whatever fails in here, the engine or we, and be it after the commit: its client has half an answer, which must look
    like one, and no reward may count for it. What fails in sending it on does not come by here.
    """
    clock = asyncio.get_running_loop().time
    try:
        told = b"".join(stream.begin()) + _told(stream, progress.take())
        quiet_until = clock() + keep_alive_s
        while not progress.over:
            if not told and clock() >= quiet_until:
                told = KEEP_ALIVE
            if told:
                yield told
                quiet_until = clock() + keep_alive_s
            await progress.wait(quiet_until)
            told = _told(stream, progress.take())
        yield told + b"".join(stream.end(_result(running)))
    except Exception as error:
        yield b"".join(stream.broken(_broken_off(call, error)))


def _told(stream: Stream, news: Mapping[int, Parts]) -> bytes:
    return b"".join(event for choice, parts in news.items() for event in stream.delta(choice, parts))


def _result(running: asyncio.Future[list[Told]]) -> list[Told]:
    """The answer of a call that is over, and raises what it raised."""
    if running.cancelled():  # and not by us, who wait for it
        raise GenerationError("something that the answer waited for was cancelled")
    return running.result()


def _broken_off(call: Call, error: Exception) -> Refused:
    """What a client is told whose answer breaks off; its session is broken from now on."""
    refused = error
    if not isinstance(refused, Refused):
        log.error("an answer in session %s broke off by an error of our own", call.session.id, exc_info=error)
        refused = own_fault(error, "start another session")
    call.session.broken = f"an answer broke off after its beginning had been sent: {refused}"
    return refused
