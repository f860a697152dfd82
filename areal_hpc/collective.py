"""Process groups that span a trainer and its engines, beside each process's default group.

The trainer is rank 0 and hosts the store; engine ranks connect. The way in is the one SGLang takes, step for step, so
that either end may be theirs: a TCP store, a prefix store under the group's name, then a group of its own. The name is
part of every key of the rendezvous, so a fresh name for each membership can meet no leftovers of an earlier one; and
the store knows it by its nonce before anybody is told, so that who comes late, and finds that the port is another
run's by now, is told so.

    store = host_store(host, timeout_s)                                   trainer; store.port is what engines are told,
    name = name_at(store, "w-1-0", card)                                  and the name, such as w-1-0@f10c3a2b9d7e6541
    group = join_group(address, 0, timeout_s, store)                      trainer, while every engine runs
    group = join_group(address, rank, timeout_s)                          engine, the same at the same time
    broadcast(buffer, group)                                              all of them
    leave_group(group)

Each member says which card it is on: NCCL takes one from each, refuses a second one only in the first operation, to all
of them and by number, and takes parts of one GPU (MIG) for the same.

The trainer's ranks are a group of their own, whose members are called "trainer-0" and so on:

    with meeting("the sum of gradients", group):
        dist.all_reduce(gradients, group=group)         has ended when the block does, on devices as well

Who may connect: torch's store takes no secret (and lists its keys for whoever asks: torch 2.13, both of its servers),
and gloo and NCCL take none. So the store listens on one interface, loopback or the cluster's own, on a port that only
the run's private files tell, and Linux signs all these connections with the run's secret (signing.py). Where it does
not, whoever reaches a port can disturb a run, or read and alter what its ranks tell each other: ask for whole nodes
there (cluster.all.exclusive), and keep gloo and NCCL to the cluster's own network (GLOO_SOCKET_IFNAME,
NCCL_SOCKET_IFNAME).
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.accelerator import ACCELERATORS, CPU, Accelerator
from areal_hpc.errors import ConfigError
from areal_hpc.transfer import GroupAddress
from areal_hpc.waits import waiting

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store, TCPStore
    from torch.distributed import ProcessGroup


REMEMBERED = 2000
"""Operations of a process on its groups that torch keeps in mind: some hundred KB."""
NONCE = "@"
"""Stands between a name and its nonce."""
KNOWN = "known"
"""Key, under the group's name, by which a store shows that the group is to form there."""

_limits: dict[str, float] = {}
"""Time limit of each operation, by the group's name."""


def bracketed(host: str) -> str:
    """``host`` as it stands in a URL: an IPv6 address gets its brackets, once."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def unbracketed(host: str) -> str:
    """``host`` as sockets take it."""
    return host.removeprefix("[").removesuffix("]")


def interfaces(backend: str) -> str:
    """What this host can be reached by, and which part of it ``backend`` was told to use: for messages."""
    names = ", ".join(name for _, name in socket.if_nameindex())
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    chosen = os.environ.get(variable)
    return f"host {socket.gethostname()}, interfaces {names}, {variable} {f'= {chosen}' if chosen else 'is not set'}"


def device_for(backend: str) -> Accelerator:
    """The accelerator whose tensors the collective ``backend`` (gloo, nccl, hccl) moves.

    Raises:
        ConfigError: no accelerator has that backend.
    """
    for row in ACCELERATORS.values():
        if row.collective == backend:
            return row
    known = ", ".join(sorted(row.collective for row in ACCELERATORS.values()))
    raise ConfigError(f"collective backend {backend!r} is not known; use one of {known}")


def host_store(host: str = "127.0.0.1", *, timeout_s: float) -> TCPStore:
    """A store that listens on ``host`` only, on a port that the kernel chose: see ``.port``."""
    from torch._C._distributed_c10d import TCPStore

    plain = unbracketed(host)
    family = socket.AF_INET6 if ":" in plain else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((plain, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        plain,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),  # handed over: torch listens, itself it would on every interface
    )


def name_at(store: TCPStore, name: str, card: str = "") -> str:
    """``name`` with a nonce, for a group that is to form at ``store``: no other store knows of it.

    Args:
        card: where rank 0 is, so that whoever else is there is refused, and not rank 0 that comes after him.
    """
    from torch._C._distributed_c10d import PrefixStore

    name = f"{name}{NONCE}{secrets.token_hex(8)}"
    place = PrefixStore(name, store)
    place.set(KNOWN, "")
    if card:
        place.set(card, "0")
    return name


def _require_known(store: Store, address: GroupAddress) -> None:
    import torch.distributed as dist

    if not store.check([KNOWN]):
        raise dist.DistStoreError(
            f"the store at {bracketed(address.host)}:{address.port} does not know the group {address.name!r}, so it is "
            "of another run or attempt, which has that port by now; whoever still needs the group makes a new one"
        )


def _take_card(store: Store, address: GroupAddress, rank: int, card: str) -> None:
    """Raises ConfigError if another rank of the group is there."""
    other = store.compare_set(card, "", str(rank)).decode()
    if other != str(rank):
        raise ConfigError(
            f"ranks {other} and {rank} of group {address.name!r} are both on {card}, or on parts of it (MIG), and "
            f"{address.backend} takes one member from each; give each process a card of its own, or, where one is an "
            "engine, set weights.transport=disk"
        )


def join_group(
    address: GroupAddress,
    rank: int,
    timeout_s: float,
    store: TCPStore | None = None,
    *,
    vital: bool = False,
    card: str = "",
) -> ProcessGroup:
    """Enter the group as ``rank``; returns when all its ranks are there. Those of NCCL meet in their first operation.

    Args:
        timeout_s: limit of the entry, and then of each collective operation on the group.
        store: what ``host_store`` returned, on the rank that hosts it.
        vital: this process is nothing without the other members, and may end with them. Else it learns of their death
            by an error, where it waits for an operation.
        card: that this rank's tensors are on (``accelerator.card_here``); empty where that is not known.

    Raises:
        ConfigError: another rank is on that card.
        torch.distributed.DistError: the store or a member did not come in time; or the store is another run's, as far
            as the group's name has a nonce.
        ValueError: this process is in a group of that name already.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed import distributed_c10d as c10d

    limit = timedelta(seconds=timeout_s)
    if store is None:
        store = TCPStore(unbracketed(address.host), address.port, is_master=False, timeout=limit)
    place = PrefixStore(address.name, store)
    if NONCE in address.name:
        _require_known(place, address)
    if card and device_for(address.backend) is not CPU:
        _take_card(place, address, rank, card)
    with nullcontext() if vital else _errors_raised(device_for(address.backend)), _no_part_of_the_default_group():
        group, _ = c10d._new_process_group_helper(
            address.world_size,
            rank,
            [],  # no ranks of the default group: the members need not share one
            dist.Backend(address.backend),
            place,
            group_name=c10d.GroupName(address.name),
            timeout=limit,
        )
    assert isinstance(group, dist.ProcessGroup)
    _limits[address.name] = timeout_s
    # The table by which collectives translate ranks; new_group fills it only for subsets of the default group.
    c10d._world.pg_group_ranks[group] = {index: index for index in range(address.world_size)}
    return group


