"""Plain functions of strangers, each in a thread of its own: nobody can end one that hangs, so it must hold nobody up.

    work ── a place among MAX_AT_ONCE ── its thread ── its value, or what it raised
                                            └── cancelled: the place is free, and the thread is left to itself

A pool would not do: what hangs keeps its threads, and Python waits for all of them when the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from areal_hpc.errors import AgentError

log = logging.getLogger(__name__)

MAX_AT_ONCE = 1024
"""Agents that are no coroutines wait for the engine nearly all the time."""
MAX_GIVEN_UP = 1024
"""Threads that are left to themselves and have not ended: each keeps its stack, and what its agent has open."""

T = TypeVar("T")


class Threads:
    """``value = await threads.run(work)``

    Args:
        name: of the work, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name, self._places = name, asyncio.Semaphore(MAX_AT_ONCE)
        self._given_up: list[threading.Thread] = []
        self._said = False

    async def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises. Whoever cancels this leaves it to itself.

        Raises:
            AgentError: too much is left to itself already.
        """
        self._look()
        async with self._places:
            outcome = Future[T]()
            outcome.set_running_or_notify_cancel()  # from now on a cancellation of the wait is none of the work
            thread = threading.Thread(target=_tell, args=(work, outcome), name="agent", daemon=True)
            thread.start()
            try:
                return await asyncio.wrap_future(outcome)
            except asyncio.CancelledError:
                self._given_up.append(thread)
                raise

    def _look(self) -> None:
        """Say once that there are threads which go on, and raise AgentError where there are too many."""
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        if not self._given_up:
            return
        text = (
            f"{len(self._given_up)} episodes that were given up still run, each in a thread of this process that "
            f"nothing can end: {self._name} hangs. Give whatever it calls a time limit of its own, make it a "
            "coroutine, or use `agent.command`, whose processes are ended"
        )
        if len(self._given_up) >= MAX_GIVEN_UP:
            raise AgentError(text)
        if not self._said:
            self._said = True
            log.warning("%s", text)


def _tell(work: Callable[[], T], outcome: Future[T]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:  # as a pool does: whoever waits is to see it, whatever it is
        outcome.set_exception(error)
