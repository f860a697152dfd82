"""What every role process has: its place in the run, a stop flag that signals only raise, records, and an endpoint.

A role is told what it is on its command line (``python -m areal_hpc.roles trainer 0 RUN_DIR EPOCH INCARNATION PARENT
HOST``); it never guesses. The incarnation counts the processes that were this role in this attempt before it, the
parent is the pid of whoever started it, the host this machine's address for the others.
Its exit code is one of ``exits``: done, stopped on request, a mistake that the person can mend (its one line is in the
log); anything else is a failure.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from areal_hpc.cluster.local import LOOPBACK
from areal_hpc.cluster.owner import start_ticks
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config
from areal_hpc.exits import EXIT_FAILED
from areal_hpc.fs import publish_json, read_if_listed, wait_for
from areal_hpc.keys import read_key
from areal_hpc.liveness.heartbeat import read_heartbeat
from areal_hpc.liveness.seats import Seat
from areal_hpc.liveness.stacks import Stacks
from areal_hpc.run_dir import AttemptDir, RunDir
from areal_hpc.telemetry import Recorder, add_secret, setup_logging
from areal_hpc.waits import advance, published, waiting

log = logging.getLogger(__name__)

POLL_S = 0.25


@dataclass(slots=True, kw_only=True)
class RoleProcess:
    """One process of a run, seen from inside."""

    role: str
    index: int
    run: RunDir
    epoch: int
    incarnation: int = 0
    host: str = LOOPBACK
    """Address under which the run's other processes reach this one."""
    config: Config
    token: str
    recorder: Recorder
    stop_flag: threading.Event = field(default_factory=threading.Event)
    stacks: Stacks | None = None
    """Shows on request what this process is doing; None only in tests."""
    starting: ExitStack = field(default_factory=ExitStack)
    """The wait for this process to come up; its role closes it when it has what it works with."""

    @property
    def attempt(self) -> AttemptDir:
        return self.run.attempt(self.epoch)

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def seat(self) -> Seat | None:
        """The seat of an engine that has joined the run; None for a process that the run has started itself."""
        if self.role != "generator" or self.index < self.config.generation.replicas:
            return None
        return Seat(attempt=self.attempt, index=self.index, incarnation=self.incarnation)

    def state(self) -> Mapping[str, Any]:
        """What each heartbeat tells; whoever asked for the stacks of this process gets them by the way."""
        if self.stacks is not None:
            self.stacks.answer()
        return published()

    def stopping(self) -> bool:
        return self.stop_flag.is_set()

    def publish_endpoint(self, record: Mapping[str, Any]) -> None:
        """Say where this process can be reached; readers find the file by listing."""
        identity = {"host": self.host, "epoch": self.epoch, "incarnation": self.incarnation, "pid": os.getpid()}
        publish_json(self.attempt.endpoint(self.role, self.index), {**identity, **record})

    def endpoint_of(self, role: str, index: int) -> dict[str, Any]:
        """Where another process of this attempt can be reached, waiting for it to come up.

        Raises:
            WaitTimeout: it did not within ``limits.start_s``; its log says why.
        """
        record: dict[str, Any] = wait_for(
            f"{role}-{index} to come up",
            lambda: self._unless_stopped(self.attempt.endpoint(role, index)),
            self.config.limits.start_s,
            party=f"{role}-{index}",
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


def enter(role: str, index: int, root: Path, epoch: int, incarnation: int, *, parent: int, host: str) -> RoleProcess:
    """Become a role: logging, signals, configuration, records."""
    run = RunDir.open(root)
    asked, stop_flag = SimpleQueue[int](), threading.Event()
    signal.signal(signal.SIGTERM, lambda number, _: asked.put(number))  # reentrant: a storm of signals locks no Event
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup_logging(role, index)
    token = read_key(run.token)
    add_secret(token)
    config = load([run.config], [])
    attempt = run.attempt(epoch)
    recorder = Recorder(attempt.records(role, index), role=role, index=index, epoch=epoch)
    process = RoleProcess(
        role=role,
        index=index,
        run=run,
        epoch=epoch,
        incarnation=incarnation,
        host=host,
        config=config,
        token=token,
        recorder=recorder,
        stop_flag=stop_flag,
        stacks=Stacks(attempt, role, index),
    )
    # An engine that has joined the run may leave it while the trainer lives.
    goes_first = (lambda: False) if role == "trainer" or process.seat else (lambda: _trainer_lives(attempt, host))
    _stop_when_due(parent, asked, stop_flag, config.limits.stop_s, goes_first)
    process.starting.callback(advance, "starts")  # from here on it has that much time to get on
    process.starting.enter_context(waiting("coming up", limit_s=config.limits.start_s))
    return process


def _trainer_lives(attempt: AttemptDir, host: str) -> bool:
    """Whether trainer-0 still runs: it may be in a weight update, and commits when it stops.

    Of one on another host only its last heartbeat tells; it is taken to live until that says that it has ended, also
    where nothing can be read: whoever asks has a deadline, and must come to it.
    """
    try:
        endpoint = read_if_listed(attempt.endpoint("trainer", 0))
        if endpoint is None or endpoint["host"] == host:
            return endpoint is not None and start_ticks(endpoint["pid"]) is not None
        beat = read_heartbeat(attempt, "trainer-0")
    except OSError as error:
        log.warning("whether trainer-0 lives is not known: %s", error)
        return True
    return beat is None or not beat["ended"]


def _stop_when_due(
    parent: int, asked: SimpleQueue[int], stop_flag: threading.Event, grace_s: float, goes_first: Callable[[], bool]
) -> None:
    """Raise the stop flag when ``asked`` has a signal, or ``parent`` is dead; ``grace_s`` later, end by force.

    This takes a thread, since the main one may wait in a collective for ranks that are gone as well. The thread also
    sees that a launcher died before this process could ask the kernel for a signal. A scheduler signals all processes
    at once, so the flag waits while ``goes_first`` says that somebody lives who still needs this process, for
    ``grace_s`` at most.
    """

    def signalled() -> bool:
        with suppress(Empty):
            asked.get(timeout=POLL_S)
            return True
        return False

    def watch() -> None:
        while os.getppid() == parent and not signalled():
            pass
        deadline = time.monotonic() + grace_s
        while goes_first() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        stop_flag.set()
        time.sleep(grace_s)
        log.critical("this process did not stop in %g s: ended by force", grace_s)
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="stop-watch", daemon=True).start()
