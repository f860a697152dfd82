"""One SGLang server as a subprocess, from its start to its end.

    async with serving(spec, python=..., log=..., start_s=300) as server:     it has generated a token by then
        server.url; server.alive(); await server.load()

start    ports are reserved first and stay reserved; the key goes by standard input; its output into a log of its own
up       when it has generated a token, within ``start_s``; else the error carries the end of its log
down     SIGINT, and after ``STOP_S`` SIGKILL; its own children die with it. It dies with this process, too.

SGLang looks after itself while it runs: a child that dies takes the server down, and so does a forward pass that hangs,
after its ``watchdog_timeout``. Here ``load`` gives up on a server that does not answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from areal_hpc.collective import bracketed, unbracketed
from areal_hpc.errors import GenerationError
from areal_hpc.generation.connection import Connection, EngineLost
from areal_hpc.generation.counters import counted
from areal_hpc.generation.sglang.arguments import ServerSpec, server_arguments, server_environment
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
DECODED = "sglang:realtime_tokens_total"
FINISHED = "sglang:num_requests_total"
STOP_S = 5.0
END_S = 10.0
"""Longest time from the end of the server to that of its children."""


class SglangServer:
    """A running server; ``serving`` makes it."""

    def __init__(self, spec: ServerSpec, port: int, process: subprocess.Popen[bytes], output: ServerLog) -> None:
        self.url = f"http://{bracketed(spec.host)}:{port}"
        self.pid = process.pid
        self._process, self._output = process, output
        self._http = Connection("sglang", self.url, token=spec.key, connect_s=ANSWER_S)

    def alive(self) -> bool:
        return self._process.poll() is None

    async def load(self) -> Mapping[str, Any]:
        """The version that it serves, sequences running and queued, and the tokens that it has sampled since its start.

        The rate that SGLang tells itself is that of 40 decoding steps, and a pause sets it to 0: with a weight update
        every few seconds it is nearly always 0. What it counts is right at any time: the tokens of decoding steps, and
        an answer's first, which comes from its prompt's pass, once the answer is finished.

        Raises:
            GenerationError: it did not answer, or refused.
        """
        loads, model = await self._get("/v1/loads?include=core"), await self._get("/model_info")
        metrics = await self._get("/metrics")
        ranks = loads["loads"]
        return {
            "version": int(model["weight_version"]),
            "running": sum(rank["num_running_reqs"] for rank in ranks),
            "queued": sum(rank["num_waiting_reqs"] for rank in ranks),
            "tokens": int(counted(metrics, DECODED, mode="decode") + counted(metrics, FINISHED)),
        }

    async def _get(self, path: str) -> Any:
        return self._http.accepted(path, *await self._http.call("GET", path, None, ANSWER_S))

    async def come_up(self, limit_s: float) -> None:
        """Return once it has generated a token.

        Raises:
            GenerationError: it ended, or took too long; with the last lines of its log.
        """
        deadline = time.monotonic() + limit_s
        with waiting("the SGLang server to come up", limit_s=limit_s):
            while not await self._generates():
                if not self.alive():
                    raise self._failure(f"ended with code {self._process.returncode} before it was up")
                if time.monotonic() > deadline:
                    raise self._failure(f"did not come up in {limit_s:g} s; raise limits.start_s if it needs longer")
                await asyncio.sleep(POLL_S)
        self._output.starting = False

    async def _generates(self) -> bool:
        with suppress(EngineLost):  # nobody listens yet, or the first pass compiles kernels
            status, _ = await self._http.call("GET", "/health_generate", None, HEALTH_S)
            return status == 200
        return False

    def _failure(self, what: str) -> GenerationError:
        if not self.alive():
            self._output.join(END_S)
        lines = "\n".join(self._output.last) or "(nothing)"
        return GenerationError(f"the SGLang server {what}. The end of its log {self._output.path}:\n{lines}")

    async def close(self) -> None:
        """End it and all that it started."""
        await self._http.close()
        if self.alive():
            self._process.send_signal(signal.SIGINT)
        try:
            await asyncio.to_thread(self._process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        await asyncio.to_thread(self._output.join, END_S)
        if self._output.is_alive():
            log.warning("processes of the SGLang server %d have outlived it by %g s", self.pid, END_S)


class ServerLog(threading.Thread):
    """Copies what a server and its children print into ``path``, without secrets, until none of them is left.

    SGLang prints all its arguments, its key among them.
    """

    def __init__(self, source: IO[bytes], path: Path) -> None:
        super().__init__(name="sglang-log", daemon=True)
        self.path = path
        self.last = deque[str](maxlen=LAST_LINES)
        self.starting = True  # its lines are progress only until it is up
        self._source = source
        self._file = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def run(self) -> None:
        for line in self._source:
            text = escape(redact(line.decode(errors="replace").rstrip("\r\n")))
            self.last.append(text)
            with suppress(OSError):  # the disk is full: read on, or the server would stop at its next line
                os.write(self._file, text.encode() + b"\n")
            if self.starting:
                advance("lines of the SGLang server's log")
        self._source.close()
        os.close(self._file)


@asynccontextmanager
async def serving(spec: ServerSpec, *, python: str, log: Path, start_s: float) -> AsyncIterator[SglangServer]:
    """A server that is up.

    Args:
        python: interpreter of the environment that SGLang is installed in.
        log: file that gets its output, behind what it has.
        start_s: longest time until it is up.

    Raises:
        GenerationError: see ``SglangServer.come_up``.
    """
    with (
        reserved_port(spec.host) as port,
        reserved_port(spec.host) as internal_port,
        tempfile.TemporaryDirectory(prefix="areal_hpc-") as temporary,
    ):
        process = subprocess.Popen(  # noqa: S603, ASYNC220  our own file, no shell; forking does not block
            [python, str(LAUNCHER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=server_environment(os.environ, spec.accelerator, Path(temporary)),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        output = ServerLog(process.stdout, log)
        output.start()
        server = SglangServer(spec, port, process, output)
        try:
            order = {"parent": os.getpid(), "arguments": server_arguments(spec, port=port, internal_port=internal_port)}
            with suppress(BrokenPipeError):  # it ended at once, and come_up says why
                process.stdin.write(json.dumps(order).encode())
                process.stdin.close()
            await server.come_up(start_s)
            yield server
        finally:
            await server.close()


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
