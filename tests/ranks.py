"""Run a function in several processes that share one gloo group, as the ranks of a trainer do."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

TIMEOUT_S = 120.0


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(group, *args)`` on every rank: what each returned, by rank. Raises what any rank raised."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.models.qwen3.modeling_qwen3", "areal_hpc.training.reference"])
    with tempfile.TemporaryDirectory() as store, ProcessPoolExecutor(num_ranks, mp_context=context) as pool:
        futures = [pool.submit(_enter, f"file://{store}/store", r, num_ranks, function, args) for r in range(num_ranks)]
        return [future.result(timeout=TIMEOUT_S) for future in futures]


def _enter(store: str, rank: int, num_ranks: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, timeout=timedelta(seconds=60), rank=rank, world_size=num_ranks)
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroup)
    try:
        return function(group, *args)
    finally:
        dist.destroy_process_group()
