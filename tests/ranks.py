"""Run a function in several processes that share one gloo group, made as the ranks of a trainer make theirs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from forked import fork_server

from areal_hpc.collective import host_store, join_group, leave_group
from areal_hpc.transfer import GroupAddress

TIMEOUT_S = 120.0


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(group, *args)`` on every rank: what each returned, by rank. Raises what any rank raised."""
    store = host_store(timeout_s=TIMEOUT_S)
    address = GroupAddress(host="127.0.0.1", port=store.port, name="ranks", world_size=num_ranks, backend="gloo")
    with ProcessPoolExecutor(num_ranks, mp_context=fork_server()) as pool:
        futures = [pool.submit(_enter, address, rank, function, args) for rank in range(num_ranks)]
        return [future.result(timeout=TIMEOUT_S) for future in futures]


def _enter(address: GroupAddress, rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    group = join_group(address, rank, 60.0)
    try:
        return function(group, *args)
    finally:
        leave_group(group)
