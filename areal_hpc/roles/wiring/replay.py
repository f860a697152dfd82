"""What a replay works with: another run's archive in place of the ring, and no engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_hpc import checkpoint
from areal_hpc.buffer.archive import archived_steps
from areal_hpc.buffer.epochs import StartRecord, history, write_start
from areal_hpc.buffer.replay import ReplayReader
from areal_hpc.config.schema import Config, ReplayConfig, TrainerBackendName
from areal_hpc.errors import DataError
from areal_hpc.journal import Journal
from areal_hpc.pretrained.architecture import read_architecture
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.fleet import NoEngines, RunCoroutine
from areal_hpc.roles.wiring.training import TrainerSide
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion
from areal_hpc.watermark import Watermark


def make_replay_side(process: RoleProcess, parent: checkpoint.Checkpoint | None, _: RunCoroutine) -> TrainerSide:
    """What rank 0 has; ``parent`` is the replay's own checkpoint, where it is resumed."""

    def begin(version: WeightVersion, carried: Mapping[str, Any]) -> None:
        own = None if parent is None else parent.version
        record = StartRecord(parent=own, version=version, consumed=Watermark(), fingerprint="", carried=carried)
        write_start(process.run, process.epoch, record)

    return TrainerSide(
        reader=_reader(process.config),
        fleet=NoEngines(),
        identity={},
        journal=Journal(process.run, process.epoch),
        begin=begin,
        archiver=None,
    )


def _reader(config: Config) -> ReplayReader:
    """Megatron's routers choose the recorded experts; the reference trainer's by themselves, whatever the record."""
    megatron = config.trainer.backend is TrainerBackendName.MEGATRON
    return ReplayReader(
        source_of(config.replay), read_architecture(Path(config.model.path)).routing if megatron else None
    )


def source_of(replay: ReplayConfig) -> RunDir:
    """The run that is replayed.

    Raises:
        RunDirError: it is not there.
    """
    return RunDir.open(Path(replay.run))


def replay_origin(replay: ReplayConfig) -> checkpoint.Checkpoint | None:
    """The checkpoint of the other run that a replay begins with; None for its model, or where this is no replay.

    Raises:
        CheckpointError: that run has none of this step, or it is damaged.
    """
    if not replay.run or replay.from_step == 0:
        return None
    source = source_of(replay)
    return checkpoint.at_step(source, history(source), replay.from_step)


def last_step(config: Config) -> int:
    """The optimizer step that ends the run."""
    if not config.replay.run:
        return config.trainer.total_steps
    return config.replay.to_step or max(archived_steps(source_of(config.replay)), default=0)


def check_replay(config: Config) -> None:
    """Check that everything that the replay will read is there.

    Raises:
        RunDirError, CheckpointError, DataError: the other run, its checkpoint or one of the steps is not there, or
            another mixture sampled it.
    """
    replay_origin(config.replay)
    archive = source_of(config.replay).archive
    first, last = config.replay.from_step + 1, last_step(config)
    present = archived_steps(source_of(config.replay))
    if missing := [step for step in range(first, max(first, last) + 1) if step not in present]:
        known = f"it has {min(present)} to {max(present)}" if present else "it is empty"
        raise DataError(
            f"{archive} lacks step {missing[0]} of steps {first} to {last} ({known}); choose other steps, or set "
            "archive.every_steps in a run that is to be replayed"
        )
    if Path(config.model.path).is_dir():  # else it is made when the replay begins
        _reader(config).claim(0, WeightVersion(0, first - 1))
