"""``areal-hpc run`` in the shape ``local``: claim the run, start its roles, watch them, end them, say how it went.

prepare     run directory, no other living owner, epoch claimed, configuration written, model there
start       generators, rollout workers, trainer ranks, evaluator: all at once, each finds the others by endpoint file
watch       records to the console; a role that ends too early ends the run with its name, exit code and last lines
end         trainers first (they commit), then the rest, within limits.stop_s, by pid
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from areal_hpc.buffer.epochs import claim_epoch, newest_epoch
from areal_hpc.cluster.local import Ended, LocalLauncher
from areal_hpc.cluster.owner import Owner
from areal_hpc.config.describe import dump
from areal_hpc.config.keys import keys, value_of
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config
from areal_hpc.errors import RoleDied, RunDirError
from areal_hpc.fs import RunDir, create_exclusive, publish, publish_json, read_if_listed, read_json
from areal_hpc.report import LiveConsole, write_report
from areal_hpc.roles.process import EXIT_DONE, EXIT_STOPPED
from areal_hpc.roles.wiring.engines import make_model
from areal_hpc.telemetry import Recorder, RecordReader, Trackers, open_sinks

log = logging.getLogger(__name__)

WATCH_S = 0.25
CHANGEABLE = ("trainer.total_steps", "checkpoint.", "cluster.", "evaluation.", "limits.", "telemetry.", "run_root")
"""Keys that may change from one attempt of a run to the next: none of them changes what is learned from a sample."""


@dataclass(slots=True)
class Signals:
    """Ctrl-C and SIGTERM as a flag; a second one is patience lost: the stop limit shrinks to nothing."""

    count: int = 0
    previous: dict[int, object] = field(default_factory=dict)

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


def run_local(config: Config, *, resume: bool, console: LiveConsole) -> int:
    """Run ``config`` on this machine to its end.

    Returns:
        0 when the last step is done, 75 when a stop request ended it (a checkpoint is there).

    Raises:
        RunDirError: the run directory is in use, or holds a run and ``resume`` is false.
        RoleDied: a process ended too early.
    """
    run = RunDir.create(Path(config.run_root) / config.name)
    epoch = _claim(run, config, resume)
    make_model(config)
    attempt = run.attempt(epoch).create()
    owner = Owner.this_process()
    publish_json(attempt.state, {"state": "running", **owner.record()})
    recorder = Recorder(attempt.records("launcher", 0), role="launcher", index=0, epoch=epoch)
    outcome = "failed"
    try:
        with Signals() as signals:
            outcome = _supervise(run, epoch, config, console, signals)
    finally:
        publish_json(attempt.state, {"state": outcome, **owner.record()})
        recorder.record("run", {"event": outcome})
        recorder.close()
    write_report(run)
    return EXIT_DONE if outcome == "finished" else EXIT_STOPPED


def _claim(run: RunDir, config: Config, resume: bool) -> int:
    """The fencing epoch of this attempt, once nobody else lives in the directory and the configuration fits."""
    _refuse_living_owner(run)
    if run.config.exists():
        _check_resume(run, config, resume)
    epoch = claim_epoch(run, Owner.this_process().record())
    publish(run.config, dump(config).encode())
    create_exclusive(run.token, secrets.token_urlsafe(32).encode())
    return epoch


def _refuse_living_owner(run: RunDir) -> None:
    epoch = newest_epoch(run)
    if epoch == 0:
        return
    state = read_if_listed(run.attempt(epoch).state)
    if state is None or state["state"] != "running":
        return
    owner = Owner.from_record(state)
    if not owner.here or owner.lives():
        where = f"process {owner.pid} on {owner.host}"
        raise RunDirError(f"{run.root} is in use by {where}; stop it with `areal-hpc stop {run.root}`, or set `name`")


def _check_resume(run: RunDir, config: Config, resume: bool) -> None:
    """Refuse to go on with another experiment under the same name."""
    if not resume:
        raise RunDirError(f"{run.root} already holds a run; continue it with --resume, or set another `name`")
    before = load([run.config])
    changed = [key for key in keys() if value_of(before, key) != value_of(config, key)]
    frozen = [key for key in changed if not key.startswith(CHANGEABLE)]
    if frozen:
        raise RunDirError(f"{run.config}: {', '.join(frozen)} would change within one run; set another `name`")
    for key in changed:
        log.info("from this attempt on: %s = %s (was %s)", key, value_of(config, key), value_of(before, key))


def _supervise(run: RunDir, epoch: int, config: Config, console: LiveConsole, signals: Signals) -> str:
    launcher = LocalLauncher(run, epoch, {"trainer": config.trainer.threads, "generator": config.generation.threads})
    records = RecordReader(run.attempt(epoch).telemetry)
    trackers = Trackers(open_sinks(config.telemetry, run))
    stop_request = run.attempt(epoch).stop_request

    def stop() -> bool:
        return signals.count > 0 or stop_request.name in os.listdir(stop_request.parent)

    def show() -> None:
        for record in records.poll():
            trackers.follow(record)
            console.feed([record])
        console.feed([])

    with console, closing(trackers):
        try:
            for role, count in roles_of(config).items():
                for index in range(count):
                    launcher.start(role, index)
            return _watch(launcher, stop, show)
        finally:
            launcher.stop(0.0 if signals.count > 1 else config.limits.stop_s)
            show()


def roles_of(config: Config) -> dict[str, int]:
    """How many processes of each role a run has."""
    return {
        "generator": config.generation.replicas,
        "rollout": config.rollout.workers,
        "trainer": config.trainer.ranks,
        "evaluator": 1 if config.evaluation.every_steps else 0,
    }


def _watch(launcher: LocalLauncher, stop: Callable[[], bool], show: Callable[[], None]) -> str:
    """Until trainers and evaluator are done ("finished") or a stop is asked for ("stopped")."""
    while any(role in ("trainer", "evaluator") for role, _ in launcher.running):
        if stop():
            return "stopped"
        for ended in launcher.died():
            _judge(launcher, ended)
        show()
        time.sleep(WATCH_S)
    return "finished"


def _judge(launcher: LocalLauncher, ended: Ended) -> None:
    """A trainer or evaluator may be done; anything else that ends is an error with a name."""
    if ended.role in ("trainer", "evaluator") and ended.code == EXIT_DONE:
        return
    log_path = launcher.attempt.log(ended.role, ended.index)
    lines = launcher.last_lines(ended.role, ended.index)
    how = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    raise RoleDied(f"{ended.name} ended with {how}; its log {log_path} ends with:\n{lines}")


def stop_run(run: RunDir, timeout_s: float) -> str:
    """Ask the newest attempt to stop and wait until it has; the state it ended in."""
    attempt = run.newest_attempt()
    if attempt is None:
        raise RunDirError(f"{run.root} has never been started; nothing to stop")
    state = read_json(attempt.state)
    if state["state"] != "running":
        return str(state["state"])
    publish(attempt.stop_request, b"{}")
    deadline = time.monotonic() + timeout_s
    while (state := read_json(attempt.state))["state"] == "running":
        owner = Owner.from_record(state)
        if owner.here and not owner.lives():
            return "dead"
        if time.monotonic() > deadline:
            raise RunDirError(f"{run.root}: process {owner.pid} on {owner.host} did not stop in {timeout_s:g} s")
        time.sleep(WATCH_S)
    return str(state["state"])
