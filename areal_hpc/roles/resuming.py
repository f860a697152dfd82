"""``areal-hpc resume RUN``: a run goes on from what its directory holds, as it ran last: in a job, or on one machine.

configuration   config.yaml, which each attempt writes; or of a submission that no attempt has followed, its copy
where           the recorded shape: `local` is this machine, any other is a new Slurm job
directory       the one it was begun in, since modules of rewards and tasks may lie there
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.buffer.epochs import claimed_by, newest_epoch
from areal_hpc.config.cluster import Shape
from areal_hpc.config.keys import with_value
from areal_hpc.config.load import load
from areal_hpc.config.paths import anchored
from areal_hpc.config.resolve import read_config
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError, RunDirError
from areal_hpc.liveness.job import newest_submission
from areal_hpc.liveness.stopping import state_of
from areal_hpc.run_dir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """How a run is to go on."""

    config: Config
    directory: Path
    """Where its processes are to begin."""

    @property
    def is_submitted(self) -> bool:
        """Whether Slurm is to run it."""
        return self.config.cluster.shape is not Shape.LOCAL


def resumption(run: RunDir, overrides: Sequence[str]) -> Resumption:
    """What is recorded of a run, with ``overrides``, whose paths are taken from where the command is typed.

    Raises:
        RunDirError: it has ended for good, is no training run, was renamed, or began in a directory that is gone.
        ConfigError: an override cannot be used.
    """
    path, told = _recorded(run)
    before = recorded(path)
    if before.evaluation.checkpoint:
        raise RunDirError(f"{run.root} is an evaluation, which has no checkpoints; type `areal-hpc eval` again")
    root = run.root if run.root.name == before.name else run.root.resolve()
    if root.name != before.name:
        raise RunDirError(f"{run.root} is the run {before.name} under another name; call its directory so again")
    config = anchored(read_config([path], overrides), Path.cwd())
    config = with_value(config, "run_root", str(root.parent))  # it may have been moved
    _refuse_finished(run, config)
    return Resumption(config=config, directory=_directory(run, told))


def recorded(path: Path) -> Config:
    """The configuration that a run has kept at ``path``.

    Raises:
        ConfigError: it is gone, or damaged; says where else it is.
    """
    try:
        return load([path])
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nthe run itself wrote {path}; restore it, each of its checkpoints holds a copy"
        ) from error


def _refuse_finished(run: RunDir, config: Config) -> None:
    newest = newest_epoch(run)
    if newest == 0 or state_of(run, newest)[0] != "finished":
        return
    if config.trainer.total_steps <= (done := load([run.config]).trainer.total_steps):
        raise RunDirError(f"{run.root} has finished its {done} steps; raise trainer.total_steps to go on")


def _recorded(run: RunDir) -> tuple[Path, Mapping[str, Any]]:
    """The newest configuration, and what was said by who began with it."""
    newest, submission = newest_epoch(run), newest_submission(run)
    if submission is not None and submission.record.get("after", 0) >= newest:
        return submission.config, submission.record.get("submitter", {})
    return run.config, claimed_by(run, newest) if newest else {}


def _directory(run: RunDir, told: Mapping[str, Any]) -> Path:
    directory = Path(told.get("directory", Path.cwd()))
    if not (os.access(directory, os.X_OK) and directory.is_dir()):
        raise RunDirError(
            f"{run.root} was begun in {directory}, which is gone, or not yours to enter; type `areal-hpc run "
            f"{shlex.quote(str(run.config))} --resume`, or `submit`, where the modules are that it needs"
        )
    return directory
