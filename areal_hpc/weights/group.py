"""The process group of rank 0 and every rank of a membership's engines: made once for each membership, and kept.

When an operation fails, the group is given up on all sides and the engine at fault leaves the membership: those that
no longer answer, or if all do, the one that failed first. Nobody is left waiting inside a collective.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from areal_hpc.accelerator import beside, card_here
from areal_hpc.buckets import Bucket
from areal_hpc.collective import broadcast, host_store, interfaces, join_group, leave_group, name_at
from areal_hpc.errors import WeightUpdateError
from areal_hpc.protocols import WeightTarget
from areal_hpc.transfer import GroupAddress
from areal_hpc.waits import advance, waiting
from areal_hpc.weights.membership import Call, Membership

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GRACE_S = 5.0
"""By how much longer than the operation's own limit it is waited for: its own error says more than ours would."""


class WeightGroup:
    """Rank 0's end.

    Args:
        names: a fresh one for each group; no two of a run may be equal.
        backend: gloo, nccl or hccl.
        host: address of this process as the engines see it.
    """

    def __init__(self, membership: Membership, *, names: Iterator[str], backend: str, host: str) -> None:
        self.membership = membership
        self._names = names
        self._backend = backend
        self._host = host
        self._name = ""
        self._group: ProcessGroup | None = None
        self._made_for = -1  # the membership's `changes` when the group was made

    async def gather(self) -> None:
        """See to it that the group is that of the membership; an older one is left first.

        Raises:
            WeightUpdateError: see ``_together``.
        """
        if self._made_for == self.membership.changes:
            return
        await self.close()
        members = self.membership.members
        timeout_s = self.membership.timeout_s
        store = host_store(self._host, timeout_s=timeout_s)
        card = card_here()  # rank 0 has the first device that it sees, which is the current one of every thread
        self._name = name_at(store, next(self._names), card)
        address = GroupAddress(
            host=self._host,
            port=store.port,
            name=self._name,
            world_size=1 + sum(target.num_ranks for target in members),
            backend=self._backend,
        )
        sizes = (target.num_ranks for target in members)
        offsets = dict(zip((target.name for target in members), itertools.accumulate(sizes, initial=1), strict=False))

        def join() -> None:
            self._group = join_group(address, 0, timeout_s, store, card=card)

        place = f" (rank 0 waits at {self._host}:{store.port}: {interfaces(self._backend)})"
        await self._together("join", join, lambda target: target.join(address, offsets[target.name]), place)
        self._made_for = self.membership.changes

    async def send(self, bucket: Bucket) -> None:
        """Broadcast one bucket while every member receives it.

        Raises:
            WeightUpdateError: see ``_together``.
        """

        def send() -> None:
            assert self._group is not None
            with beside(bucket.buffer.device):  # or the next one, which is packed meanwhile, would wait for this
                broadcast(bucket.buffer, self._group)

        await self._together("load a bucket", send, lambda t: t.load_bucket(self._name, bucket.specs))
        advance("bytes broadcast", bucket.buffer.numel())

    async def close(self) -> None:
        """Give the group up on all sides. The engines sample on."""
        if self._group is not None:
            self._abandon()
            await self.membership.failures("leave its group", self._leave)

    async def _together(self, what: str, ours: Callable[[], None], theirs: Call, about: str = "") -> None:
        """Do rank 0's part in a thread while every member does its own.

        Args:
            about: put behind the reason of a failure.

        Raises:
            WeightUpdateError: a part failed; the group is gone and the engine at fault no longer a member.
        """
        names = [target.name for target in self.membership.members]
        with waiting(f"all to {what}", *names, limit_s=self.membership.timeout_s):
            await self._at_once(what, ours, theirs, about)

    async def _at_once(self, what: str, ours: Callable[[], None], theirs: Call, about: str) -> None:
        mine = asyncio.create_task(_in_thread(what, ours))
        calls = {asyncio.create_task(self.membership.attempt(t, what, theirs)): t for t in self.membership.members}
        try:
            limit_s = self.membership.timeout_s + GRACE_S
            await asyncio.wait({mine, *calls}, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            for task in (mine, *calls):
                task.cancel()
            await asyncio.gather(mine, *calls, return_exceptions=True)
            self._abandon()  # its members are in the middle of something
            raise
        if not mine.done() or any(task.done() and task.exception() for task in (mine, *calls)):
            guilty = await self._break_up(mine, calls)
            own_error = mine.exception() if mine.done() else WeightUpdateError(f"rank 0 hangs where it was to {what}")
            mine.cancel()  # the thread stays where it is, and nobody wants it any more
            if guilty:
                self.membership.lose({name: why + about for name, why in guilty.items()})
            assert own_error is not None, "nobody failed"
            raise own_error

    async def _break_up(
        self, mine: asyncio.Task[None], calls: Mapping[asyncio.Task[None], WeightTarget]
    ) -> dict[str, str]:
        """End an operation that cannot succeed any more, on all sides; who is to blame, with the reason."""
        first = [target for task, target in calls.items() if task.done() and task.exception()][:1]
        for target in first:  # if it lives, its leaving wakes all who wait for it inside the operation
            await asyncio.gather(self.membership.attempt(target, "leave", self._leave), return_exceptions=True)
        # Its operation has that limit, but for the meeting of NCCL's ranks before the first, which has none.
        await asyncio.wait({mine}, timeout=self.membership.timeout_s)
        self._abandon()  # which wakes the members that still wait for rank 0
        await asyncio.wait(calls)
        reasons = {target.name: str(task.exception()) for task, target in calls.items() if task.exception()}
        silent = await self.membership.failures("leave its group", self._leave)
        guilty = silent or {target.name: "" for target in first}
        return {name: reasons.get(name, why) for name, why in guilty.items()}

    async def _leave(self, target: WeightTarget) -> None:
        await target.leave(self._name)

    def _abandon(self) -> None:
        """Drop rank 0's end; the connections close with the last hold on it."""
        if self._group is not None:
            leave_group(self._group)
        self._group = None
        self._made_for = -1


async def _in_thread(what: str, ours: Callable[[], None]) -> None:
    """Rank 0's part of an operation.

    Raises:
        WeightUpdateError: it failed. The cause is left out: its traceback would keep the group's connections open.
    """
    reason = ""
    try:
        await asyncio.to_thread(ours)
    except RuntimeError as error:
        reason = f"rank 0 could not {what} with the engines: {error}"
    if reason:
        raise WeightUpdateError(reason)
