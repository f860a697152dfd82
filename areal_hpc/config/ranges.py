"""The interval of every number in the configuration, and which numbers are outside of theirs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

from areal_hpc.config.keys import value_of
from areal_hpc.config.schema import Config

RANGES: Final[Mapping[str, str]] = {
    "model.max_tokens": "[2, inf)",
    "prompts.limit": "[0, inf)",
    "rollout.group_size": "[1, inf)",
    "rollout.workers": "[1, inf)",
    "rollout.concurrency": "[1, inf)",
    "rollout.timeout_s": "(0, inf)",
    "rollout.attempts": "[1, inf)",
    "rollout.reward_workers": "[1, inf)",
    "rollout.reward_timeout_s": "(0, inf)",
    "rollout.sampling.max_new_tokens": "[1, inf)",
    "rollout.sampling.temperature": "(0, inf)",
    "rollout.sampling.top_p": "(0, 1]",
    "rollout.sampling.top_k": "[-1, inf)",
    "rollout.sampling.min_p": "[0, 1]",
    "rollout.filter.max_overlong_fraction": "[0, 1]",
    "rollout.filter.min_group_size": "[1, inf)",
    "trainer.total_steps": "[1, inf)",
    "trainer.ranks": "[1, inf)",
    "trainer.parallel.tensor": "[1, inf)",
    "trainer.parallel.pipeline": "[1, inf)",
    "trainer.parallel.virtual_pipeline": "[1, inf)",
    "trainer.parallel.context": "[1, inf)",
    "trainer.parallel.expert": "[1, inf)",
    "trainer.parallel.expert_tensor": "[1, inf)",
    "trainer.optimizer.lr": "(0, inf)",
    "trainer.optimizer.beta1": "[0, 1)",
    "trainer.optimizer.beta2": "[0, 1)",
    "trainer.optimizer.eps": "(0, inf)",
    "trainer.optimizer.weight_decay": "[0, inf)",
    "trainer.optimizer.grad_clip": "(0, inf)",
    "trainer.optimizer.warmup_steps": "[0, inf)",
    "trainer.optimizer.min_lr": "[0, inf)",
    "trainer.tokens_per_microbatch": "[1, inf)",
    "trainer.threads": "[1, inf)",
    "seed": "[0, 4294967296)",
    "buffer.max_staleness": "[0, inf)",
    "buffer.segment_mb": "(0, inf)",
    "buffer.commit_s": "[0, inf)",
    "buffer.min_free_mb": "[0, inf)",
    "algorithm.groups_per_step": "[1, inf)",
    "algorithm.minibatches": "[1, inf)",
    "algorithm.clip_low": "(0, 1]",
    "algorithm.clip_high": "(0, inf)",
    "algorithm.dual_clip": "(1, inf)",
    "algorithm.length_normaliser": "[0, inf)",
    "algorithm.sapo_tau_positive": "(0, inf)",
    "algorithm.sapo_tau_negative": "(0, inf)",
    "algorithm.m2_threshold": "(0, inf)",
    "algorithm.rejection_sampling.lower": "(-inf, inf)",
    "algorithm.rejection_sampling.upper": "(-inf, inf)",
    "algorithm.reward_scale": "(-inf, inf)",
    "algorithm.reward_bias": "(-inf, inf)",
    "algorithm.reward_clip": "(0, inf)",
    "algorithm.overlong.tokens": "[0, inf)",
    "algorithm.overlong.factor": "[0, inf)",
    "algorithm.reward_norm.eps": "[0, inf)",
    "algorithm.adv_norm.eps": "[0, inf)",
    "algorithm.gae.discount": "(0, 1]",
    "algorithm.gae.lam": "[0, 1]",
    "algorithm.gae.alpha": "(0, inf)",
    "algorithm.kl.coef": "[0, inf)",
    "algorithm.kl.target": "(0, inf)",
    "algorithm.kl.horizon": "[1, inf)",
    "algorithm.critic.lr_scale": "(0, inf)",
    "algorithm.critic.value_clip": "(0, inf)",
    "algorithm.dpo.beta": "(0, inf)",
    "agent.max_turns": "[1, inf)",
    "agent.discount": "[0, 1]",
    "agent.idle_s": "(0, inf)",
    "generation.replicas": "[1, inf)",
    "generation.tensor_parallel": "[1, inf)",
    "generation.pipeline_parallel": "[1, inf)",
    "generation.max_running": "[1, inf)",
    "generation.max_requests": "[0, inf)",
    "generation.max_outstanding_tokens": "[0, inf)",
    "generation.threads": "[1, inf)",
    "weights.bucket_mb": "(0, inf)",
    "weights.whole_every": "[1, inf)",
    "weights.min_mb_per_s": "[0, inf)",
    "evaluation.every_steps": "[0, inf)",
    "evaluation.num_prompts": "[1, inf)",
    "evaluation.samples": "[1, inf)",
    "evaluation.temperature": "[0, inf)",
    "evaluation.pass_reward": "(-inf, inf)",
    "evaluation.step": "[0, inf)",
    "checkpoint.every_steps": "[1, inf)",
    "checkpoint.keep": "[1, inf)",
    "checkpoint.keep_every": "[0, inf)",
    "archive.every_steps": "[0, inf)",
    "replay.from_step": "[0, inf)",
    "replay.to_step": "[0, inf)",
    "limits.start_s": "(0, inf)",
    "limits.starve_s": "(0, inf)",
    "limits.weight_update_s": "(0, inf)",
    "limits.restarts": "[0, inf)",
    "limits.restart_window_s": "(0, inf)",
    "limits.attempts": "[0, inf)",
    "limits.checkpoint_s": "(0, inf)",
    "limits.quiet_s": "[1, inf)",
    "limits.engine_s": "[0, inf)",
    "limits.stall_s": "[1, inf)",
    "limits.stop_s": "(2, inf)",
    "cluster.all.nodes": "[1, inf)",
    "cluster.all.cpus": "[0, inf)",
    "cluster.all.gpus": "[0, inf)",
    "cluster.trainer.nodes": "[0, inf)",
    "cluster.trainer.cpus": "[0, inf)",
    "cluster.trainer.gpus": "[0, inf)",
    "cluster.generation.nodes": "[0, inf)",
    "cluster.generation.cpus": "[0, inf)",
    "cluster.generation.gpus": "[0, inf)",
    "cluster.rollout.nodes": "[0, inf)",
    "cluster.rollout.cpus": "[0, inf)",
    "cluster.rollout.gpus": "[0, inf)",
    "cluster.signal_lead_s": "[0, inf)",
}
"""As mathematicians write it: brackets include the end, parentheses do not."""


def out_of_range(config: Config) -> Iterator[tuple[str, str]]:
    """Key and problem for each number outside of its interval; null, and what is no number, is in every one."""
    for name, interval in RANGES.items():
        number = value_of(config, name)
        if isinstance(number, int | float) and not _within(number, interval):
            yield name, f"{name}: {number} is not in {interval}; choose a value inside"


def _within(number: float, interval: str) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    above = number >= low if interval[0] == "[" else number > low
    below = number <= high if interval[-1] == "]" else number < high
    return above and below and math.isfinite(number)
