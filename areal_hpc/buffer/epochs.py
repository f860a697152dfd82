"""Attempts of one run: who owns it (fencing), and which weights they have in common (lineage).

    ring/epochs/e00000003              created exclusively by the attempt that claims the number
    ring/epochs/e00000003.start.json   written once by its trainer: the checkpoint it goes on from, the prompts done,
                                       what of the checkpoint others than the trainer go on with

Every attempt has a higher epoch than all before it. Whoever sees a higher epoch than its own stops: a process that
slept through its own replacement publishes nothing and deletes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.errors import CorruptDocument, Fenced, RunDirError
from areal_hpc.fs import (
    create_exclusive,
    make_private_directory,
    names_in,
    read_if_listed,
    read_json,
    sweep_temporaries,
)
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion
from areal_hpc.watermark import Watermark

ROOT = WeightVersion(0, 0)
"""The weights before any attempt: what ``model.path`` holds. Real epochs begin at 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """How an attempt began."""

    parent: WeightVersion | None  # the checkpoint it goes on from; None: from the model directory
    version: WeightVersion  # the first version it serves
    consumed: Watermark  # prompt positions that need no new episode: consumed, or sealed and waiting in the ring
    fingerprint: str  # of the data set that positions refer to
    carried: Mapping[str, Any] = field(default_factory=dict)  # JSON data for other processes of the attempt


def _directory(run: RunDir) -> Path:
    return run.ring / "epochs"


def newest_epoch(run: RunDir) -> int:
    """The highest epoch anybody has claimed, by listing; 0 before the first."""
    try:
        names = names_in(_directory(run))
    except FileNotFoundError:
        return 0
    return max((int(name[1:]) for name in names if re.fullmatch(r"e\d{8}", name)), default=0)


def claim_epoch(run: RunDir, owner: Mapping[str, Any], *, after: int | None = None) -> int:
    """Take the next epoch; of many callers on any host each gets its own, and the highest owns the run.

    Raises:
        RunDirError: ``after`` was the newest epoch when the caller decided to start, and is not any more.
    """
    make_private_directory(_directory(run))
    epoch = (newest_epoch(run) if after is None else after) + 1
    while not create_exclusive(_claim_path(run, epoch), json.dumps(dict(owner)).encode()):
        if after is not None:
            raise RunDirError(f"{run.root} was started by somebody else at the same moment; set another `name`")
        epoch += 1  # somebody was faster, or the listing was old
    return epoch


def sweep(run: RunDir, epoch: int) -> None:
    """Remove the unpublished files that processes of attempts before ``epoch`` were killed over; called by the attempt
    that has claimed it, before its processes start. Others may still be after the same or a later epoch."""
    for directory in (run.root, run.evaluations, run.ring, make_private_directory(run.ring / "reg")):
        sweep_temporaries(directory)
    sweep_temporaries(_directory(run), before=_claim_path(run, epoch).name)


def claimed_by(run: RunDir, epoch: int) -> dict[str, Any]:
    """What the attempt that claimed ``epoch`` said about itself.

    Raises:
        RunDirError: nothing; where there are no hard links, a process can be killed between claiming and saying so.
    """
    owner: dict[str, Any] | None = read_if_listed(_claim_path(run, epoch))
    if owner is None:
        raise RunDirError(f"{_claim_path(run, epoch)} does not say who made it; add --takeover if nothing of it lives")
    return owner


def _claim_path(run: RunDir, epoch: int) -> Path:
    return _directory(run) / f"e{epoch:08d}"


def check_fence(run: RunDir, epoch: int) -> None:
    """Check that attempt ``epoch`` is still the newest one; call it before anything that only the owner may do.

    Raises:
        Fenced: a newer attempt than ``epoch`` owns the run.
    """
    newest = newest_epoch(run)
    if newest > epoch:
        raise Fenced(f"attempt {epoch} of {run.root} was replaced by attempt {newest}; this process must stop")


def write_start(run: RunDir, epoch: int, record: StartRecord) -> None:
    """Write down, once, how attempt ``epoch`` begins.

    Raises:
        RunDirError: this epoch has a start record already: two trainers believe that they own it.
    """
    value = {
        "parent": record.parent,
        "version": record.version,
        "consumed": record.consumed.state_dict(),
        "fingerprint": record.fingerprint,
        "carried": dict(record.carried),
    }
    if not create_exclusive(_start_path(run, epoch), json.dumps(value).encode()):
        raise RunDirError(f"{_start_path(run, epoch)} exists; stop the other trainer and start the run again")


