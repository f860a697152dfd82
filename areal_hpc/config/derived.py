"""Values that follow from a configuration and are therefore no keys of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from areal_hpc.config.cluster import ComponentConfig, Shape, inherited, seconds_of
from areal_hpc.config.recipes import is_offline
from areal_hpc.config.schema import Config
from areal_hpc.run_dir import RunDir

LONGEST_LEAD_S = 300
SPARE_S = 10
"""What Slurm's own clockwork may take of the lead, in seconds."""
QUEUE_S = 20 * 86400.0
"""As good as for ever, in seconds: a job of the run's has ended by then, and poll(2) counts milliseconds in 31 bits."""
TOKEN_BYTES = 13
"""Of one token in the ring: its id, log-prob, version and whether it is trained on."""
EPISODE_BYTES = 64
"""Of one episode in the head of its group's record."""
TICKET_BYTES = 1 << 11
"""Of a group, besides: that its ticket was reserved, the prompt's id, commits."""


def ring_capacity(config: Config) -> int:
    """Groups that may be outstanding at once. With a slot for each, no group gets older than ``max_staleness``."""
    return (config.buffer.max_staleness + 1) * config.algorithm.groups_per_step


def largest_group_bytes(config: Config) -> int:
    """What a group takes in the ring at most whose every episode is one sequence, with the records around it."""
    return config.rollout.group_size * (config.model.max_tokens * TOKEN_BYTES + EPISODE_BYTES) + TICKET_BYTES


def smallest_batch_bytes(config: Config) -> int:
    """What the groups of a step take in the ring at least: a token for each prompt and one for each answer."""
    size = max(config.rollout.filter.min_group_size, 1)
    return config.algorithm.groups_per_step * size * 2 * TOKEN_BYTES


def exported_model(config: Config) -> str:
    """Where `areal-hpc eval` puts the weights of a run's checkpoint, as a Hugging Face directory."""
    return str(RunDir(Path(config.run_root) / config.name).model)


def takes_whole(config: Config) -> bool:
    """Whether engines are sent the whole model, with adapters merged into it. Adapters travel alone, except to engines
    with pipeline stages, whose ranks cannot agree on whether all of them have taken an update of ours."""
    return config.model.lora.rank > 0 and config.generation.pipeline_parallel > 1


def model_ranks(config: Config) -> int:
    """Trainer ranks that hold one copy of the model."""
    parallel = config.trainer.parallel
    return parallel.tensor * parallel.pipeline * parallel.context


def threads_of(config: Config, num_cpus: int) -> Mapping[str, int]:
    """CPU threads of one process of each role that has more to say than 1.

    Args:
        num_cpus: those that this process may use, which is less than the machine has where a scheduler has given it a
            part: more threads would wait for each other. Deterministic training keeps what rounding depends on.
    """
    generation = config.generation.threads
    wanted = {"trainer": config.trainer.threads, "generator": generation, "part": generation}
    return wanted if config.deterministic else {role: min(number, num_cpus) for role, number in wanted.items()}


def engine_ranks(config: Config) -> int:
    """Devices of one engine replica."""
    return config.generation.tensor_parallel * config.generation.pipeline_parallel


def takes_satellites(config: Config) -> bool:
    """Whether engines may join while the run goes on: not where nothing is trained on what they sample, and not in
    deterministic training, which knows its engines from the start."""
    generates = not (is_offline(config.algorithm) or config.replay.run or config.evaluation.checkpoint)
    return generates and not config.deterministic


def awaits_satellites(config: Config) -> bool:
    """Whether the run may be without any engine for as long as Slurm's queue likes."""
    are_to_come = config.cluster.shape is Shape.SATELLITES or config.generation.replicas == 0
    return takes_satellites(config) and are_to_come


def is_served_by_others(config: Config) -> bool:
    """Whether all engines are to join: the run has none of its own."""
    return takes_satellites(config) and config.generation.replicas == 0


def queue_s(config: Config) -> float:
    """By how much longer whoever waits for work may have to wait because satellites are in Slurm's queue."""
    return QUEUE_S if awaits_satellites(config) else 0.0


def collective_s(config: Config) -> float:
    """Time limit of a collective of the trainer's ranks: more than rank 0 may keep the others waiting."""
    limits = config.limits
    return limits.start_s + max(limits.starve_s, limits.checkpoint_s) + queue_s(config)


def without_engines_s(config: Config) -> float:
    """Longest time that a request waits for an engine where none is there. Whether satellites have been in the queue
    for too long is for the trainer to judge, which then ends the run (``fleet``)."""
    return queue_s(config) or config.limits.start_s


def _requests(config: Config, *, satellites: bool = False) -> list[ComponentConfig]:
    """What each component of the run's job asks for, completely; with ``satellites`` also those of jobs beside it."""
    cluster = config.cluster
    apart = cluster.shape is Shape.SATELLITES and not satellites
    components = [cluster.trainer, *([] if apart else [cluster.generation]), cluster.rollout]
    return [inherited(one, cluster.all) for one in components]


def sbatch_options(config: Config) -> list[str]:
    """The options that go to sbatch as they are, of all components."""
    return [option for one in _requests(config, satellites=True) for option in one.raw]


def time_limit_s(config: Config) -> int | None:
    """The shortest time limit of the job's components, in seconds; None where none is given."""
    limits = [limit for one in _requests(config) if (limit := seconds_of(one.time)) is not None]
    return min(limits, default=None)


def signal_lead_s(config: Config) -> int:
    """Seconds before the time limit at which the run is told to stop: what it is set to, or a quarter of the limit,
    but not below limits.stop_s and ten seconds, nor above five minutes."""
    if config.cluster.signal_lead_s:
        return config.cluster.signal_lead_s
    limit = time_limit_s(config)
    return max(leave_lead_s(config), LONGEST_LEAD_S if limit is None else min(LONGEST_LEAD_S, limit // 4))


def leave_lead_s(config: Config) -> int:
    """Seconds before its time limit at which a satellite is told to leave: it has no checkpoint to write."""
    return math.ceil(config.limits.stop_s) + SPARE_S
