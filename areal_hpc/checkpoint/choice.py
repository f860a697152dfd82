"""Which checkpoint an attempt goes on from."""

from __future__ import annotations

import logging

from areal_hpc.checkpoint.files import PENDING_NAME, Checkpoint, Lineage, counts, listed, verify
from areal_hpc.errors import CheckpointError
from areal_hpc.fs import names_in
from areal_hpc.run_dir import RunDir

logger = logging.getLogger(__name__)


def newest(run: RunDir, lineage: Lineage) -> Checkpoint | None:
    """The newest checkpoint of the surviving history that verifies; each one passed over on the way is logged.

    Returns:
        None where no attempt has ever made a checkpoint: a fresh start is right.

    Raises:
        CheckpointError: there is something in the directory, or was, and nothing that can be loaded; says what is wrong
            with each.
    """
    problems = []
    for version, path in listed(run):
        if not counts(version, lineage):
            problem = f"{path} does not belong to the surviving history of this run"
        else:
            try:
                return verify(path)
            except CheckpointError as error:
                problem = str(error)
        logger.warning("checkpoint passed over: %s", problem)
        problems.append(problem)
    present = sorted(name for name in names_in(run.checkpoints) if not PENDING_NAME.fullmatch(name))
    gone = [f"step {step} of attempt {epoch}" for epoch, step in sorted(lineage.items()) if step is not None]
    if present or gone:
        found = "; ".join(problems) or ", ".join(present) or f"nothing, and the run went on from {gone[-1]} before"
        raise CheckpointError(
            f"{run.checkpoints} holds no checkpoint that can be loaded: {found}. Restore one, or move the run "
            "directory away to start from the beginning"
        )
    return None


def at_step(run: RunDir, lineage: Lineage, step: int) -> Checkpoint:
    """The checkpoint of exactly ``step`` in the surviving history; never another one in its place.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    for version, path in listed(run):
        if version.step == step and counts(version, lineage):
            return verify(path)
    steps = ", ".join(map(str, steps_of(run, lineage))) or "none"
    raise CheckpointError(f"{run.checkpoints} has no checkpoint of step {step}; there are: {steps}")


def steps_of(run: RunDir, lineage: Lineage) -> list[int]:
    """Steps that the surviving history has a checkpoint of, ascending; by name, unread."""
    return sorted({version.step for version, _ in listed(run) if counts(version, lineage)})
