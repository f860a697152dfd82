"""New weights by collective broadcast: from the trainer's rank 0 to all engine ranks at once, bucket by bucket.

    every member says how it takes buckets: whether it samples on meanwhile, and whether it proves them
    first bucket ready: pause all, if one does not sample on        ---- sampling stops
    membership changed? every member joins a group of a fresh name w-<epoch>-<k>@<nonce> at a fresh port
    each bucket: all members receive while rank 0 broadcasts, and packs the next one (``ahead.py``)
    pause all, if that was not needed before
    all sent, and nobody objects         ---- the version barrier
    resume all under the new version     ---- sampling goes on, save on an engine that only now finds a checksum wrong

When something fails, the engine at fault leaves the membership (``group.py``) and ``publish`` raises; engines that are
paused stay paused. Publish again, with the weights anew, to bring the members that are left up to date. An engine that
comes later is caught up alone, in a group of two that is gone afterwards: the others sample on, and are not harmed if
it fails.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from areal_hpc.accelerator import CPU
from areal_hpc.buckets import BucketMemory, fingerprint, plan_buckets
from areal_hpc.collective import device_for, interfaces
from areal_hpc.delta import Weight
from areal_hpc.protocols import WeightTarget
from areal_hpc.transfer import TensorSpec
from areal_hpc.weights.ahead import AHEAD, Ahead
from areal_hpc.weights.baseline import DeltaBaseline, sent
from areal_hpc.weights.group import WeightGroup
from areal_hpc.weights.membership import Membership

if TYPE_CHECKING:
    import torch


class BroadcastTransport:
    """A ``WeightTransport`` on the trainer's rank 0.

    Args:
        epoch: the attempt of the run; part of every group's name.
        backend: gloo, nccl or hccl.
        bucket_bytes: size of one transfer.
        timeout_s: longest time of any one step: joining, one bucket, one call.
        host: address of this process as the engines see it.
        baseline: where only what has changed is to be sent.
        stands_for: bytes of the weights in whose place adapters are sent; None where it is the weights that are.
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
        baseline: DeltaBaseline | None = None,
        stands_for: int | None = None,
    ) -> None:
        self.membership = Membership(targets, timeout_s)
        self.route = f"{backend} from {host}; {interfaces(backend)}"
        accelerator = device_for(backend)
        self._memory, self._keeps_memory = BucketMemory(accelerator.device, reuse=AHEAD + 1), accelerator is CPU
        self._backend = backend
        self._bucket_bytes = bucket_bytes
        self._host = host
        self._baseline, self._stands_for = baseline, stands_for
        self._names = (f"w-{epoch}-{k}" for k in itertools.count())
        self._everyone = self._group_of(self.membership)

    def _group_of(self, membership: Membership) -> WeightGroup:
        return WeightGroup(membership, names=self._names, backend=self._backend, host=self._host)

    async def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, float]:
        """Bring every member to ``version``.

        ``weights`` is always read to its end, also on failure: producing it is collective over the trainer's ranks.

        Returns:
            ``seconds`` in all, ``seconds_paused`` of the engines, ``bytes`` sent to each, with a baseline or adapters
            ``bytes_saved`` by it, ``fingerprint`` of what was sent (see ``buckets.fingerprint``) where an engine proves
            what comes.

        Raises:
            WeightUpdateError: names the engines at fault, or says that none is left. The others stay paused, or, if
                it was the resuming that failed, serve ``version``; or sample on with what they had.
        """
        stream, holders = iter(weights), self.membership.changes
        travelling = stream if self._baseline is None else self._baseline.against(stream, holders)
        told = await self._update(self._everyone, version, stream, travelling)
        if self._baseline is not None:
            self._baseline.settle(holders)
        return told

    async def catch_up(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], targets: Sequence[WeightTarget]
    ) -> Mapping[str, float]:
        """Bring ``targets`` alone to ``version``, which the members serve; then they are members too.

        ``weights`` is read to its end, as by ``publish``.

        Raises:
            WeightUpdateError: one of them failed, and none has become a member; the members are as they were.
        """
        stream = iter(weights)
        with self.membership.catching_up(targets) as newcomers:
            group = self._group_of(newcomers)
            try:
                return await self._update(group, version, stream, stream)
            finally:
                await group.close()

    async def _update(
        self,
        group: WeightGroup,
        version: int,
        weights: Iterator[tuple[str, torch.Tensor]],
        travelling: Iterator[tuple[str, Weight]],
    ) -> Mapping[str, float]:
        """Send ``travelling``, which is made of ``weights``; those are read to their end."""
        membership = group.membership
        start = time.monotonic()
        specs: list[TensorSpec] = []
        try:
            membership.require()
            reception = await membership.prepare()
            with self._buckets(travelling, summed=reception.proves) as ahead:
                bucket = await ahead.take()
                paused = time.monotonic()
                if not reception.stages:
                    await membership.all("pause", lambda target: target.pause())
                await group.gather()
                while bucket is not None:
                    await group.send(bucket)
                    specs += bucket.specs
                    bucket = await ahead.take()
            if reception.stages:
                paused = time.monotonic()
                await membership.all("pause", lambda target: target.pause())
            await membership.all("resume", lambda target: target.resume(version))
        finally:
            deque(weights, maxlen=0)
        end = time.monotonic()
        return {
            "seconds": end - start,
            "seconds_paused": end - paused,
            **sent(specs, self._stands_for, deltas=self._baseline is not None),
            **({"fingerprint": float(fingerprint(specs))} if reception.proves else {}),
        }

    @contextmanager
    def _buckets(self, travelling: Iterator[tuple[str, Weight]], *, summed: bool) -> Iterator[Ahead]:
        """Buckets, packed ahead. Their host memory is kept for the next update if this one went well, since page faults
        cost more than the copy; a device's memory is given back, since the trainer needs it meanwhile."""
        went_well = False
        try:
            planned = plan_buckets(travelling, self._bucket_bytes, self._memory, summed=summed)
            with Ahead(planned) as ahead:
                yield ahead
            went_well = True
        finally:
            if not (went_well and self._keeps_memory):
                self._memory.forget()

    async def close(self) -> None:
        """Give the group up on all sides. What the engines sample is left as it is."""
        await self._everyone.close()
