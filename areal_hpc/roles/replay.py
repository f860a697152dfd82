"""``areal-hpc replay``: train again on what a run has archived, with nothing else running, and compare the weights.

A replay is a run like any other, with a directory, checkpoints and curves of its own; only its trainer reads an archive
instead of the ring, and there are no engines, prompts or rewards. Its configuration is the run's, so that every number
comes out as it did, unless it is overridden on purpose: the same data under another loss.
"""

from __future__ import annotations

import filecmp
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from areal_hpc import checkpoint
from areal_hpc.buffer.epochs import history
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import ArchiveConfig, Config, ReplayConfig
from areal_hpc.errors import CheckpointError, RunDirError
from areal_hpc.exits import EXIT_DONE
from areal_hpc.report import LiveConsole
from areal_hpc.roles.launcher import run_local
from areal_hpc.roles.wiring.replay import last_step
from areal_hpc.run_dir import RunDir


def replay_run(
    source: RunDir, out: Path, *, from_step: int, to_step: int, overrides: Sequence[str], stream: TextIO
) -> int:
    """Train steps ``from_step`` + 1 to ``to_step`` (0: all) of ``source`` again, into the new run directory ``out``.

    Returns:
        the exit code of ``run_local``.

    Raises:
        RunDirError: ``out`` exists.
        UserError, RoleDied: as ``run_local``.
    """
    if out.exists():
        raise RunDirError(f"{out} exists; give a new directory with --out, or remove it")
    config = replay_config(source, out, from_step=from_step, to_step=to_step, overrides=overrides)
    step = last_step(config)
    code = run_local(config, resume=False, console=LiveConsole(step, stream))
    if code == EXIT_DONE:
        print(f"weights of step {step}: {compare(source, RunDir.open(out), step)}", file=stream)
    return code


def replay_config(source: RunDir, out: Path, *, from_step: int, to_step: int, overrides: Sequence[str]) -> Config:
    """The configuration of ``source`` with ``overrides``, as a replay of it in ``out``.

    Raises:
        ConfigError: an override cannot be used, or the steps are no range.
    """
    config = load([source.config], overrides)
    return resolve(
        replace(
            config,
            name=out.name,
            run_root=str(out.parent),
            evaluation=replace(config.evaluation, every_steps=0),
            archive=ArchiveConfig(),
            replay=ReplayConfig(run=str(source.root), from_step=from_step, to_step=to_step),
        )
    )


def compare(source: RunDir, out: RunDir, step: int) -> str:
    """Whether the two runs' checkpoints of ``step`` hold the same weights and optimizer state, in a few words."""
    ours = checkpoint.at_step(out, history(out), step).path
    try:
        theirs = checkpoint.at_step(source, history(source), step).path
    except CheckpointError as error:
        return f"nothing to compare with: {error}"
    names = sorted({path.relative_to(root) for root in (ours, theirs) for path in root.rglob("*.safetensors")})
    different = [
        str(name)
        for name in names
        if not ((ours / name).is_file() and (theirs / name).is_file())
        or not filecmp.cmp(ours / name, theirs / name, shallow=False)
    ]
    return f"{', '.join(different)} differ from {theirs}" if different else f"bit-equal to {theirs}"
