"""The Megatron trainer on several ranks, each a real process that lives as long as the tests of a module.

with pool() as run:
    results = run("tp2 dp2", function, *args)       function(ranks, parallel, *args) on every rank, in order of ranks
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from forked import fork_server

from areal_hpc.collective import host_store, join_group, leave_group
from areal_hpc.config.schema import ParallelConfig
from areal_hpc.training.megatron.compat import bootstrap
from areal_hpc.training.ranks import Ranks
from areal_hpc.transfer import GroupAddress

KEYS = {
    "tp": "tensor",
    "pp": "pipeline",
    "vpp": "virtual_pipeline",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
}
MOST_RANKS = 4
TIMEOUT_S = 120.0

Run = Callable[..., list[Any]]


@contextmanager
def pool() -> Iterator[Run]:
    """Importing Megatron takes seconds: one process does it, and the ranks of all layouts in turn are its forks."""
    with ProcessPoolExecutor(1, mp_context=fork_server(), initializer=_become_parent) as parent:

        def run(layout: str, function: Callable[..., Any], *args: Any) -> list[Any]:
            return parent.submit(_on_every_rank, layout, function, args).result()

        yield run
        parent.submit(_end_ranks).result()


def _become_parent() -> None:
    bootstrap()
    _ranks().submit(int).result()  # which forks them all, while there is no thread here


def _end_ranks() -> None:
    _ranks().shutdown()


@functools.cache
def _ranks() -> ProcessPoolExecutor:
    """Forks of this process."""
    return ProcessPoolExecutor(MOST_RANKS, mp_context=multiprocessing.get_context("fork"))


def _on_every_rank(layout: str, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    parallel, world_size = parse(layout)
    store = host_store(timeout_s=TIMEOUT_S)
    address = GroupAddress(host="127.0.0.1", port=store.port, name="ranks", world_size=world_size, backend="gloo")
    futures = [_ranks().submit(_enter, address, rank, parallel, function, args) for rank in range(world_size)]
    done, _ = wait(futures, timeout=TIMEOUT_S, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()  # raises what the first rank met, and not that the others waited for it in vain
    return [future.result(timeout=0) for future in futures]


def parse(layout: str) -> tuple[ParallelConfig, int]:
    """Sizes and number of ranks of a layout such as "tp2 pp2 dp2"."""
    sizes = {word: int(size) for word, size in re.findall(r"([a-z]+)(\d+)", layout)}
    copies = sizes.pop("dp", 1)
    parallel = ParallelConfig(**{KEYS[word]: size for word, size in sizes.items()})
    return parallel, copies * parallel.tensor * parallel.pipeline * parallel.context


def _enter(
    address: GroupAddress, rank: int, parallel: ParallelConfig, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    torch.set_num_threads(1)
    group = join_group(address, rank, 60.0) if address.world_size > 1 else None
    try:
        return function(Ranks(group), parallel, *args)
    finally:
        if group is not None:
            leave_group(group)
        _forget_groups()  # last: it would take the ranks' own group with it


def _forget_groups() -> None:
    """Megatron's groups are the process's; the next layout has others."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # models hold groups in cycles, and each group has threads that wake a hundred times a second
