"""New weights by collective broadcast: from the trainer's rank 0 to all engine ranks at once, bucket by bucket.

    first bucket ready
    pause all                            ---- sampling stops
    membership changed? every member joins a group of a fresh name w-<epoch>-<k> at a fresh port
    each bucket: all members receive while rank 0 broadcasts
    all received, all checksums right    ---- the version barrier
    resume all under the new version     ---- sampling goes on

The group is made once for each membership and kept. When something fails, the group is given up on all sides and the
engine at fault leaves the membership: those that no longer answer, or if all do, the one that failed first. ``publish``
raises then, with everybody paused. Publish again, with the weights anew, to bring the members that are left up to date.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from areal_hpc.buckets import Bucket, fingerprint, plan_buckets
from areal_hpc.collective import device_for, host_store, join_group, leave_group
from areal_hpc.errors import WeightUpdateError
from areal_hpc.protocols import WeightTarget
from areal_hpc.types import GroupAddress, TensorSpec
from areal_hpc.weights.membership import Call, Membership

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class BroadcastTransport:
    """A ``WeightTransport`` on the trainer's rank 0.

    Args:
        epoch: the attempt of the run; part of every group's name.
        backend: gloo, nccl or hccl.
        bucket_bytes: size of one transfer.
        timeout_s: longest time of any one step: joining, one bucket, one call.
        host: address of this process as the engines see it.
    """

    def __init__(
        self,
        targets: Sequence[WeightTarget],
        *,
        epoch: int,
        backend: str = "gloo",
        bucket_bytes: int = 256 << 20,
        timeout_s: float = 120.0,
        host: str = "127.0.0.1",
    ) -> None:
        self.membership = Membership(targets, timeout_s)
        self._device = device_for(backend).device
        self._backend = backend
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._host = host
        self._names = (f"w-{epoch}-{k}" for k in itertools.count())
        self._name = ""
        self._group: ProcessGroup | None = None
        self._made_for = -1  # the membership's `changes` when the group was made

    async def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, float]:
        """Bring every member to ``version``.

        ``weights`` is always read to its end, also on failure: producing it is collective over the trainer's ranks.

        Returns:
            ``seconds`` in all, ``seconds_paused`` of the engines, ``bytes`` sent to each, ``fingerprint`` of the
            weights (see ``buckets.fingerprint``).

        Raises:
            WeightUpdateError: names the engines at fault, or says that none is left. The others stay paused, unless it
                was the resuming that failed: then they serve ``version``.
        """
        start = time.monotonic()
        stream = iter(weights)
        specs: list[TensorSpec] = []
        sent = 0
        try:
            self.membership.require()
            buckets = plan_buckets(stream, self._bucket_bytes, device=self._device)
            first = list(itertools.islice(buckets, 1))
            paused = time.monotonic()
            await self.membership.all("pause", lambda target: target.pause())
            if self._made_for != self.membership.changes:
                await self._make_group()
            for bucket in itertools.chain(first, buckets):
                await self._send(bucket)
                specs += bucket.specs
                sent += bucket.buffer.numel()
            await self.membership.all("resume", lambda target: target.resume(version))
        finally:
            deque(stream, maxlen=0)
        end = time.monotonic()
        return {
            "seconds": end - start,
            "seconds_paused": end - paused,
            "bytes": float(sent),
            "fingerprint": float(fingerprint(specs)),
        }

    async def close(self) -> None:
        """Give the group up on all sides. What the engines sample is left as it is."""
        if self._group is not None:
            self._abandon_group()
            await self.membership.failures("leave its group", self._leave)

    async def _make_group(self) -> None:
        """One process group of rank 0 and every rank of every member; the old one is left first."""
        await self.close()
        members = self.membership.members
        store = host_store(self._host, timeout_s=self._timeout_s)
        self._name = next(self._names)
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
            self._group = join_group(address, 0, self._timeout_s, store)

        await self._together("join", join, lambda target: target.join(address, offsets[target.name]))
        self._made_for = self.membership.changes

    async def _send(self, bucket: Bucket) -> None:
        def broadcast() -> None:
            import torch.distributed as dist

            work = dist.broadcast(bucket.buffer, group=self._group, group_src=0, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=self._timeout_s))

        await self._together("load a bucket", broadcast, lambda t: t.load_bucket(self._name, bucket.specs))

    async def _together(self, what: str, ours: Callable[[], None], theirs: Call) -> None:
        """Do rank 0's part in a thread while every member does its own.

        Raises:
            WeightUpdateError: a part failed; the group is gone and the engine at fault no longer a member.
        """
        mine = asyncio.create_task(_in_thread(what, ours))
        calls = {asyncio.create_task(self.membership.attempt(t, what, theirs)): t for t in self.membership.members}
        try:
            await asyncio.wait({mine, *calls}, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            for task in (mine, *calls):
                task.cancel()
            await asyncio.gather(mine, *calls, return_exceptions=True)
            self._abandon_group()  # its members are in the middle of something
            raise
        if any(task.done() and task.exception() for task in (mine, *calls)):
            guilty = await self._break_up(mine, calls)
            own_error = mine.exception()
            if guilty:
                self.membership.lose(guilty)
            assert own_error is not None, "nobody failed"
            raise own_error

    async def _break_up(
        self, mine: asyncio.Task[None], calls: Mapping[asyncio.Task[None], WeightTarget]
    ) -> dict[str, str]:
        """End an operation that cannot succeed any more, on all sides; who is to blame, with the reason."""
        first = [target for task, target in calls.items() if task.done() and task.exception()][:1]
        for target in first:  # if it lives, its leaving wakes all who wait for it inside the operation
            await asyncio.gather(self.membership.attempt(target, "leave", self._leave), return_exceptions=True)
        await asyncio.wait({mine})
        self._abandon_group()  # which wakes the members that still wait for rank 0
        await asyncio.wait(calls)
        reasons = {target.name: str(task.exception()) for task, target in calls.items() if task.exception()}
        silent = await self.membership.failures("leave its group", self._leave)
        guilty = silent or {target.name: "" for target in first}
        return {name: reasons.get(name, why) for name, why in guilty.items()}

    async def _leave(self, target: WeightTarget) -> None:
        await target.leave(self._name)

    def _abandon_group(self) -> None:
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
