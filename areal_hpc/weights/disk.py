"""New weights by way of a directory that trainer and engines both see: slow, but any engine can load it at any time.

write safetensors into a hidden directory     generation goes on
manifest, fsync, rename                       the version appears, whole
pause all -> load the directory, each tensor held against its CRC-32C -> resume all
remove older versions

An engine that comes later is caught up in the same way, alone.

<directory>/v00000012.e00000003.0/            version, epoch of the run, and a count, since a version may come twice
    model-00001.safetensors ...               Hugging Face names
    manifest.json                             what each file must be: size, tensors and their CRC-32C
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.buckets import BucketMemory, fingerprint, plan_buckets
from areal_hpc.delta import Weight
from areal_hpc.fs import fsync_directory, make_private_directory, publish_json
from areal_hpc.privacy import make_inside
from areal_hpc.protocols import WeightTarget
from areal_hpc.transfer import TensorSpec
from areal_hpc.waits import advance
from areal_hpc.weight_files import MANIFEST, write_file
from areal_hpc.weights.baseline import DeltaBaseline, sent
from areal_hpc.weights.membership import Membership

if TYPE_CHECKING:
    import torch

VERSION_NAME = re.compile(r"v(\d{8})\.e(\d{8})\.(\d+)")
UNFINISHED = ".tmp"


class DiskTransport:
    """A ``WeightTransport`` on the trainer's rank 0.

    Args:
        directory: on a file system that the engines see under the same path.
        epoch: the attempt of the run; what older attempts left behind is removed.
        keep: newest versions that stay.
        file_bytes: size of one safetensors file.
        timeout_s: longest time of any one call to an engine.
        baseline: where only what has changed is to be written.
        stands_for: bytes of the weights in whose place adapters are written; None where it is the weights that are.
    """

    def __init__(
        self,
        directory: Path,
        targets: Sequence[WeightTarget],
        *,
        epoch: int,
        keep: int = 1,
        file_bytes: int = 1 << 30,
        timeout_s: float = 600.0,
        baseline: DeltaBaseline | None = None,
        stands_for: int | None = None,
    ) -> None:
        assert keep >= 1, "the version being served must stay"
        self.membership = Membership(targets, timeout_s)
        self._directory = make_private_directory(directory.absolute())
        self.route = f"files in {self._directory}"
        self._epoch = epoch
        self._keep = keep
        self._file_bytes = file_bytes
        self._count = itertools.count()
        self._baseline, self._stands_for = baseline, stands_for

    async def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, float]:
        """Bring every member to ``version``; see ``BroadcastTransport.publish``.

        Raises:
            WeightUpdateError: as there.
            OSError: the version could not be written; every engine samples on as it was.
        """
        stream, holders = iter(weights), self.membership.changes
        travelling = stream if self._baseline is None else self._baseline.against(stream, holders)
        told = await self._update(self.membership, version, stream, travelling)
        if self._baseline is not None:
            self._baseline.settle(holders)
        return told

    async def catch_up(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], targets: Sequence[WeightTarget]
    ) -> Mapping[str, float]:
        """Bring ``targets`` alone to ``version``; see ``BroadcastTransport.catch_up``.

        Raises:
            WeightUpdateError, OSError: as there, and as for ``publish``.
        """
        stream = iter(weights)
        with self.membership.catching_up(targets) as newcomers:
            return await self._update(newcomers, version, stream, stream)

    async def _update(
        self,
        membership: Membership,
        version: int,
        weights: Iterator[tuple[str, torch.Tensor]],
        travelling: Iterator[tuple[str, Weight]],
    ) -> Mapping[str, float]:
        """Write ``travelling``, which is made of ``weights``, and have it loaded; those are read to their end."""
        start = time.monotonic()
        try:
            membership.require()
            place, specs = self._write(version, travelling)
        finally:
            deque(weights, maxlen=0)
        await membership.prepare()
        paused = time.monotonic()
        await membership.all("pause", lambda target: target.pause())
        await membership.all("load weights", lambda target: target.load_directory(str(place), version))
        await membership.all("resume", lambda target: target.resume(version))
        end = time.monotonic()
        await asyncio.to_thread(self._remove_old)
        return {
            "seconds": end - start,
            "seconds_paused": end - paused,
            **sent(specs, self._stands_for, deltas=self._baseline is not None),
            "fingerprint": float(fingerprint(specs)),
        }

    async def close(self) -> None:
        """Nothing is open."""

    def _write(self, version: int, weights: Iterator[tuple[str, Weight]]) -> tuple[Path, list[TensorSpec]]:
        """The version's directory, complete, and what is in it."""
        name = f"v{version:08d}.e{self._epoch:08d}.{next(self._count)}"
        hidden = self._directory / f".{name}{UNFINISHED}"
        make_inside(hidden)
        files, specs = {}, list[TensorSpec]()
        buckets = plan_buckets(weights, self._file_bytes, BucketMemory("cpu", reuse=1))
        for number, bucket in enumerate(buckets, start=1):
            file = hidden / f"model-{number:05d}.safetensors"
            files[file.name] = write_file(file, bucket)
            specs += bucket.specs
            advance("bytes written", files[file.name]["bytes"])
        publish_json(hidden / MANIFEST, {"version": version, "epoch": self._epoch, "files": files})
        place = self._directory / name
        hidden.rename(place)
        fsync_directory(self._directory)
        return place, specs

    def _remove_old(self) -> None:
        """Keep the newest versions; the rest goes, and so does what earlier attempts did not finish."""
        found = []
        for name in os.listdir(self._directory):
            match = VERSION_NAME.fullmatch(name.removeprefix(".").removesuffix(UNFINISHED))
            if match:
                version, epoch, count = (int(group) for group in match.groups())
                found.append(((not name.startswith("."), epoch, version, count), name))
        for _, name in sorted(found)[: -self._keep]:
            shutil.rmtree(self._directory / name)
