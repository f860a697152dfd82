"""CONTROL.json: all that the trainer tells the writers, replaced whole by its rank 0 after a look at the fence.

It carries the newest published weights and, for each writer slot, the chain it listens to and numbers that only ever
grow within that chain. A writer believes it only where it is of the writer's own epoch.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.buffer.epochs import check_fence
from areal_hpc.buffer.pace import Pace, poll_pause_s
from areal_hpc.errors import RunDirError
from areal_hpc.fs import names_in, publish_json, read_json
from areal_hpc.mount import is_served
from areal_hpc.patience import PASSING, RETRY_PAUSES_S
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion
from areal_hpc.watermark import Watermark

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotControl:
    """What one writer needs to know."""

    chain: str  # whose records are followed; "" while the slot has no writer
    limit: int  # tickets of this chain that may have begun by now; what its writer dropped counts in a fixed order only
    short: bool  # whether it would be more, had the ring room for more bytes
    reclaim: int  # tickets of this chain below it are in two checkpoints: their segments may be deleted
    issued: Watermark  # positions of the slot's shard (position // num_slots) that need not be issued again
    reissues: tuple[tuple[int, int], ...]  # (position, serial) to run again

    def to_json(self) -> dict[str, Any]:
        return {
            "chain": self.chain,
            "limit": self.limit,
            "short": self.short,
            "reclaim": self.reclaim,
            "issued": self.issued.state_dict(),
            "reissues": self.reissues,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SlotControl:
        return cls(
            chain=value["chain"],
            limit=value.get("limit", 0),  # attempts of older versions told it otherwise, and nobody goes by theirs
            short=value.get("short", False),
            reclaim=value["reclaim"],
            issued=Watermark.from_state(value["issued"]),
            reissues=tuple((position, serial) for position, serial in value["reissues"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One state of CONTROL.json."""

    epoch: int
    version: WeightVersion
    slots: tuple[SlotControl, ...]
    held: int = 0  # bytes in the ring and on their way there, where it has a quota; for messages


def publish_control(run: RunDir, control: Control) -> None:
    """Replace CONTROL.json, unless a newer attempt owns the run.

    Raises:
        Fenced: a newer attempt owns the run; nothing was published.
    """
    check_fence(run, control.epoch)
    slots = [slot.to_json() for slot in control.slots]
    told = {"epoch": control.epoch, "version": control.version, "slots": slots, "held": control.held}
    publish_json(run.ring / "CONTROL.json", told)


class ControlPublisher:
    """``publish_control`` for an owner who can do it again later: a full disk or a server that is away may pass."""

    def __init__(self, run: RunDir, patience_s: float = 60.0) -> None:
        self._run, self._patience_s = run, patience_s
        self._failing_since: float | None = None

    def publish(self, control: Control) -> bool:
        """Whether it is published; if not, writers go on by what was published before, and it should be tried again.

        Raises:
            Fenced: a newer attempt owns the run; nothing was published.
            RunDirError: it has been impossible for ``patience_s`` seconds.
            OSError: it is impossible for a reason that does not pass.
        """
        try:
            publish_control(self._run, control)
        except FileNotFoundError:
            check_fence(self._run, control.epoch)  # a successor may have swept our unpublished file away
            raise
        except OSError as error:
            if error.errno not in PASSING:
                raise
            self._bear(error)
            return False
        self._failing_since = None
        return True

    def _bear(self, error: OSError) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            log.warning("CONTROL.json cannot be published for the moment: %s", error)
        if (lasted_s := now - self._failing_since) > self._patience_s:
            raise RunDirError(
                f"{self._run.ring} could not be written for {lasted_s:.0f} s: {error.strerror}; "
                "free space or quota, then start the run again"
            ) from error


def read_control(run: RunDir, *, known: bool) -> Control | None:
    """What CONTROL.json says now, or None where there is none yet or its name is stale for an instant: ask again.

    Args:
        known: it has been read before, so its name need not be looked for in the directory.
    """
    path = run.ring / "CONTROL.json"
    value = read_replaced(path) if known or path.name in names_in(path.parent) else None
    if value is None:
        return None
    slots = tuple(SlotControl.from_json(slot) for slot in value["slots"])
    version = WeightVersion(*value["version"])
    return Control(epoch=value["epoch"], version=version, slots=slots, held=value.get("held", 0))


class NewestWeights:
    """Tells the optimizer steps behind the newest weights that an attempt has published, None before the first.

    CONTROL.json is read as often as the ring's writers read it, however often this is called.

    Args:
        commit_s: ``buffer.commit_s``, by which all go who look at the ring.
    """

    def __init__(
        self, run: RunDir, epoch: int, commit_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._epoch = run, epoch
        self._reading = Pace(poll_pause_s(commit_s, is_served(run.root)), clock=clock)
        self._control: Control | None = None
        self._step: int | None = None

    def __call__(self) -> int | None:
        if self._reading.due():
            control = read_control(self._run, known=self._control is not None)
            self._reading.looked(news=control != self._control)
            self._control = control or self._control
            if control is not None and control.epoch == self._epoch:
                self._step = control.version.step
        return self._step


def read_replaced(path: Path) -> Any | None:
    """A document that others replace by rename, or None where that makes its name stale here for an instant.

    Raises:
        RunDirError: it stays undecodable; somebody else wrote it, or damaged it.
    """
    for pause_s in RETRY_PAUSES_S:
        try:
            return _read_if_not_stale(path)
        except ValueError:  # half visible: a network file system may show one page of it before the other
            time.sleep(pause_s)
    try:
        return _read_if_not_stale(path)
    except ValueError as error:
        why = error.__cause__ or error
        raise RunDirError(f"{path} is no JSON document: {why}; remove it, its owner writes it again") from error


def _read_if_not_stale(path: Path) -> Any | None:
    try:
        return read_json(path)
    except OSError as error:
        if error.errno not in (errno.ESTALE, errno.ENOENT):
            raise
        return None
