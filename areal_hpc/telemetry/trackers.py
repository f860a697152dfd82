"""Trackers: TensorBoard and Weights & Biases, behind a wall that nothing of theirs crosses.

    trackers = Trackers(open_sinks(config.telemetry, run, wandb_id))      in the one process that reads all records
    for record in reader.poll():
        trackers.follow(record)
    trackers.close()

They show only what has a step of its own (``TRACKED``), live in a thread of their own, and are opened there at the
first number, so that an unreachable server, a missing package or a full disk costs a line in the log and never a step.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from areal_hpc.config.schema import Sink, TelemetryConfig
from areal_hpc.extras import optional
from areal_hpc.fs import make_private_directory
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry.records import Record

log = logging.getLogger(__name__)

TRACKED = frozenset({"step", "evaluation"})
QUEUE_LENGTH = 1000
CLOSE_S = 10.0


class TrackerSink(Protocol):
    """One tracker. May raise anything at any time: ``Trackers`` turns it off then."""

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """Feeds sinks from one thread; a sink that raises is turned off, with one line in the log."""

    def __init__(self, sinks: Sequence[TrackerSink]) -> None:
        self._sinks = list(sinks)
        self._queue: queue.Queue[tuple[str, int, dict[str, float]] | None] = queue.Queue(QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._feed, name="trackers", daemon=True)
        self._num_lost = 0
        if self._sinks:
            self._thread.start()

    def follow(self, record: Record) -> None:
        """Pass on what a tracker shows: the finite numbers of a tracked kind, at their step. Never blocks."""
        step = record.number("step")
        if record.kind not in TRACKED or step is None or not self._thread.is_alive():
            return
        numbers = {key: number for key in record.values if (number := record.number(key)) is not None}
        try:
            self._queue.put_nowait((record.kind, int(step), numbers))
        except queue.Full:
            self._num_lost += 1
            if self._num_lost == 1:
                log.warning(
                    "the trackers are %d records behind; they miss what comes until they catch up", QUEUE_LENGTH
                )

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Let the trackers finish what they were given, for at most ``timeout_s`` seconds."""
        if not self._thread.is_alive():
            return
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):  # told below, like any other way of not being done in time
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning("the trackers were not done within %g s; the run's own files have every record", timeout_s)

    def _feed(self) -> None:
        while (item := self._queue.get()) is not None:
            kind, step, values = item
            for sink in tuple(self._sinks):
                self._guard(sink, partial(sink.write, kind, step, values))
        for sink in tuple(self._sinks):
            self._guard(sink, sink.close)

    def _guard(self, sink: TrackerSink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a tracker may raise anything, and none of it may reach the run
            log.warning("%s is off from here on: %s: %s", type(sink).__name__, type(error).__name__, error)
            self._sinks.remove(sink)


def open_sinks(config: TelemetryConfig, run: RunDir, wandb_id: Callable[[], str]) -> list[TrackerSink]:
    """The sinks that ``config`` names, none of them opened yet; ``wandb_id`` as for ``WandbSink``."""
    rows: dict[Sink, Callable[[], TrackerSink]] = {
        Sink.TENSORBOARD: lambda: TensorBoardSink(run.trackers / "tensorboard"),
        Sink.WANDB: lambda: WandbSink(run.trackers, name=run.root.name, run_id=wandb_id, mode=config.wandb_mode),
    }
    return [rows[sink]() for sink in config.sinks]


class TensorBoardSink:
    """Event files in ``directory``, written by the tensorboard package itself (no torch).

    The first event of an attempt is a session start at its step: TensorBoard then forgets what an earlier attempt
    wrote from that step on, which the rollback took back.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        optional("tensorboard", extra="trackers", what="telemetry.sinks tensorboard")
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(make_private_directory(self._directory)))
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=start))
        scalars = [Summary.Value(tag=f"{kind}/{key}", simple_value=value) for key, value in values.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """A Weights & Biases run, offline unless ``mode`` says otherwise.

    Each kind has its own step axis, so that a repeated step after a rollback and a late evaluation are both welcome
    (wandb's own step may only grow). Configuration is not sent: a value changed on resume is refused there.

    Args:
        run_id: asked at the first number, when the attempt has said what it goes on from: the same id is the same run.
    """

    def __init__(self, directory: Path, *, name: str, run_id: Callable[[], str], mode: str) -> None:
        self._directory, self._name, self._run_id, self._mode = directory, name, run_id, mode
        self._run: Any = None

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._open()
        self._run.log({f"{kind}/{key}": value for key, value in values.items()} | {f"{kind}/step": step})

    def _open(self) -> Any:
        wandb = optional("wandb", extra="trackers", what="telemetry.sinks wandb")
        make_private_directory(self._directory)
        arguments: dict[str, Any] = {
            "project": "areal-hpc",
            "name": self._name,
            "id": self._run_id(),
            "resume": "allow",
            "mode": self._mode,
            "dir": str(self._directory),
            "settings": wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        }
        run = wandb.init(**arguments)
        for kind in sorted(TRACKED):
            run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
        return run

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
