"""What every role process has: its place in the run, a stop flag that signals only raise, records, and an endpoint.

A role is told what it is on its command line (``python -m areal_hpc.roles trainer 0 RUN_DIR EPOCH``); it never guesses.
Exit codes: 0 done, 75 stopped on request (EX_TEMPFAIL: start me again), anything else is a failure.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.config.load import load
from areal_hpc.config.schema import Config
from areal_hpc.fs import AttemptDir, RunDir, publish_json, read_if_listed, wait_for
from areal_hpc.telemetry import Recorder, add_secret, setup_logging

EXIT_DONE = 0
EXIT_STOPPED = 75
PR_SET_PDEATHSIG = 1


@dataclass(slots=True, kw_only=True)
class RoleProcess:
    """One process of a run, seen from inside."""

    role: str
    index: int
    run: RunDir
    epoch: int
    config: Config
    token: str
    recorder: Recorder
    stop_flag: threading.Event = field(default_factory=threading.Event)

    @property
    def attempt(self) -> AttemptDir:
        return self.run.attempt(self.epoch)

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    def stopping(self) -> bool:
        return self.stop_flag.is_set()

    def publish_endpoint(self, record: Mapping[str, Any]) -> None:
        """Say where this process can be reached; readers find the file by listing."""
        publish_json(self.attempt.endpoint(self.role, self.index), {"epoch": self.epoch, "pid": os.getpid(), **record})

    def endpoint_of(self, role: str, index: int) -> dict[str, Any]:
        """Where another process of this attempt can be reached, waiting for it to come up.

        Raises:
            WaitTimeout: it did not within ``limits.start_s``; its log says why.
        """
        record: dict[str, Any] = wait_for(
            f"{role}-{index} to come up",
            lambda: self._unless_stopped(self.attempt.endpoint(role, index)),
            self.config.limits.start_s,
            hint=f"look into {self.attempt.log(role, index)}",
        )
        return record

    def _unless_stopped(self, path: Path) -> Any | None:
        if self.stopping():
            raise StopRequested
        return read_if_listed(path)

    async def watch_stop(self, poll_s: float = 0.05) -> None:
        """Return when the stop flag is up."""
        while not self.stopping():  # noqa: ASYNC110  the flag is raised by a signal handler, which must not touch the loop
            await asyncio.sleep(poll_s)


class StopRequested(Exception):
    """A stop request arrived while this process was still coming up."""


def enter(role: str, index: int, root: Path, epoch: int) -> RoleProcess:
    """Become a role: logging, signals, configuration, records."""
    run = RunDir.open(root)
    stop_flag = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_flag.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    setup_logging(role, index)
    token = run.token.read_text(encoding="ascii")
    add_secret(token)
    config = load([run.config], [])
    recorder = Recorder(run.attempt(epoch).records(role, index), role=role, index=index, epoch=epoch)
    return RoleProcess(
        role=role, index=index, run=run, epoch=epoch, config=config, token=token, recorder=recorder, stop_flag=stop_flag
    )


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM when the launcher dies, however it dies (prctl(2)); a no-op off Linux."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
