"""The trainer's ranks as one: share a plan, agree on a flag, meet at a barrier.

Control travels as JSON bytes over the ranks' own process group, log-probs as float32, never as pickles. With one rank
everything is local and torch.distributed is not touched. Every call waits for all ranks, as long as the group's
time-out allows.

Raises, each method: RoleDied when a rank has ended or did not come in time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from areal_hpc.collective import meeting
from areal_hpc.errors import RoleDied

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ranks:
    """``group`` is None for a trainer of one process. ``device`` is where the group's collectives run. ``store``, where
    a trainer of one process hosts one for others, lives as long as this."""

    def __init__(self, group: ProcessGroup | None = None, device: str = "cpu", store: object = None) -> None:
        self.group, self.store = group, store
        self.device = device
        self.rank: int = 0 if group is None else group.rank()  # dist.get_rank wants a default group, which we have not
        self.size: int = 1 if group is None else group.size()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, the only one that claims, publishes and commits."""
        return self.rank == 0

    def share(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank; it must be JSON data. The others' argument is ignored."""
        if self.group is None:
            return value
        data = json.dumps(value).encode() if self.leads else b""
        size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        with self._together("the length of what rank 0 shares"):
            dist.broadcast(size, group=self.group, group_src=0)
        buffer = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if self.leads:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        with self._together("what rank 0 shares"):
            dist.broadcast(buffer, group=self.group, group_src=0)
        return value if self.leads else json.loads(bytes(buffer.cpu().numpy()))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank, on every rank; it must be JSON data and comes back as such."""
        return [json.loads(data) for data in self._gather(json.dumps(value).encode())]

    def gather_floats(self, values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Every rank's float32 array [N], each of its own length, by rank, on every rank."""
        return [np.frombuffer(data, np.float32) for data in self._gather(values.astype(np.float32).tobytes())]

    def _gather(self, data: bytes) -> list[bytes]:
        if self.group is None:
            return [data]
        sizes = torch.zeros(self.size, dtype=torch.int32, device=self.device)  # HCCL does not sum int64 everywhere
        sizes[self.rank] = len(data)
        with self._together("the length of what each rank tells"):
            dist.all_reduce(sizes, group=self.group)
        mine = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=self.device)
        mine[: len(data)] = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))  # torch's own refuses no bytes
        every = [torch.empty_like(mine) for _ in range(self.size)]
        with self._together("what each rank tells"):
            dist.all_gather(every, mine, group=self.group)
        return [bytes(one[:size].cpu().numpy()) for one, size in zip(every, sizes.tolist(), strict=True)]

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on at least one rank."""
        return bool(self.any_each(np.array([flag]))[0])

    def any_each(self, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Elementwise ``any`` of a bool array [N] over all ranks."""
        if self.group is None:
            return flags
        raised = torch.from_numpy(flags.astype(np.int32)).to(self.device)
        with self._together("all ranks to agree"):
            dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=self.group)
        return raised.cpu().numpy().astype(np.bool_)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.any(False)

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Name the wait, and say in the trainer's words what the library means by a closed connection or a time-out."""
        assert self.group is not None
        try:
            with meeting(what, self.group):
                yield
        except RuntimeError as error:
            raise RoleDied(
                f"trainer rank {self.rank} of {self.size} lost the other ranks ({str(error).splitlines()[0]}); look "
                "into the log of the rank that ended first"
            ) from error
