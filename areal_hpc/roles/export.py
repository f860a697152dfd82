"""``areal-hpc export``: a checkpoint as a Hugging Face directory, from files alone; the run need not be living.

Of a run that trains adapters these alone, as ``peft`` has them, or with ``--merged`` the model with them in it.

    checkpoint of the surviving history ──> the reference backend, on the CPU ──> save_pretrained, in the names and
    model.path: architecture, tokenizer ──>                                       shapes of the model's own family
    ... that several ranks have written ──> one weight after the other, without any model, in the same names
    ... that is of adapters alone       ──> these, without any model; merged they go by the reference backend

What is written are the weights as the engines served them: rounded to ``model.dtype``, while the checkpoint holds the
float32 masters as well. The directory appears whole or not at all, and survives a power cut.
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import replace
from pathlib import Path

from areal_hpc import checkpoint
from areal_hpc.buffer.epochs import history
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config, ParallelConfig, TrainerBackendName
from areal_hpc.errors import CheckpointError, DataError
from areal_hpc.fs import fsync_directory, make_durable
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion

POLICY = "give it as model.path to any run or engine"
REWARD_MODEL = "give it as rollout.reward to any run, written with a /"


def export(run: RunDir, step: int | None, target: Path, *, merged: bool = False) -> tuple[WeightVersion, str]:
    """Write the checkpoint of ``step`` (the newest, if None) into ``target``, which is not there or empty.

    Args:
        merged: adapters, where the run trains some, become part of the weights.

    Returns:
        Which weights they are, and what they are good for, in words.

    Raises:
        DataError: ``target`` holds something, or the model that the run began with is not where it was.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DataError(f"{target} is there already, and not an empty directory; give another name")
    config = load([run.config])
    if not Path(config.model.path).is_dir():
        raise DataError(
            f"model.path: there is no directory {Path(config.model.path).absolute()}; architecture and tokenizer come "
            "from it, so restore it"
        )
    found = find(run, step)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        _write(config, found.path, temporary, merged=merged)
        make_durable(temporary)  # who has exported a checkpoint may delete the run
        _give_name(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone by its name, if all went well
    return found.version, _use(config, merged=merged)


def _use(config: Config, *, merged: bool) -> str:
    if config.model.lora.rank and not merged:
        return f"adapters, which peft loads upon {config.model.path}; with --merged it is a model"
    return REWARD_MODEL if config.algorithm.name == "reward_model" else POLICY


def _give_name(temporary: Path, target: Path) -> None:
    """Of several exports to one name at a time the first that is whole gets it.

    Raises:
        DataError: this one was not the first.
    """
    try:
        temporary.rename(target)
    except OSError as error:
        if not target.exists():
            raise
        raise DataError(f"{target} was written by somebody else meanwhile; give another name") from error
    fsync_directory(target.parent)


def find(run: RunDir, step: int | None) -> checkpoint.Checkpoint:
    """The checkpoint of ``step``, or the newest one, of what the run still stands on; read and verified.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    lineage = history(run)
    if step is not None:
        return checkpoint.at_step(run, lineage, step)
    if (found := checkpoint.newest(run, lineage)) is None:
        raise CheckpointError(f"{run.checkpoints} has no checkpoint yet; stop the run, or wait for its first one")
    return found


def _write(config: Config, source: Path, target: Path, *, merged: bool) -> None:
    from areal_hpc.roles.wiring.training import make_backend
    from areal_hpc.training.export import write_adapters, write_checkpoint
    from areal_hpc.training.lora import saved_adapters
    from areal_hpc.training.ranks import Ranks
    from areal_hpc.training.shards import SHARDS, policy_weights

    lora = config.model.lora
    if lora.rank and not merged:
        write_adapters(saved_adapters(source, config.model.dtype), Path(config.model.path), target, lora)
        return
    if not lora.rank and (source / SHARDS).is_dir():
        weights, scorer = policy_weights(source / SHARDS, config.model.dtype), config.algorithm.name == "reward_model"
        write_checkpoint(weights, Path(config.model.path), target, scorer=scorer)
        return
    alone = replace(config.trainer, ranks=1, backend=TrainerBackendName.REFERENCE, parallel=ParallelConfig())
    # Its checkpoint fits any number of ranks.
    backend = make_backend(replace(config, trainer=alone), Ranks(), whole=True)
    backend.load(str(source))
    backend.export(str(target))
