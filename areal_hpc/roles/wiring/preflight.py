"""What can be found wrong before a run directory exists and before the first process starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from areal_hpc.config.recipes import is_offline, reference_of
from areal_hpc.config.schema import Config, TrainerBackendName
from areal_hpc.dialogue.renderer import load_tokenizer
from areal_hpc.errors import ConfigError, DataError
from areal_hpc.prompts import check_rows, first_prompts, open_dataset
from areal_hpc.roles.wiring.agents import has_agent, make_agent
from areal_hpc.roles.wiring.dotted import dotted
from areal_hpc.roles.wiring.models import check_model_path
from areal_hpc.roles.wiring.servers import check_server
from areal_hpc.rollout.reward_pool import RewardPool
from areal_hpc.training.megatron.requirements import check_model, require_kernels, require_megatron


def preflight(config: Config) -> None:
    """Open and import what the processes of the run will need.

    Raises:
        DataError: a data set, one of its rows, or the model directory cannot be used.
        ConfigError: this version cannot start a backend; a workflow, reward, loss or model's maker cannot be imported.
    """
    _refuse_what_cannot_start(config)
    check_model_path(config)
    if Path(config.model.path).is_dir():
        check_made(config)
    if config.algorithm.loss:
        dotted(config.algorithm.loss, "algorithm.loss")
    if config.replay.run:
        from areal_hpc.roles.wiring.replay import check_replay  # late, as of a trainer, which imports torch

        check_replay(config)
    if config.replay.run or is_offline(config.algorithm):
        return
    if not config.evaluation.checkpoint:
        check_rows(open_dataset(config.prompts, "train", config.seed), config.prompts)
    if config.evaluation.every_steps or config.evaluation.checkpoint:
        evaluation = open_dataset(config.prompts, "eval", config.seed)
        if not first_prompts(evaluation, config.prompts, config.evaluation.num_prompts):
            raise DataError(f"prompts.eval: {config.prompts.eval} has no rows; give a data set that has some")
    dotted(config.rollout.workflow, "rollout.workflow")
    if has_agent(config):
        make_agent(config)
    if config.rollout.reward:
        asyncio.run(_load_reward(config))


def _refuse_what_cannot_start(config: Config) -> None:
    check_server(config)
    if config.trainer.backend is TrainerBackendName.MEGATRON:
        require_megatron()
        require_kernels(config.trainer)


def check_made(config: Config) -> None:
    """What can be said only of a model that is there.

    Raises:
        DataError: it does not go with the reference model, or with the answers that an offline algorithm learns from.
        ConfigError: it cannot be split as the trainer is to, or has no experts whose routing could be replayed.
    """
    if config.evaluation.checkpoint:
        return
    if is_offline(config.algorithm):
        from areal_hpc.roles.wiring.offline import check_answers

        check_answers(config)
    if reference := reference_of(config.algorithm):
        check_vocabulary(config.model.path, reference)
    if config.trainer.backend is TrainerBackendName.MEGATRON:
        architecture = check_model(
            Path(config.model.path), config.trainer.parallel, config.model.lora, fp8=config.trainer.fp8
        )
        if config.model.routing_replay and architecture.experts is None:
            raise ConfigError(
                f"model.routing_replay: {config.model.path} has no experts to choose among; set it to false"
            )


def check_vocabulary(model: str, reference: str) -> None:
    """Log-probs of two models can be compared only where a token id means the same to both.

    Raises:
        DataError: it does not, or one of the two has no tokenizer.
    """
    ours, theirs = (load_tokenizer(Path(path)).get_vocab() for path in (model, reference))
    if ours != theirs:
        different = sorted(dict(ours.items() ^ theirs.items()))
        raise DataError(
            f"the reference model {reference} and {model} have different vocabularies: {len(different)} tokens, such "
            f"as {different[0]!r}; take a model of the same family"
        )


async def _load_reward(config: Config) -> None:
    """In a process of its own, as the run will: it is a stranger's code."""
    pool = RewardPool(config.rollout.reward, workers=1, timeout_s=config.rollout.reward_timeout_s)
    try:
        await pool.start()
    finally:
        await pool.close()