def read_start(run: RunDir, epoch: int, *, known: bool = False) -> StartRecord | None:
    """How attempt ``epoch`` began, or None while its trainer has not said so.

    Args:
        known: what follows it has been seen, such as weights of the attempt, so its name need not be looked for in the
            directory, of which an old listing may be shown here.

    Raises:
        CorruptDocument: it is damaged. Nobody should remove it: the attempt's checkpoints would be of no history.
    """
    path = _start_path(run, epoch)
    try:
        value = _read_known(path) if known else read_if_listed(path)
    except CorruptDocument as error:
        raise CorruptDocument(
            f"{path} is damaged, by which the checkpoints of attempt {epoch} are found; restore it from a copy"
        ) from error
    if value is None:
        return None
    return StartRecord(
        parent=None if value["parent"] is None else WeightVersion(*value["parent"]),
        version=WeightVersion(*value["version"]),
        consumed=Watermark.from_state(value["consumed"]),
        fingerprint=value["fingerprint"],
        carried=value.get("carried", {}),  # attempts of older versions had none
    )


def _read_known(path: Path) -> Any | None:
    try:
        return read_json(path)
    except FileNotFoundError:  # somebody has deleted it
        return None


def _start_path(run: RunDir, epoch: int) -> Path:
    return _directory(run) / f"e{epoch:08d}.start.json"


def load_lineage(run: RunDir, epoch: int) -> dict[int, int | None]:
    """Which steps of which earlier attempts the run still stands on, before attempt ``epoch`` has chosen its parent.

    Raises:
        RunDirError: there are checkpoints, and nothing that says how they follow from each other.
    """
    started = [earlier for earlier in range(1, epoch) if read_start(run, earlier) is not None]
    if not started and run.checkpoints.is_dir() and any(name.startswith("step-") for name in names_in(run.checkpoints)):
        raise RunDirError(
            f"{_directory(run)} holds no start record, without which no checkpoint of {run.root} can be gone on from; "
            "restore ring/ from a copy, or set another `name`"
        )
    lineage: dict[int, int | None] = {}
    attempt, last = (started[-1], None) if started else (0, None)
    while attempt:
        lineage[attempt] = last
        start = read_start(run, attempt)
        assert start is not None, attempt
        attempt, last = start.parent or (0, None)
    return lineage


def history(run: RunDir) -> dict[int, int | None]:
    """Which steps of which attempts the run stands on now, as a reader from outside sees it."""
    return load_lineage(run, newest_epoch(run) + 1)


def lineage(run: RunDir, epoch: int, parent: WeightVersion | None) -> Callable[[WeightVersion], bool]:
    """``branch`` of attempt ``epoch``, which goes on from checkpoint ``parent``; the others' parents are on disk."""
    parents = {epoch: parent or ROOT}
    came_from = parents[epoch].epoch
    for earlier in range(epoch - 1, 0, -1):
        start = read_start(run, earlier, known=earlier == came_from)
        if start is not None:
            parents[earlier] = start.parent or ROOT
            came_from = parents[earlier].epoch if earlier == came_from else came_from
    return branch(epoch, parents)


def branch(epoch: int, parents: Mapping[int, WeightVersion]) -> Callable[[WeightVersion], bool]:
    """Whether weights are on the branch that attempt ``epoch`` continues.

    ``parents[e]`` is the checkpoint that attempt ``e`` went on from. On the path from ``epoch`` to the root an attempt
    shares what came before the next one left it; beside the path it shares at most the weights it began with; one
    without a parent served no weights.

    Raises:
        RunDirError: an attempt on the path has no parent recorded.
    """
    shared = {}  # attempt -> the last step that is also in our past
    child = epoch
    while child != ROOT.epoch:
        if child not in parents:
            raise RunDirError(
                f"attempt {child} left no start record, so what it shares is unknown; restore ring/epochs"
            )
        assert parents[child].epoch < child, parents
        shared[parents[child].epoch] = parents[child].step
        child = parents[child].epoch
    for earlier in sorted(parents):
        if earlier != epoch and earlier not in shared:
            began = parents[earlier]
            shared[earlier] = min(began.step, shared.get(began.epoch, -1))
    return lambda version: version.epoch == epoch or version.step <= shared.get(version.epoch, -1)
