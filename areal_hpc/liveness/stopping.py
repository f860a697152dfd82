"""Requests to stop a run: signals to its launcher, or a file in the run directory from anywhere that sees it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from areal_hpc.buffer.epochs import claimed_by
from areal_hpc.cluster.owner import Owner
from areal_hpc.errors import RunDirError
from areal_hpc.fs import names_in, publish, read_if_listed
from areal_hpc.privacy import is_own, owner_of
from areal_hpc.run_dir import AttemptDir, RunDir

RUNNING, RESTARTING = "running", "restarting"
ALIVE = (RUNNING, RESTARTING)
"""States of an attempt whose launcher goes on, with this attempt or the next."""
LOOK_S = 0.25
ASKED_BY: Mapping[int, str] = {
    signal.SIGINT: "Ctrl-C, or SIGINT",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "its terminal was closed",
}
"""What a request to stop came by, outside of a job."""


@dataclass(slots=True)
class Signals:
    """Requests to stop as a count: the first asks for a checkpoint and an end, a person's second for an end at once.

    A scheduler sends several signals for one end, so in its job a second one asks for nothing more. And there the exit
    code tells whether the run goes on: once this context is left SIGTERM is ignored, so that a late one does not end
    the process with a code of its own.
    """

    from_scheduler: bool = False
    count: int = 0
    first: int = 0
    """Number of the first one."""
    interrupt: bool = False
    previous: dict[int, Any] = field(default_factory=dict)

    @property
    def insist(self) -> bool:
        """Whether to end at once."""
        return self.count > 1 and not self.from_scheduler

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
        if self.from_scheduler:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within, a request also raises KeyboardInterrupt, one that came before as well, and the first one only: for
        work that never looks whether there is one, and that cleans up."""
        self.interrupt = True
        try:
            if self.count:
                raise KeyboardInterrupt
            yield
        finally:
            self.interrupt = False

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt


def is_asked_to_stop(attempt: AttemptDir, signals: Signals) -> bool:
    return signals.count > 0 or attempt.stop_request.name in names_in(attempt.root)


def asked_by(attempt: AttemptDir, signals: Signals) -> str:
    """Who or what asked an attempt to stop; empty where nobody did."""
    if attempt.stop_request.name in names_in(attempt.root):
        return "`areal-hpc stop` asked for it"
    if signals.first and signals.from_scheduler:
        return "Slurm was to end its job"
    return ASKED_BY.get(signals.first, "")


def state_of(run: RunDir, epoch: int) -> tuple[str, Owner]:
    """What an attempt says of itself, and whose it is; one that has said nothing yet is running."""
    state = read_if_listed(run.attempt(epoch).state) or {"state": RUNNING, **claimed_by(run, epoch)}
    return str(state["state"]), Owner.from_record(state)


def refuse_living_owner(run: RunDir, newest: int) -> None:
    """Check that no other process is at work on the run.

    Raises:
        RunDirError: attempt ``newest`` is at work, as far as can be known from here; names its process and user.
    """
    if newest == 0:
        return
    state, owner = state_of(run, newest)
    if state in ALIVE and not owner.is_gone():
        raise RunDirError(
            f"{run.root} is in use by process {owner.pid} on {owner.host}{_of_another(run, newest)}; stop it with "
            f"`areal-hpc stop {run.typed}`, set another `name`, or add --takeover if it cannot be reached any more"
        )


def _of_another(run: RunDir, epoch: int) -> str:
    state = run.attempt(epoch).state
    return "" if not state.exists() or is_own(state) else f" of {owner_of(state)}"


def stop_run(run: RunDir, timeout_s: float) -> str:
    """Ask the newest attempt to stop and wait until it has; the state it ended in, "dead" if its launcher is gone.

    A launcher between two attempts is asked again in the second.

    Raises:
        RunDirError: there is nothing to stop, or it did not stop in time.
    """
    deadline = time.monotonic() + timeout_s
    asked = None
    while True:
        attempt = run.newest_attempt()
        if attempt is None:
            raise RunDirError(f"{run.root} has never been started; nothing to stop")
        state, owner = state_of(run, attempt.epoch)
        if state not in ALIVE:
            return state
        if owner.is_gone():
            return "dead"
        if asked != attempt:
            publish(attempt.stop_request, b"{}")
            asked = attempt
        if time.monotonic() > deadline:
            raise RunDirError(
                f"{run.root}: process {owner.pid} on {owner.host} did not stop in {timeout_s:g} s; wait longer with "
                "--timeout, or end that process"
            )
        time.sleep(LOOK_S)
