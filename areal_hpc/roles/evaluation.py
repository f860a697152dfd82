"""``areal-hpc eval``: how good a checkpoint is, measured on engines as a run has them, with no trainer.

    checkpoint of a run ── export ──> OUT/model ─┐
    Hugging Face directory ──────────────────────┴─> engines start with it ── the evaluator asks them once ── a table

An evaluation is a run like any other, with a directory, logs and a status of its own; only engines and the evaluator
are there, and they do what they do beside a trainer. Prompts, reward, sampling and ``evaluation.*`` are those of the
configuration, so that one checkpoint can be measured in many ways, and many checkpoints in one. Typed in a Slurm job
(``sbatch/eval.sbatch``) it has that job's nodes; elsewhere this machine.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from areal_hpc import checkpoint
from areal_hpc.buffer.epochs import history
from areal_hpc.cluster.environment import allocation, in_job
from areal_hpc.config.cluster import ClusterConfig, ComponentConfig, Shape, inherited
from areal_hpc.config.lora import NO_LORA
from areal_hpc.config.recipes import is_offline
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import ArchiveConfig, Config, ReplayConfig
from areal_hpc.errors import CheckpointError, ConfigError, DataError, RunDirError
from areal_hpc.exits import EXIT_DONE, EXIT_FAILED
from areal_hpc.fs import read_json
from areal_hpc.report import LiveConsole
from areal_hpc.roles.launcher import run_local
from areal_hpc.run_dir import RunDir

log = logging.getLogger(__name__)


def evaluate(config: Config, what: Path, step: int | None, out: Path | None, stream: TextIO) -> int:
    """Evaluate the run or Hugging Face directory ``what`` into the new run directory ``out``.

    In a Slurm job, and with a shape of one, its nodes are used; one that Slurm has requeued begins again in ``out``.

    Args:
        step: of the run's checkpoint; the newest, if None.
        out: beside the configuration's own run directory, if None.

    Returns:
        the exit code of ``run_local``, EXIT_FAILED also where not one sample succeeded.

    Raises:
        RunDirError: ``out`` exists.
        UserError, RoleDied: as ``evaluation_config`` and ``run_local``.
    """
    has_job = in_job(os.environ) and config.cluster.shape is not Shape.LOCAL
    job = allocation(os.environ) if has_job else None
    config = evaluation_config(config, what.resolve(), step, out, num_nodes=job.num_nodes if job else 0)
    root = Path(config.run_root) / config.name
    again = job is not None and job.continues
    if root.exists() and not again:
        raise RunDirError(f"{root} exists; give a new directory with --out, or remove it")
    log.info("evaluating %s; `areal-hpc why %s` tells how far it is", config.evaluation.checkpoint, RunDir(root).typed)
    code = run_local(config, resume=again, takeover=again, console=LiveConsole(0, stream, table=False))
    if code == EXIT_DONE and "reason" in read_json(RunDir(root).evaluation(config.evaluation.step)):
        return EXIT_FAILED
    return code


def evaluation_config(config: Config, what: Path, step: int | None, out: Path | None, num_nodes: int = 0) -> Config:
    """``config`` as an evaluation of ``what``, which is the same wherever it is looked at from.

    Args:
        num_nodes: of the Slurm job that it has; 0 is this machine.

    Raises:
        ConfigError: it generates nothing, has no prompts to evaluate on, or ``step`` is of no run.
        CheckpointError: the run has no such checkpoint.
        DataError: ``what`` is neither a run nor a Hugging Face directory.
    """
    if is_offline(config.algorithm):
        raise ConfigError(
            f"algorithm.name = {config.algorithm.name} has no reward and samples nothing; give a configuration with "
            "rollout.reward and an algorithm that generates"
        )
    if not config.prompts.eval:
        raise ConfigError("prompts.eval: there is nothing to evaluate on; set it to a data set with answers")
    is_run = (what / "config.yaml").is_file()
    step = _step_of(RunDir.open(what), step) if is_run else _no_step(what, step)
    place = (out or Path(config.run_root) / f"{config.name}-eval-{what.name}{f'-{step}' if is_run else ''}").absolute()
    measured = replace(
        config,
        name=place.name,
        run_root=str(place.parent),
        model=replace(config.model, path=str(what), maker=""),
        evaluation=replace(config.evaluation, checkpoint=str(what), step=step),
        archive=ArchiveConfig(),
        replay=ReplayConfig(),
        cluster=_cluster_of(config.cluster, num_nodes),
    )
    if is_run:
        model = replace(measured.model, path=str(RunDir(place).model), lora=NO_LORA)  # whose adapters are merged
        measured = replace(measured, model=model)
    return resolve(measured)


def _cluster_of(cluster: ClusterConfig, num_nodes: int) -> ClusterConfig:
    """The shape of a training run has nodes for a trainer; an evaluation has engines on all that there are."""
    if not num_nodes:
        return ClusterConfig(shape=Shape.LOCAL)
    engines = replace(inherited(cluster.generation, cluster.all), nodes=num_nodes)
    none = ComponentConfig()
    return replace(cluster, shape=Shape.SPLIT, all=engines, trainer=none, generation=none, rollout=none)


def _step_of(run: RunDir, step: int | None) -> int:
    """The step of the checkpoint that is meant, from the names alone: exporting it reads and verifies it."""
    steps = checkpoint.steps_of(run, history(run))
    if not steps:
        raise CheckpointError(f"{run.checkpoints} has no checkpoint yet; stop the run, or wait for its first one")
    if step is not None and step not in steps:
        there_are = ", ".join(map(str, steps))
        raise CheckpointError(f"{run.checkpoints} has no checkpoint of step {step}; there are: {there_are}")
    return steps[-1] if step is None else step


def _no_step(what: Path, step: int | None) -> int:
    if not (what / "config.json").is_file():
        raise DataError(
            f"--checkpoint: {what} is neither a run directory nor a Hugging Face directory; of a checkpoint of a run "
            "give the run, and its step with --step"
        )
    if step is not None:
        raise ConfigError(f"--step: {what} is a Hugging Face directory, which has no steps; leave --step out")
    return 0
