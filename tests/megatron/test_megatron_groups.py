"""Any combination of sizes: what is accepted Megatron makes, and what is refused before it starts it would refuse.

One process takes the place of a rank of each trainer, in groups of torch's that only pretend to have others: every
group and layer is really made, and nothing is computed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import Run
from safetensors.torch import load_file
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from areal_hpc.config.checks import check_trainer_ranks, check_virtual_pipeline
from areal_hpc.config.schema import ParallelConfig, TrainerConfig
from areal_hpc.errors import ConfigError
from areal_hpc.pretrained.architecture import Architecture
from areal_hpc.training.megatron import model
from areal_hpc.training.megatron.model import build
from areal_hpc.training.megatron.names import EMBEDDING, HEAD, cut, first_layer, weight_of
from areal_hpc.training.megatron.parallel import Place, enter_groups
from areal_hpc.training.megatron.requirements import check_model
from areal_hpc.training.ranks import Ranks

pytestmark = pytest.mark.megatron

SIZES = st.builds(
    ParallelConfig,
    tensor=st.sampled_from([1, 2, 3, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    virtual_pipeline=st.sampled_from([1, 1, 2]),
    context=st.sampled_from([1, 2, 3]),
    expert=st.sampled_from([1, 1, 2, 4]),
    expert_tensor=st.sampled_from([1, 1, 2]),
)


@contextmanager
def one_of(num_ranks: int, rank: int) -> Iterator[Any]:
    """This process as that rank of so many."""
    from megatron.core import parallel_state

    really = dist.init_process_group

    def pretend(*, rank: int, world_size: int, **_: Any) -> None:
        really(backend="fake", store=FakeStore(), rank=rank, world_size=world_size)

    with mock.patch.object(dist, "init_process_group", pretend):
        try:
            yield SimpleNamespace(group=None, rank=rank, size=num_ranks, device=torch.device("cpu"))
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def assert_as_asked(place: Place, parallel: ParallelConfig, num_ranks: int) -> None:
    copies = num_ranks // (parallel.tensor * parallel.pipeline * parallel.context)
    groups = (place.tensor, place.pipeline, place.context, place.expert, place.expert_tensor)
    asked = (parallel.tensor, parallel.pipeline, parallel.context, parallel.expert, parallel.expert_tensor)
    assert tuple(group.size() for group in groups) == asked
    assert place.data.size == copies


def assert_holds_parts(
    chunks: list[Any], architecture: Architecture, place: Place, parallel: ParallelConfig, whole: dict[str, Tensor]
) -> None:
    """Each parameter has the shape of what this rank would be given of the model."""
    assert len(chunks) == parallel.virtual_pipeline
    experts = architecture.experts.num_experts // parallel.expert if architecture.experts else 0
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            weight = weight_of(name, first_layer(chunk), experts * place.expert.rank())
            group = place.tensor if weight.expert is None else place.expert_tensor
            tied = architecture.tied and weight.names == (HEAD,)
            tensors = [whole[EMBEDDING if tied else one] for one in weight.names]
            assert cut(weight, tensors, architecture, group.size(), group.rank()).shape == parameter.shape, name


def any_layout(ranks: Ranks, alone: ParallelConfig, models: dict[str, Path]) -> Counter[str]:
    """How many were made, and refused by whom."""
    found: Counter[str] = Counter()
    stored = {family: load_file(models[family] / "model.safetensors") for family in ("qwen3", "qwen3_moe")}
    families = st.sampled_from(sorted(stored))

    @settings(max_examples=300, deadline=None, database=None)
    @given(
        parallel=SIZES,
        copies=st.integers(1, 4),
        more=st.sampled_from([0, 0, 0, 1]),
        rank=st.integers(0),
        family=families,
    )
    def holds(parallel: ParallelConfig, copies: int, more: int, rank: int, family: str) -> None:
        num_ranks = copies * parallel.tensor * parallel.pipeline * parallel.context + more
        config: Any = SimpleNamespace(trainer=TrainerConfig(total_steps=1, ranks=num_ranks, parallel=parallel))
        refused = [*check_trainer_ranks(config), *check_virtual_pipeline(config)]
        with one_of(num_ranks, rank % num_ranks) as me:
            if parallel.expert > 1 and parallel.expert_tensor > 1:
                with pytest.raises(ConfigError, match="gloo cannot gather unequal numbers"):
                    enter_groups(me, parallel)
                dist.init_process_group(rank=me.rank, world_size=num_ranks)  # for who leaves it
                found["device"] += 1
                return
            if refused:
                with pytest.raises(RuntimeError, match=r"not divisible|should be greater than 1"):
                    enter_groups(me, parallel)
                found["number of ranks"] += 1
                return
            enter_groups(me, parallel)
            place = Place(me)
            assert_as_asked(place, parallel, num_ranks)
            try:
                architecture = check_model(models[family], parallel)
            except ConfigError:
                found["model"] += 1
                return
            chunks = build(architecture, config.trainer, torch.float32)
            assert_holds_parts(chunks, architecture, place, parallel, stored[family])
            found[f"made {family}"] += 1

    holds()
    return found


def test_what_is_accepted_is_made_and_what_is_refused_could_not_be(run: Run, models: dict[str, Path]) -> None:
    (found,) = run("tp1", any_layout, models)
    assert all(found[what] for what in ("made qwen3", "made qwen3_moe", "number of ranks", "model", "device")), found


def on_a_device(ranks: Ranks, alone: ParallelConfig, models: dict[str, Path]) -> list[str]:
    """What of a mixture of experts is elsewhere when it is built: it is frozen, and sent around, before it computes."""
    trainer = TrainerConfig(total_steps=1, parallel=alone)
    architecture = check_model(models["qwen3_moe"], alone)
    with one_of(1, 0) as me:
        enter_groups(me, alone)
        theirs = sys.modules["megatron.core.tensor_parallel.layers"].torch
        device = torch.device("meta")
        with (
            mock.patch.object(theirs.cuda, "current_device", lambda: device),  # what Megatron asks, and what we do
            mock.patch.object(model, "_device", lambda: device.type),
        ):
            chunks = build(architecture, trainer, torch.bfloat16)
    tensors = [*chunks[0].named_parameters(), *chunks[0].named_buffers()]
    assert len(tensors) > 10
    return [name for name, tensor in tensors if tensor.device != device]


def test_all_of_a_model_is_on_the_device_before_it_computes(run: Run, models: dict[str, Path]) -> None:
    """Of a frozen mixture the routers were not, and NCCL moves nothing that lies in host memory."""
    assert run("tp1", on_a_device, models) == [[]]
