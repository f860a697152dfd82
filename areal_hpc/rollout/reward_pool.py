"""Rewards in processes of their own, each behind a hard time limit.

    score ── a seat (waits in line) ── its worker, loaded ── the call (the limit counts from here)
                                                               │
      a finite number: returned, the worker keeps its seat ────┤
      raised, hung, died, no number: RewardError, the worker ──┘
      is killed, and the seat's next call starts another

A reward is a stranger's code on a model's text: it may loop in C, ignore signals, fork, exit, exhaust memory, print
anything. So a worker that failed a call is not trusted with another: its process group gets SIGKILL, which also ends
what the reward started (save what made itself a session of its own: a model's code belongs into a sandbox). Idle
workers block in a read; when this process ends in whatever way, the kernel kills them (see ``reward_worker``).
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from areal_hpc.errors import ConfigError, RewardError, RewardRaised
from areal_hpc.exits import signal_name
from areal_hpc.rollout.reward_worker import LENGTH
from areal_hpc.types import Prompt
from areal_hpc.waits import REWARD_PROCESS, waiting

LOAD_LIMIT_S = 120.0
"""Longest time from the start of a process to a loaded reward: imports may come from a cold network file system."""
REAP_LIMIT_S = 1.0
"""Longest wait for a killed process to be gone; one that the kernel holds longer is reaped later."""
LONGEST_ANSWER = 1 << 16


class _WorkerEnded(Exception):
    """The worker closed its channel, or wrote something that is no answer."""


class _Worker:
    """One process, from its start to its kill."""

    def __init__(self, reward: str) -> None:
        self._in_doubt = True  # until it is connected, and from a call's start to its good end
        self._loaded = False
        self._calls = 0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._channel, theirs = socket.socketpair()
        their_lifeline, self._lifeline = os.pipe()
        passed = (theirs.fileno(), their_lifeline)
        try:
            self.process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                [sys.executable, "-P", "-u", "-m", "areal_hpc.rollout.reward_worker", reward, *map(str, passed)],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,
                env={
                    "OMP_NUM_THREADS": "1",
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
                },
            )
        finally:
            theirs.close()
            os.close(their_lifeline)

    async def load(self) -> None:
        """Wait until the reward is loaded; may be cancelled and called again.

        Raises:
            ConfigError: the reward cannot be loaded.
            RewardError, _WorkerEnded: the process did not come up.
        """
        if self._streams is None:
            self._channel.setblocking(False)
            self._streams = await asyncio.open_unix_connection(sock=self._channel)
            self._in_doubt = False
        if self._loaded:
            return
        try:
            with waiting("the reward to be loaded", REWARD_PROCESS, limit_s=LOAD_LIMIT_S):
                async with asyncio.timeout(LOAD_LIMIT_S):
                    answer = await self._answer()
        except TimeoutError:
            raise RewardError(f"its process did not load it in {LOAD_LIMIT_S:g} s") from None
        if "error" in answer:
            where = f"whose module lies in {Path.cwd()} or on PYTHONPATH, or to a reward model's directory"
            advice = "" if answer.get("advised") else f"; set `rollout.reward` to a module:function {where}"
            raise ConfigError(f"cannot be loaded: {answer['error']}{advice}")
        self._loaded = True

    async def call(self, text: str, prompt: Prompt) -> float:
        """The reward of one text. A worker whose call did not return, also for a cancellation, is in doubt.

        Raises:
            RewardRaised: the reward raised, or returned no finite number.
            _WorkerEnded: there will be no answer.
        """
        assert self._streams is not None and not self._in_doubt
        self._calls += 1
        body = pickle.dumps((self._calls, text, prompt.answer, prompt))
        self._in_doubt = True
        self._streams[1].write(LENGTH.pack(len(body)) + body)
        answer = await self._answer()
        if answer.get("call") != self._calls:
            raise _WorkerEnded
        self._in_doubt = not answer.get("well", True)  # an ordinary exception leaves the process as well as it was
        if "error" in answer:
            raise RewardRaised(answer["error"])
        return float(answer["reward"])

    async def _answer(self) -> dict[str, Any]:
        assert self._streams is not None
        reader = self._streams[0]
        try:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            if length > LONGEST_ANSWER:
                raise _WorkerEnded
            answer = json.loads(await reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            raise _WorkerEnded from None
        if not isinstance(answer, dict):
            raise _WorkerEnded
        return answer

    def kill(self) -> None:
        """SIGKILL to its process group; once."""
        if self._lifeline < 0:
            return
        os.killpg(self.process.pid, signal.SIGKILL)  # not yet reaped, so the number is still its own
        os.close(self._lifeline)
        self._lifeline = -1
        if self._streams is not None:
            self._streams[1].transport.abort()
        self._channel.close()

    def is_usable(self) -> bool:
        """Whether another call may be given to it."""
        return self._lifeline >= 0 and not self._in_doubt

    def is_gone(self) -> bool:
        """Whether it was killed and has ended."""
        return self._lifeline < 0 and self.process.poll() is not None

    async def ending(self) -> str:
        """Kill, wait a bounded time until it is gone, and say how it ended."""
        self.kill()
        deadline = time.monotonic() + REAP_LIMIT_S
        while (code := self.process.poll()) is None and time.monotonic() < deadline:  # noqa: ASYNC110 (no event tells it)
            await asyncio.sleep(0.005)
        if code is None or code >= 0:
            return f"its process ended with exit code {code}"
        return f"its process was ended by {signal_name(-code)}"


class RewardPool:
    """``reward = await pool.score(text, prompt)`` from any number of tasks of one event loop.

    Args:
        reward: dotted path ``module:name`` of a callable ``f(text, answer, prompt)``; any callable object will do.
        workers: processes, each computing one reward at a time.
        timeout_s: limit of one call, from the moment a worker begins it.
    """

    def __init__(self, reward: str, *, workers: int, timeout_s: float) -> None:
        self._reward = reward
        self._timeout_s = timeout_s
        self._num_workers = workers
        self._closed = False
        self._workers: set[_Worker] = set()  # every process that is not reaped yet
        self._seats: asyncio.LifoQueue[_Worker | None] = asyncio.LifoQueue()  # a busy seat is not in the queue
        for _ in range(workers):
            self._seats.put_nowait(None)

    async def start(self) -> None:
        """Start and load every worker now rather than at the first calls.

        Raises:
            ConfigError: the reward cannot be loaded.
            RewardError: a process did not come up.
        """
        await asyncio.gather(*(self._load_one() for _ in range(self._num_workers)))

    async def _load_one(self) -> None:
        async with self._seat("") as worker:
            await worker.load()

    async def score(self, text: str, prompt: Prompt) -> float:
        """The reward of ``text`` as an answer to ``prompt``, a finite number.

        Raises:
            RewardError: the reward raised, hung, died or returned no finite number; names it and says which.
            ConfigError: the reward cannot be loaded.
        """
        async with self._seat(f" on prompt {prompt.id!r}") as worker:
            await worker.load()
            try:
                with waiting("a reward", REWARD_PROCESS, limit_s=self._timeout_s, about=f"of prompt {prompt.id!r}"):
                    async with asyncio.timeout(self._timeout_s):
                        return await worker.call(text, prompt)
            except TimeoutError:
                raise RewardError(f"did not return in {self._timeout_s:g} s and was killed") from None

    @asynccontextmanager
    async def _seat(self, about: str) -> AsyncIterator[_Worker]:
        """A worker for one use, started where the seat is empty; the seat goes back always, empty after a fault."""
        with waiting("its turn", REWARD_PROCESS, limit_s=None):
            worker = await self._seats.get()
        try:
            worker = self._seated(worker)
            yield worker
        except _WorkerEnded:
            assert worker is not None
            raise RewardError(f"reward {self._reward!r}{about}: {await worker.ending()}") from None
        except (RewardError, ConfigError) as error:
            if worker is not None and not isinstance(error, RewardRaised):
                worker.kill()
            raise type(error)(f"reward {self._reward!r}{about}: {error}") from None
        finally:
            if worker is not None and not worker.is_usable():
                worker.kill()
                worker = None
            self._seats.put_nowait(worker)

    def _seated(self, worker: _Worker | None) -> _Worker:
        if self._closed:
            raise RewardError("its pool is closed")
        if worker is None:
            worker = _Worker(self._reward)
            self._workers = {other for other in self._workers if not other.is_gone()} | {worker}
        return worker

    async def close(self) -> None:
        """End every process, also those in the middle of a call (which raises RewardError)."""
        self._closed = True
        await asyncio.gather(*(worker.ending() for worker in self._workers))
        self._workers.clear()
