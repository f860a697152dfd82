"""The learning rate as a pure function of the step: warm-up, then constant, linear or cosine."""

from __future__ import annotations

import math

from areal_hpc.config.schema import OptimizerConfig, Schedule


def learning_rate(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of step number ``step``, counted from 1.

    Rises linearly, reaches ``lr`` at ``warmup_steps``, falls from there and reaches ``min_lr`` at ``total_steps``
    exactly, where it stays. The warm-up is part of ``total_steps``.
    """
    assert step >= 1, step
    if step <= optimizer.warmup_steps:
        return optimizer.lr * step / optimizer.warmup_steps
    if optimizer.schedule is Schedule.CONSTANT:
        return optimizer.lr
    if step >= total_steps:
        return optimizer.min_lr
    done = (step - optimizer.warmup_steps) / (total_steps - optimizer.warmup_steps)
    remaining = 1.0 - done if optimizer.schedule is Schedule.LINEAR else 0.5 * (1.0 + math.cos(math.pi * done))
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * remaining
