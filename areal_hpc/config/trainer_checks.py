"""How the trainer is split, what its backend can do, and the numbers of its optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from areal_hpc.config.derived import model_ranks
from areal_hpc.config.schema import Attention, Config, Dtype, Recompute, Schedule, TrainerBackendName


def check_trainer_ranks(config: Config) -> Iterator[str]:
    trainer, parallel = config.trainer, config.trainer.parallel
    if trainer.ranks % model_ranks(config):
        yield (
            f"trainer.ranks: {trainer.ranks} is no multiple of tensor * pipeline * context = {model_ranks(config)}; "
            "change trainer.ranks or trainer.parallel"
        )
    expert_ranks = parallel.expert * parallel.expert_tensor * parallel.pipeline
    if trainer.ranks % expert_ranks:
        yield (
            f"trainer.ranks: {trainer.ranks} is no multiple of expert * expert_tensor * pipeline = {expert_ranks}; "
            "change trainer.ranks or trainer.parallel"
        )


def check_virtual_pipeline(config: Config) -> Iterator[str]:
    parallel = config.trainer.parallel
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield (
            f"trainer.parallel.virtual_pipeline: {parallel.virtual_pipeline} chunks need more than one pipeline stage; "
            "set it to 1, or trainer.parallel.pipeline above 1"
        )


def check_reference_backend(config: Config) -> Iterator[str]:
    trainer, parallel = config.trainer, config.trainer.parallel
    split = model_ranks(config) * parallel.expert * parallel.expert_tensor
    if trainer.backend is TrainerBackendName.REFERENCE and split > 1:
        yield (
            "trainer.backend: reference is data-parallel only, but trainer.parallel splits the model; "
            "set trainer.backend=megatron, or every size of trainer.parallel to 1"
        )
    if trainer.backend is TrainerBackendName.REFERENCE and trainer.recompute is not Recompute.NONE:
        yield (
            f"trainer.recompute: reference keeps every activation, so {trainer.recompute} does nothing; set it to "
            "none, or trainer.backend=megatron"
        )


def check_attention(config: Config) -> Iterator[str]:
    """Kernels other than the exact one, and FP8, are of Megatron's backend and of bfloat16."""
    trainer = config.trainer
    whole = trainer.attention in (Attention.FLASH, Attention.ASCEND)
    fits = trainer.backend is TrainerBackendName.MEGATRON and config.model.dtype is Dtype.BFLOAT16
    if trainer.attention is not Attention.EXACT and not (fits and (trainer.parallel.context == 1 or not whole)):
        yield (
            f"trainer.attention: {trainer.attention} needs trainer.backend=megatron, model.dtype=bfloat16"
            f"{' and trainer.parallel.context=1' if whole else ''}; set these, or trainer.attention to exact"
        )
    if trainer.fp8 and not fits:
        yield (
            "trainer.fp8: needs trainer.backend=megatron and model.dtype=bfloat16; set these, or trainer.fp8 to false"
        )


def check_minibatches(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.minibatches > algorithm.groups_per_step:
        yield (
            f"algorithm.minibatches: {algorithm.minibatches} exceeds the {algorithm.groups_per_step} groups of a step; "
            "lower it, or raise algorithm.groups_per_step"
        )


def check_microbatch(config: Config) -> Iterator[str]:
    limit = config.model.max_tokens
    budget = config.trainer.tokens_per_microbatch * config.trainer.parallel.context
    if limit > budget:
        yield (
            f"trainer.tokens_per_microbatch: a sequence of model.max_tokens {limit} exceeds a micro-batch of {budget} "
            "tokens (times trainer.parallel.context); raise it, or lower model.max_tokens"
        )


def check_schedule(config: Config) -> Iterator[str]:
    optimizer, steps = config.trainer.optimizer, config.trainer.total_steps
    if optimizer.warmup_steps >= steps:
        yield (
            f"trainer.optimizer.warmup_steps: {optimizer.warmup_steps} is the whole run of {steps} steps; "
            "lower it below trainer.total_steps"
        )
    if optimizer.min_lr > optimizer.lr:
        yield f"trainer.optimizer.min_lr: {optimizer.min_lr} is above trainer.optimizer.lr {optimizer.lr}; lower it"
    if optimizer.min_lr and optimizer.schedule is Schedule.CONSTANT:
        yield (
            f"trainer.optimizer.min_lr: {optimizer.min_lr} is where a falling learning rate ends, and "
            "trainer.optimizer.schedule is constant; set that to linear or cosine, or leave min_lr out"
        )
