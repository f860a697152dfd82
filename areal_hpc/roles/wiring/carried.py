"""What of a checkpoint's state other processes than the trainer go on with, and how it reaches them.

    checkpoint              state.json: ``trackers``, ``evaluations``
    trainer, as it begins   puts both into the attempt's start record, which is written once
    launcher, evaluator     read them there and nowhere else; each checkpoint of the attempt holds them again

So trackers and evaluations follow the weights: a restart goes on from the same commit with all of them, and a start
from the model alone has a tracker run of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from areal_hpc.buffer.epochs import read_start
from areal_hpc.config.schema import Config
from areal_hpc.fs import fsync_directory, names_in
from areal_hpc.roles.wiring.evaluations import Agenda, last_result
from areal_hpc.run_dir import RunDir

OLD_ID = "wandb-run-id"
"""In trackers/, where a run kept its id when checkpoints did not hold it yet."""


def carried_on(run: RunDir, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """What an attempt begins with, as plain JSON data.

    Args:
        state: of the checkpoint that the attempt goes on from; None for a fresh start. One that was made before
            checkpoints held this goes on with the id in the run's old file, and with no evaluation asked for yet: what
            has a result is finished all the same.
    """
    fresh = {"trackers": {"wandb": _new_id(run)}, "evaluations": Agenda().record()}
    if state is None:
        return fresh
    before = fresh if (old := _old_id(run)) is None else {**fresh, "trackers": {"wandb": old}}
    return {name: state.get(name, before[name]) for name in fresh}


def carried_at(step: int, run: RunDir, epoch: int, config: Config) -> dict[str, Any]:
    """What the checkpoint of ``step`` holds for attempt ``epoch``'s successor; what it calls finished is durable."""
    last = last_result(run, epoch, step)
    fsync_directory(run.evaluations)
    finished = () if last is None else (last,)
    agenda = agenda_of(run, epoch).at(step, config.evaluation, config.trainer.total_steps, finished)
    return {**_begun_with(run, epoch), "evaluations": agenda.record()}


def wandb_id(run: RunDir, epoch: int) -> str:
    """The Weights & Biases run of attempt ``epoch``, of which there are numbers by now; a new one where it has no
    trainer: an evaluation alone."""
    start = read_start(run, epoch, known=True)  # or there will be none
    return _new_id(run) if start is None else str(start.carried["trackers"]["wandb"])


def agenda_of(run: RunDir, epoch: int) -> Agenda:
    """What attempt ``epoch``, which has said how it begins, began with."""
    return Agenda.from_record(_begun_with(run, epoch)["evaluations"])


def _begun_with(run: RunDir, epoch: int) -> Mapping[str, Any]:
    start = read_start(run, epoch, known=True)
    assert start is not None, "engines serve before the trainer said how the attempt begins"
    return start.carried


def _new_id(run: RunDir) -> str:
    return f"{run.root.name}-{secrets.token_hex(8)}"


def _old_id(run: RunDir) -> str | None:
    listed = run.trackers.is_dir() and OLD_ID in names_in(run.trackers)
    return (run.trackers / OLD_ID).read_text(encoding="utf-8") if listed else None
