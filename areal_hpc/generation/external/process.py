"""A server as a subprocess, from its start to its end, whichever engine it is.

start    ports are reserved first and stay reserved; the key goes by standard input; its output into a log of its own
up       when it has generated a token, within ``start_s``; else the error carries the end of its log
down     SIGINT, and after ``STOP_S`` SIGKILL; its own children die with it. It dies with this process, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from areal_hpc.collective import bracketed, unbracketed
from areal_hpc.errors import ArealError, ConfigError, GenerationError
from areal_hpc.exits import EXIT_USER_ERROR
from areal_hpc.generation.connection import Connection, EngineLost
from areal_hpc.generation.external.launch import UNFIT
from areal_hpc.privacy import open_private
from areal_hpc.telemetry.logs import escape, redact
from areal_hpc.waits import advance, waiting

log = logging.getLogger(__name__)

LAUNCHER = Path(__file__).with_name("launch.py")
LAST_LINES = 25
POLL_S = 0.5
HEALTH_S = 30.0
"""Longest time of one look at its health: SGLang itself gives up on its one token after 20 s."""
ANSWER_S = 60.0
"""A running server whose HTTP side does not answer for so long is given up; it is a process apart from the model's."""
STOP_S = 5.0
END_S = 10.0
"""Longest time from the end of the server to that of its children."""


class ServerProcess:
    """A running server of the ``engine`` of that name; ``started`` makes it."""

    def __init__(self, engine: str, url: str, key: str, process: subprocess.Popen[bytes], output: ServerLog) -> None:
        self.url = url
        self.pid = process.pid
        self._engine, self._process, self._output = engine, process, output
        self._http = Connection(engine, url, token=key, connect_s=ANSWER_S)

    def alive(self) -> bool:
        return self._process.poll() is None

    async def death(self) -> ArealError:
        """Why it has ended, or does not answer, by the end of its log: a ConfigError if that says what a person has to
        change. Waits a little for one that is about to end."""
        if not await self._ends(END_S):
            return await self._failure("does not answer")
        died = await self._failure(f"has ended with code {self._process.returncode}")
        told = [line for line in self._output.last if line.startswith(UNFIT)]
        unfit = self._process.returncode == EXIT_USER_ERROR and bool(told)
        return ConfigError(told[-1].removeprefix(UNFIT)) if unfit else died

    async def get(self, path: str) -> Any:
        """What the server answers.

        Raises:
            GenerationError: it did not answer, or refused.
        """
        return self._http.accepted(path, *await self._http.call("GET", path, None, ANSWER_S))

    async def come_up(self, limit_s: float) -> None:
        """Return once it has generated a token.

        Raises:
            GenerationError: it ended, or took too long; with the last lines of its log.
        """
        deadline = time.monotonic() + limit_s
        with waiting(f"the {self._engine} server to come up", limit_s=limit_s):
            while not await self._generates():
                if not self.alive():
                    raise await self._failure(f"ended with code {self._process.returncode} before it was up")
                if time.monotonic() > deadline:
                    raise await self._failure(
                        f"did not come up in {limit_s:g} s; raise limits.start_s if it needs longer"
                    )
                await asyncio.sleep(POLL_S)
        self._output.starting = False

    async def _generates(self) -> bool:
        with suppress(EngineLost):  # nobody listens yet, or the first pass compiles kernels
            status, _ = await self._http.call("GET", "/health_generate", None, HEALTH_S)
            return status == 200
        return False

    async def _failure(self, what: str) -> GenerationError:
        if not self.alive():
            await asyncio.to_thread(self._output.join, END_S)
        lines = "\n".join(self._output.last) or "(nothing)"
        return GenerationError(f"the {self._engine} server {what}. The end of its log {self._output.path}:\n{lines}")

    async def close(self) -> None:
        """End it and all that it started, as far as that can be ended: what hangs in a device's driver cannot."""
        await self._http.close()
        if self.alive():
            self._process.send_signal(signal.SIGINT)
        if not await self._ends(STOP_S):
            self._process.kill()
            if not await self._ends(END_S):
                log.critical(
                    "the %s server %d was killed and has not ended in %g s: it hangs in the kernel, in a call to a "
                    "device or a file system that does not answer; until then its device is not free",
                    self._engine,
                    self.pid,
                    END_S,
                )
        await asyncio.to_thread(self._output.join, END_S)
        if self._output.is_alive():
            log.warning("processes of the %s server %d have outlived it by %g s", self._engine, self.pid, END_S)

    async def _ends(self, limit_s: float) -> bool:
        """Whether it ends within that time."""
        try:
            await asyncio.to_thread(self._process.wait, limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True


class ServerLog(threading.Thread):
    """Copies what a server and its children print into ``path``, without secrets, until none of them is left.

    Engines print all their arguments, their key among them.
    """

    def __init__(self, engine: str, source: IO[bytes], path: Path) -> None:
        super().__init__(name=f"{engine}-log", daemon=True)
        self.path = path
        self.last = deque[str](maxlen=LAST_LINES)
        self.starting = True  # its lines are progress only until it is up
        self._engine, self._source = engine, source
        self._file = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def run(self) -> None:
        for line in self._source:
            text = escape(redact(line.decode(errors="replace").rstrip("\r\n")))
            self.last.append(text)
            with suppress(OSError):  # the disk is full: read on, or the server would stop at its next line
                os.write(self._file, text.encode() + b"\n")
            if self.starting:
                advance(f"lines of the {self._engine} server's log")
        self._source.close()
        os.close(self._file)


@asynccontextmanager
async def started(
    engine: str,
    *,
    python: str,
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    url: str,
    key: str,
    log: Path,
    start_s: float,
) -> AsyncIterator[ServerProcess]:
    """A server that is up.

    Args:
        engine: its name, for messages.
        python: interpreter of the environment that the engine is installed in.
        module: run there as a program, with ``arguments``.
        url: where it will listen.
        key: what it asks of requests.
        log: file that gets its output, behind what it has.
        start_s: longest time until it is up.

    Raises:
        GenerationError: see ``ServerProcess.come_up``.
    """
    process = subprocess.Popen(  # noqa: S603, ASYNC220  our own file, no shell; forking does not block
        [python, str(LAUNCHER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    output = ServerLog(engine, process.stdout, log)
    output.start()
    server = ServerProcess(engine, url, key, process, output)
    try:
        order = {"parent": os.getpid(), "module": module, "arguments": list(arguments)}
        with suppress(BrokenPipeError):  # it ended at once, and come_up says why
            process.stdin.write(json.dumps(order).encode())
            process.stdin.close()
        await server.come_up(start_s)
        yield server
    finally:
        await server.close()


def url_of(host: str, port: int) -> str:
    return f"http://{bracketed(host)}:{port}"


@contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """A port that the kernel chose and gives to nobody else as long as this lasts, yet that a server may listen on.

    Two sockets may be bound to one port on Linux if both say SO_REUSEADDR and at most one listens.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((unbracketed(host), 0))
        yield reservation.getsockname()[1]
