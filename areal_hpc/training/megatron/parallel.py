"""The trainer's ranks as Megatron groups them.

Megatron keeps its process groups in one table for the process, made from torch's default group. Neither exists in a
process of ours until ``enter_groups`` makes them: the default group over the store by which the ranks have found each
other, then every subgroup, in the same order on all ranks and before anything is computed (an HCCL that makes groups
when they are first used can dead-lock).
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from areal_hpc import accelerator
from areal_hpc.collective import limit_of, store_of
from areal_hpc.config.schema import ParallelConfig
from areal_hpc.errors import ConfigError
from areal_hpc.training.megatron.compat import bootstrap
from areal_hpc.training.ranks import Ranks

ALONE_S = 1800.0
"""Time limit of collectives of a trainer of one rank, which has nobody to wait for."""
RANDOM_SEED = 1
"""Seed of the random states that Megatron's layers switch between where they share sequences; with dropout off nobody
draws."""


def enter_groups(ranks: Ranks, parallel: ParallelConfig) -> None:
    """Make the groups, once in a process; later calls must ask for the same.

    Raises:
        ConfigError: see ``compat.bootstrap``; or sizes that the collectives of this device do not allow together.
    """
    bootstrap()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from torch._C._distributed_c10d import HashStore, PrefixStore

    if parallel_state.model_parallel_is_initialized():
        found = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
            dist.get_world_size(),
        )
        assert found == (parallel.tensor, parallel.pipeline, parallel.context, ranks.size), found
        return
    if accelerator.detect() is accelerator.CPU and parallel.expert > 1 and parallel.expert_tensor > 1:
        raise ConfigError(
            "trainer.parallel.expert_tensor: gloo cannot gather unequal numbers of tokens; on CPUs set it to 1, or set "
            "trainer.parallel.expert to 1"
        )
    limit_s = (None if ranks.group is None else limit_of(ranks.group)) or ALONE_S
    dist.init_process_group(
        backend=accelerator.detect().collective,
        store=HashStore() if ranks.group is None else PrefixStore("megatron", store_of(ranks.group)),
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timedelta(seconds=limit_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=math.ceil(limit_s / 60),
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(RANDOM_SEED)


class Place:
    """Where this rank stands: its groups, after ``enter_groups``."""

    def __init__(self, ranks: Ranks) -> None:
        from megatron.core import parallel_state

        self.ranks = ranks
        self.tensor: Any = parallel_state.get_tensor_model_parallel_group()
        self.expert_tensor: Any = parallel_state.get_expert_tensor_parallel_group()
        self.expert: Any = parallel_state.get_expert_model_parallel_group()
        self.pipeline: Any = parallel_state.get_pipeline_model_parallel_group()
        self.context: Any = parallel_state.get_context_parallel_group()
        data = parallel_state.get_data_parallel_group()
        self.data = Ranks(data if data.size() > 1 else None, ranks.device)
        """The ranks that hold the same part of the model and other sequences."""

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the output embedding, and so log-probs and losses."""
        return bool(self.pipeline.rank() == self.pipeline.size() - 1)

    @property
    def reports(self) -> bool:
        """Whether this rank tells what it and those that computed the same have found."""
        return bool(self.is_last_stage and self.tensor.rank() == 0 and self.context.rank() == 0)