@contextmanager
def _errors_raised(row: Accelerator) -> Iterator[None]:
    """Groups that are made meanwhile tell errors to who waits for an operation, and leave the process alone."""
    before = os.environ.get(row.blocking_wait)
    if not row.blocking_wait or before is not None:
        yield
        return
    os.environ[row.blocking_wait] = "1"
    try:
        yield
    finally:
        del os.environ[row.blocking_wait]


@contextmanager
def _no_part_of_the_default_group() -> Iterator[None]:
    """Where that is bound to a device, as vLLM can be told to have it, torch makes NCCL's other groups by splitting it,
    and a weight group has members that are not in it."""
    from torch.distributed import distributed_c10d as c10d

    default = c10d.GroupMember.WORLD
    bound = None if default is None else default.bound_device_id
    if default is None or bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def broadcast(tensor: Tensor, group: ProcessGroup) -> None:
    """Send ``tensor`` from rank 0 to all others; it is there when this returns, on devices as well.

    Raises:
        RuntimeError: a member died, or did not take part within the group's limit.
    """
    import torch.distributed as dist

    work = dist.broadcast(tensor, group=group, group_src=0, async_op=True)
    assert work is not None, "this process is in the group"
    limit_s = limit_of(group)
    work.wait(*([] if limit_s is None else [timedelta(seconds=limit_s)]))


def leave_group(group: ProcessGroup) -> None:
    """Drop the group on this rank, whatever its other members do: to destroy it in order is to wait for these."""
    from torch.distributed import distributed_c10d as c10d

    _limits.pop(group.group_name, None)
    c10d._abort_process_group(group)


def limit_of(group: ProcessGroup) -> float | None:
    """Time limit, in seconds, of each operation on a group that ``join_group`` made; None for others."""
    return _limits.get(group.group_name)


def store_of(group: ProcessGroup) -> Store:
    """The store by which the members of the group found each other."""
    from torch.distributed import distributed_c10d as c10d

    return c10d._get_process_group_store(group)


@contextmanager
def meeting(what: str, group: ProcessGroup) -> Iterator[None]:
    """Names the wait of a trainer rank for the others, in a collective of ``group``."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    others = (f"trainer-{number}" for rank, number in enumerate(ranks) if rank != group.rank())
    with waiting(what, *others, limit_s=limit_of(group)):
        yield
        if torch.accelerator.is_available():  # there it has only begun, and whoever reads its result would wait unnamed
            torch.accelerator.current_stream().synchronize()


def remember_operations(path: Path) -> None:
    """Have torch remember the last operations on the groups that this process makes from now on; when one on devices
    hangs until its limit, each rank writes its own to ``path`` with its number behind, where torch's flight recorder
    finds who left whom. What the environment says already, holds.
    """
    variables = {
        "TORCH_FR_BUFFER_SIZE": str(REMEMBERED),
        "TORCH_FR_DUMP_TEMP_FILE": str(path),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    for name, value in variables.items():
        os.environ.setdefault(name, value)
