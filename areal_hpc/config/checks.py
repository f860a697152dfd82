"""Cross-checks: what no single key can know. Each yields its problems, which end with what to do.

They run after the ranges have passed, so every size is positive and may divide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from areal_hpc.config.algorithm import Level
from areal_hpc.config.algorithm_checks import check_algorithm
from areal_hpc.config.cluster import Shape, inherited, seconds_of
from areal_hpc.config.cluster_checks import check_container, check_replicas, check_shared_nodes
from areal_hpc.config.derived import (
    exported_model,
    largest_group_bytes,
    leave_lead_s,
    ring_capacity,
    sbatch_options,
    signal_lead_s,
    smallest_batch_bytes,
    time_limit_s,
)
from areal_hpc.config.engine_checks import check_engine_ranks, check_server_args
from areal_hpc.config.keys import value_of
from areal_hpc.config.lora_checks import check_lora
from areal_hpc.config.offline_checks import check_conversations, check_offline, check_pairs
from areal_hpc.config.recipes import RECIPES, is_offline
from areal_hpc.config.routing_checks import check_routing
from areal_hpc.config.schema import Config, EngineName, RolloutConfig, TrainerBackendName
from areal_hpc.config.trainer_checks import (
    check_attention,
    check_microbatch,
    check_minibatches,
    check_reference_backend,
    check_schedule,
    check_trainer_ranks,
    check_virtual_pipeline,
)
from areal_hpc.errors import ConfigError
from areal_hpc.run_dir import NAME

NOT_EMPTY = ("model.path", "prompts.train", "rollout.workflow", "run_root")
DOTTED_PATH = re.compile(r"\w+(\.\w+)*:\w+")
Check = Callable[[Config], Iterator[str]]


def check_name(config: Config) -> Iterator[str]:
    if not NAME.fullmatch(config.name):
        yield (
            f"name: {config.name!r} cannot be a directory's name; use letters, digits, '.', '_', '-', "
            "at most 100, a letter or digit first"
        )


def check_not_empty(config: Config) -> Iterator[str]:
    for name in NOT_EMPTY:
        if not value_of(config, name):
            yield f"{name}: empty; give a value"


def check_dotted_paths(config: Config) -> Iterator[str]:
    for name in ("model.maker", "rollout.reward", "rollout.workflow", "agent.python", "algorithm.loss"):
        path = value_of(config, name)
        directory = name == "rollout.reward" and "/" in path
        if path and not directory and not DOTTED_PATH.fullmatch(path):
            also = ", or the directory of a reward model with a /" if name == "rollout.reward" else ""
            yield f"{name}: {path!r} is no dotted path; write it as module:name{also}"


def check_reward(config: Config) -> Iterator[str]:
    if not config.rollout.reward and not config.agent.online.enabled:
        yield "rollout.reward: required but missing; set it to a function, module:name, or a reward model's directory"


def check_agent(config: Config) -> Iterator[str]:
    agent, default = config.agent, RolloutConfig(reward="").workflow
    if agent.python and agent.command:
        yield "agent: both `python` and `command` are given; keep one of the two"
    if (agent.python or agent.command) and config.rollout.workflow != default:
        yield f"rollout.workflow: an agent runs the episodes, so {config.rollout.workflow} would not; leave it out"


def check_online(config: Config) -> Iterator[str]:
    if not config.agent.online.enabled:
        return
    if config.agent.python or config.agent.command:
        yield "agent.online.enabled: agents in daily use run themselves; leave agent.python and agent.command out"
    if config.rollout.workers != 1:
        yield f"rollout.workers: {config.rollout.workers} would be as many services, and agents know one; set it to 1"
    if config.evaluation.every_steps and not config.rollout.reward:
        yield "evaluation.every_steps: no rollout.reward measures anything; set it, or evaluation.every_steps to 0"
    if config.deterministic:
        yield "deterministic: what people ask, and when, is not; set it to false, or agent.online.enabled to false"
    if is_offline(config.algorithm):
        yield f"agent.online.enabled: algorithm.name {config.algorithm.name} learns from a data set; choose another"


def check_wandb_mode(config: Config) -> Iterator[str]:
    modes = ("offline", "online", "disabled")
    if config.telemetry.wandb_mode not in modes:
        yield f"telemetry.wandb_mode: {config.telemetry.wandb_mode!r} is no mode; choose one of {', '.join(modes)}"


def check_algorithm_settings(config: Config) -> Iterator[str]:
    try:
        check_algorithm(config.algorithm, config.rollout.group_size, config.buffer.max_staleness)
    except ConfigError as error:
        yield str(error)


def check_groups(config: Config) -> Iterator[str]:
    size, keep = config.rollout.group_size, config.rollout.filter
    norm = config.algorithm.reward_norm
    if keep.min_group_size < 2 <= size and Level.GROUP in (norm.mean, norm.std):
        yield (
            "rollout.filter.min_group_size: 1 lets groups of one through, where a relative advantage is 0; "
            "set it to at least 2, or algorithm.reward_norm.mean and .std to batch or none"
        )
    if keep.min_group_size > size:
        yield (
            f"rollout.filter.min_group_size: {keep.min_group_size} refuses every group of rollout.group_size {size}; "
            "lower it"
        )
    if keep.zero_variance and size == 1:
        yield "rollout.filter.zero_variance: true refuses every group of one episode; set it to false"


def check_lengths(config: Config) -> Iterator[str]:
    limit, answer = config.model.max_tokens, config.rollout.sampling.max_new_tokens
    if answer >= limit:
        yield (
            f"rollout.sampling.max_new_tokens: {answer} leaves no room for a prompt in model.max_tokens {limit}; "
            "lower it, or raise model.max_tokens"
        )
    if (zone := config.algorithm.overlong.tokens) > answer:
        yield (
            f"algorithm.overlong.tokens: a penalty zone of {zone} tokens is longer than "
            f"rollout.sampling.max_new_tokens {answer}; lower it"
        )


def check_top_k(config: Config) -> Iterator[str]:
    if config.rollout.sampling.top_k == 0:
        yield "rollout.sampling.top_k: 0 keeps no token; write -1 for off"


def check_ring(config: Config) -> Iterator[str]:
    capacity = ring_capacity(config)
    if config.rollout.workers > capacity:
        yield (
            f"rollout.workers: {config.rollout.workers} workers share (buffer.max_staleness + 1) * "
            f"algorithm.groups_per_step = {capacity} groups, so some could never start one; lower rollout.workers"
        )


def check_quota(config: Config) -> Iterator[str]:
    least = smallest_batch_bytes(config) / (1 << 20)
    if config.buffer.max_mb is not None and config.buffer.max_mb < least:
        yield (
            f"buffer.max_mb: {config.buffer.max_mb:g} MiB cannot hold the algorithm.groups_per_step "
            f"{config.algorithm.groups_per_step} groups of one step, which take {least:.3g} MiB if every answer is one "
            f"token, and {config.algorithm.groups_per_step * largest_group_bytes(config) / (1 << 20):.3g} MiB at most; "
            "raise it"
        )


def check_time_limits(config: Config) -> Iterator[str]:
    rollout, limits = config.rollout, config.limits
    if rollout.reward_timeout_s > rollout.timeout_s:
        yield (
            f"rollout.reward_timeout_s: {rollout.reward_timeout_s:g} s is longer than the whole episode may take, "
            f"rollout.timeout_s {rollout.timeout_s:g} s; lower it"
        )
    if limits.starve_s < rollout.timeout_s:
        yield (
            f"limits.starve_s: {limits.starve_s:g} s ends the run while an episode may still take rollout.timeout_s "
            f"{rollout.timeout_s:g} s; raise it, or lower rollout.timeout_s"
        )
    if limits.stall_s < limits.quiet_s:
        yield (
            f"limits.stall_s: {limits.stall_s:g} s ends a stalled attempt before limits.quiet_s {limits.quiet_s:g} s "
            "has let it be named; raise it, or lower limits.quiet_s"
        )
    for name, whom in (("engine_s", "engine"), ("worker_s", "worker")):
        if 0 < (limit_s := getattr(limits, name)) < limits.quiet_s:
            yield (
                f"limits.{name}: {limit_s:g} s replaces a hung {whom} before limits.quiet_s {limits.quiet_s:g} s has "
                "let it be named; raise it, or set it to 0"
            )


def check_evaluation(config: Config) -> Iterator[str]:
    if config.evaluation.every_steps and not config.prompts.eval:
        yield (
            "evaluation.every_steps: there is nothing to evaluate on; set prompts.eval, or evaluation.every_steps to 0"
        )


def check_evaluated(config: Config) -> Iterator[str]:
    """What `areal-hpc eval` sets belongs together: else another model would be measured than is named."""
    evaluated = config.evaluation.checkpoint
    if evaluated and config.model.path not in (evaluated, exported_model(config)):
        yield (
            f"evaluation.checkpoint: {evaluated} is not what model.path {config.model.path} holds; leave the key out, "
            f"and evaluate with `areal-hpc eval ... --checkpoint {evaluated}`"
        )
    if config.evaluation.step and not evaluated:
        yield "evaluation.step: is of evaluation.checkpoint, which is empty; leave it out"


def check_deterministic(config: Config) -> Iterator[str]:
    if not config.deterministic:
        return
    needed = {"generation.backend": EngineName.EMBEDDED, "trainer.backend": TrainerBackendName.REFERENCE}
    for name, value in needed.items():
        if (found := value_of(config, name)) is not value:
            yield f"{name}: {found} is not known to be deterministic; choose {value}, or set deterministic to false"
    if config.cluster.shape is not Shape.LOCAL:
        yield (
            f"cluster.shape: {config.cluster.shape} may mix kinds of CPUs, which round differently; set it to "
            "local, or deterministic to false"
        )


def check_job(config: Config) -> Iterator[str]:
    if config.cluster.shape is Shape.LOCAL:
        return
    try:
        limit, lead = time_limit_s(config), signal_lead_s(config)
    except ConfigError as error:
        yield f"cluster: {error}"
        return
    if limit is not None and lead >= limit:
        yield (
            f"cluster.signal_lead_s: a warning {lead} s before the end leaves nothing of a time limit of {limit} s; "
            "raise cluster.all.time, or lower cluster.signal_lead_s or limits.stop_s"
        )
    satellite_s = seconds_of(inherited(config.cluster.generation, config.cluster.all).time)
    if config.cluster.shape is Shape.SATELLITES and satellite_s is not None and leave_lead_s(config) >= satellite_s:
        yield (
            f"cluster.generation.time: a warning {leave_lead_s(config)} s before the end (limits.stop_s and ten more) "
            f"leaves nothing of {satellite_s} s; raise it, or lower limits.stop_s"
        )
    if any(word.startswith(("--array", "-a")) for word in sbatch_options(config)):
        yield "cluster.all.raw: --array makes many jobs of one run; remove it, and submit one run for each `name`"
    if config.cluster.signal_lead_s and config.cluster.signal_lead_s <= config.limits.stop_s:
        yield (
            f"cluster.signal_lead_s: {lead} s is too short for a stop, which may take limits.stop_s "
            f"{config.limits.stop_s:g} s; raise it, or set it to 0"
        )


def check_replay(config: Config) -> Iterator[str]:
    replay = config.replay
    if replay.run and (config.evaluation.every_steps or config.archive.every_steps):
        yield (
            "replay.run: a replay generates nothing, so there is nothing to evaluate and nothing new to archive; set "
            "evaluation.every_steps and archive.every_steps to 0"
        )
    if replay.to_step and replay.to_step <= replay.from_step:
        yield f"replay.to_step: {replay.to_step} is not after replay.from_step {replay.from_step}; raise it"


ALWAYS: Final[tuple[Check, ...]] = (
    check_name,
    check_not_empty,
    check_dotted_paths,
    check_agent,
    check_online,
    check_wandb_mode,
    check_trainer_ranks,
    check_virtual_pipeline,
    check_reference_backend,
    check_attention,
    check_engine_ranks,
    check_replicas,
    check_shared_nodes,
    check_server_args,
    check_lora,
    check_routing,
    check_minibatches,
    check_microbatch,
    check_top_k,
    check_schedule,
    check_time_limits,
    check_evaluation,
    check_evaluated,
    check_deterministic,
    check_job,
    check_container,
    check_replay,
)
WITH_EPISODES: Final[tuple[Check, ...]] = (
    check_reward,
    check_algorithm_settings,
    check_groups,
    check_lengths,
    check_ring,
    check_quota,
)
WITH_ALGORITHM: Final[tuple[Check, ...]] = (check_offline, check_pairs, check_conversations)
CHECKS: Final[tuple[Check, ...]] = (*ALWAYS, *WITH_EPISODES, *WITH_ALGORITHM)


def checks_of(config: Config) -> tuple[Check, ...]:
    """Those that have something to say of it."""
    known = config.algorithm.name in RECIPES  # else there is one problem more, and no telling what it reads
    return (*ALWAYS, *(() if is_offline(config.algorithm) else WITH_EPISODES), *(WITH_ALGORITHM if known else ()))
