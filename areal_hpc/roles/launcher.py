"""``areal-hpc run`` in the shape ``local``: claim the run, start its roles, watch them, end them, say how it went.

prepare     no other living owner, the same experiment, data, reward and model usable; then an epoch of its own
start       generators, rollout workers, trainer ranks, evaluator: all at once, each finds the others by endpoint file
watch       records to the console; a role that ends too early ends the run with its name, exit code and last lines
end         trainers first (they commit), then the rest, within limits.stop_s, by pid

Until an epoch is claimed nothing has been written, and Ctrl-C simply ends the command.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from areal_hpc import checkpoint
from areal_hpc.accelerator import REPRODUCIBLE
from areal_hpc.buffer.epochs import claim_epoch, claimed_by, load_lineage, newest_epoch, read_start
from areal_hpc.cluster.local import Ended, LocalLauncher
from areal_hpc.cluster.owner import Owner
from areal_hpc.config.describe import dump
from areal_hpc.config.keys import keys, value_of
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config
from areal_hpc.errors import CheckpointError, RoleDied, RunDirError
from areal_hpc.fs import RunDir, create_exclusive, publish, publish_json, read_if_listed
from areal_hpc.report import LiveConsole, write_report
from areal_hpc.roles.process import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from areal_hpc.roles.wiring.preflight import preflight
from areal_hpc.telemetry import Recorder, RecordReader, Trackers, open_sinks

log = logging.getLogger(__name__)

WATCH_S = 0.25
FINISHING = ("trainer", "evaluator")
"""Roles that end by themselves when the run is done."""
EXIT_CODES = {"finished": EXIT_DONE, "stopped": EXIT_STOPPED, "aborted": EXIT_FAILED}
CHANGEABLE = (
    "archive.",
    "checkpoint.",
    "cluster.",
    "evaluation.",
    "generation.max_running",
    "generation.replicas",
    "generation.threads",
    "limits.",
    "rollout.concurrency",
    "rollout.reward_timeout_s",
    "rollout.reward_workers",
    "rollout.timeout_s",
    "run_root",
    "telemetry.",
    "trainer.ranks",
    "trainer.threads",
    "trainer.total_steps",
    "weights.",
)
"""Keys that may change from one attempt of a run to the next; a falling learning rate follows a new total_steps."""
ROUNDING = ("generation.threads", "trainer.threads")
"""Those of them that change the last bits of results, and are therefore fixed in deterministic training."""


@dataclass(slots=True)
class Signals:
    """Requests to stop as a count: the first asks for a checkpoint and an end, the second for an end at once."""

    count: int = 0
    previous: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Signals:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup(1) asked to outlive the terminal
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self.previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


def run_local(
    config: Config, *, resume: bool, console: LiveConsole, takeover: bool = False, resume_from: int | None = None
) -> int:
    """Run ``config`` on this machine to its end.

    Args:
        resume_from: go on from the checkpoint of this step instead of the newest; what came after it is taken back.

    Returns:
        0 when the last step is done, 75 when a stop request ended it (a checkpoint is there), 1 when a second request
        did not give it the time for one.

    Raises:
        RunDirError: the run directory is in use (and not to be taken over), or holds a run and ``resume`` is false.
        CheckpointError: there is no checkpoint of the step ``resume_from``.
        ConfigError, DataError: see ``preflight``; the run directory has not been touched.
        RoleDied: a process ended too early.
    """
    run = RunDir((Path(config.run_root) / config.name).absolute())
    newest = newest_epoch(run)
    if not takeover:
        _refuse_living_owner(run, newest)
    _check_resume(run, newest, config, resume)
    if resume_from is not None:
        _check_step(run, newest, resume_from)
    preflight(config)
    with Signals() as signals:
        outcome = _attempt(RunDir.create(run.root), newest, config, console, signals, resume_from=resume_from)
    write_report(run)
    return EXIT_CODES[outcome]


def _attempt(
    run: RunDir, newest: int, config: Config, console: LiveConsole, signals: Signals, *, resume_from: int | None
) -> str:
    """Claim the next epoch and run it; whatever happens, its state does not stay "running"."""
    owner = Owner.this_process().record()
    epoch = claim_epoch(run, owner, after=newest)
    attempt = run.attempt(epoch).create()
    outcome = "failed"
    publish_json(attempt.state, {"state": "running", **owner})
    try:
        if resume_from is not None:
            publish_json(attempt.resume_from, {"step": resume_from, "after": newest})
        publish(run.config, dump(config).encode())
        create_exclusive(run.token, secrets.token_urlsafe(32).encode())
        outcome = _supervise(run, epoch, config, console, signals)
    finally:
        publish_json(attempt.state, {"state": outcome, **owner})
        with closing(Recorder(attempt.records("launcher", 0), role="launcher", index=0, epoch=epoch)) as recorder:
            recorder.record("run", {"event": outcome})
    return outcome


def _refuse_living_owner(run: RunDir, newest: int) -> None:
    if newest == 0:
        return
    state = read_if_listed(run.attempt(newest).state) or {"state": "running", **claimed_by(run, newest)}
    owner = Owner.from_record(state)
    if state["state"] == "running" and not owner.is_gone():
        raise RunDirError(
            f"{run.root} is in use by process {owner.pid} on {owner.host}; stop it with `areal-hpc stop {run.root}`, "
            "set another `name`, or add --takeover if it cannot be reached any more"
        )


def _check_resume(run: RunDir, newest: int, config: Config, resume: bool) -> None:
    """Refuse to go on with another experiment under the same name. A start that got nowhere is no experiment."""
    if not any(read_start(run, epoch) for epoch in range(1, newest + 1)):
        return
    if not resume:
        raise RunDirError(f"{run.root} already holds a run; continue it with --resume, or set another `name`")
    before = load([run.config])
    changed = [key for key in keys() if value_of(before, key) != value_of(config, key)]
    fixed = ROUNDING if config.deterministic else ()
    frozen = [
        f"{key} (was {value_of(before, key)})" for key in changed if key in fixed or not key.startswith(CHANGEABLE)
    ]
    if frozen:
        raise RunDirError(f"{run.config}: {', '.join(frozen)} would change within one run; set another `name`")
    for key in changed:
        log.info("from this attempt on: %s = %s (was %s)", key, value_of(config, key), value_of(before, key))


def _check_step(run: RunDir, newest: int, step: int) -> None:
    """Refuse a step that has no checkpoint, and say what going back to it takes back."""
    lineage = load_lineage(run, newest + 1)
    steps = checkpoint.steps_of(run, lineage) if run.checkpoints.is_dir() else []
    if step not in steps:
        found = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"--resume-from {step}: {run.checkpoints} has no checkpoint of it; there are: {found}")
    later = [one for one in steps if one > step]
    what = f"the checkpoints of steps {', '.join(map(str, later))} and " if later else ""
    log.info("going back to step %d: %sall that was trained after it are taken back", step, what)


def _supervise(run: RunDir, epoch: int, config: Config, console: LiveConsole, signals: Signals) -> str:
    """Start every role, watch them, end them; how it went: "finished", "stopped" or "aborted"."""
    threads = {"trainer": config.trainer.threads, "generator": config.generation.threads}
    launcher = LocalLauncher(run, epoch, threads, REPRODUCIBLE if config.deterministic else {})
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
            _start(launcher, config, stop)
            outcome = _watch(launcher, stop, show)
        finally:
            ended = launcher.stop(config.limits.stop_s, at_once=lambda: signals.count > 1)
            show()
    if outcome == "stopped":
        return "aborted" if signals.count > 1 else _judge_stopped(launcher, ended)
    return outcome


def roles_of(config: Config) -> dict[str, int]:
    """How many processes of each role a run has; a replay trains and does nothing else."""
    if config.replay.run:
        return {"trainer": config.trainer.ranks}
    return {
        "generator": config.generation.replicas,
        "rollout": config.rollout.workers,
        "trainer": config.trainer.ranks,
        "evaluator": 1 if config.evaluation.every_steps else 0,
    }


def _start(launcher: LocalLauncher, config: Config, stop: Callable[[], bool]) -> None:
    for role, count in roles_of(config).items():
        for index in range(count):
            if not stop():
                launcher.start(role, index)


def _watch(launcher: LocalLauncher, stop: Callable[[], bool], show: Callable[[], None]) -> str:
    """Until trainers and evaluator are done ("finished") or a stop is asked for ("stopped")."""
    while not stop():
        _judge(launcher, launcher.died())
        show()
        if not any(role in FINISHING for role, _ in launcher.running):
            return "finished"
        time.sleep(WATCH_S)
    return "stopped"


def _judge(launcher: LocalLauncher, ended: Sequence[Ended]) -> None:
    """A trainer or evaluator may be done; anything else that ends is an error with a name.

    Of several that ended together, one that a signal killed is the likelier cause.
    """
    early = [one for one in ended if not (one.role in FINISHING and one.code == EXIT_DONE)]
    if early:
        raise RoleDied(_obituary(launcher, min(early, key=lambda one: one.code >= 0)))


def _judge_stopped(launcher: LocalLauncher, ended: Sequence[Ended]) -> str:
    """Say "stopped" if the trainer that commits did so, or had not begun yet (SIGTERM found no handler).

    Raises:
        RoleDied: it did not, so there may be no checkpoint of the last steps.
    """
    for one in ended:
        if (one.role, one.index) != ("trainer", 0) or one.code in (EXIT_DONE, EXIT_STOPPED, -signal.SIGTERM):
            continue
        if one.code == -signal.SIGKILL:
            raise RoleDied(
                f"{one.name} did not end within limits.stop_s and was killed; the run goes on from its last checkpoint "
                "with --resume. Raise limits.stop_s if a checkpoint takes longer"
            )
        raise RoleDied(_obituary(launcher, one))
    return "stopped"


def _obituary(launcher: LocalLauncher, ended: Ended) -> str:
    log_path = launcher.attempt.log(ended.role, ended.index)
    how = f"exit code {ended.code}" if ended.code >= 0 else f"signal {-ended.code} ({signal.Signals(-ended.code).name})"
    lines = launcher.last_lines(ended.role, ended.index)
    return f"{ended.name} ended with {how}; its log {log_path} " + (f"ends with:\n{lines}" if lines else "is empty")


def stop_run(run: RunDir, timeout_s: float) -> str:
    """Ask the newest attempt to stop and wait until it has; the state it ended in, "dead" if its launcher is gone.

    Raises:
        RunDirError: there is nothing to stop, or it did not stop in time.
    """
    attempt = run.newest_attempt()
    if attempt is None:
        raise RunDirError(f"{run.root} has never been started; nothing to stop")
    deadline = time.monotonic() + timeout_s
    asked = False
    while True:
        state = read_if_listed(attempt.state) or {"state": "running", **claimed_by(run, attempt.epoch)}
        owner = Owner.from_record(state)
        if state["state"] != "running":
            return str(state["state"])
        if owner.is_gone():
            return "dead"
        if not asked:
            publish(attempt.stop_request, b"{}")
            asked = True
        if time.monotonic() > deadline:
            raise RunDirError(
                f"{run.root}: process {owner.pid} on {owner.host} did not stop in {timeout_s:g} s; wait longer with "
                "--timeout, or end that process"
            )
        time.sleep(WATCH_S)
