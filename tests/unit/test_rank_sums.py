"""What one trainer rank asks of the library that carries its words; the group is gloo's, of this rank alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from areal_hpc.collective import host_store, join_group, leave_group
from areal_hpc.training.ranks import Ranks
from areal_hpc.transfer import GroupAddress

LIMIT_S = 20.0
SUMMED = {torch.int8, torch.int16, torch.int32, torch.float16, torch.float32, torch.bfloat16}
"""What HCCL reduces on an Atlas A3 as it is set by default (its documents, HCCL_OP_EXPANSION_MODE=AI_CPU)."""


def test_an_ascend_can_sum_whatever_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[torch.dtype] = []
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        summed.append(tensor.dtype)
        return real(tensor, *given, **named)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    store = host_store(timeout_s=LIMIT_S)
    address = GroupAddress(host="127.0.0.1", port=store.port, name="alone", world_size=1, backend="gloo")
    group = join_group(address, 0, LIMIT_S, store)
    ranks = Ranks(group)
    assert ranks.gather({"loss": 0.5}) == [{"loss": 0.5}]
    [floats] = ranks.gather_floats(np.array([1.5, -2.0], np.float32))
    assert floats.tolist() == [1.5, -2.0]
    assert ranks.any(True)
    assert len(summed) == 3 and set(summed) <= SUMMED
    leave_group(group)
