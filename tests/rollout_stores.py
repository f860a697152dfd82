"""The ring on disk and its specification in memory behind one face, for tests that run on both."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.buffer.epochs import claim_epoch
from areal_hpc.buffer.memory import MemoryRing
from areal_hpc.buffer.order import FixedOrder
from areal_hpc.buffer.reader import RingReader
from areal_hpc.buffer.writer import RingWriter
from areal_hpc.config.schema import BufferConfig
from areal_hpc.run_dir import RunDir
from areal_hpc.types import StopReason, Ticket, Trajectory, TrajectoryGroup, WeightVersion

NEVER_S = 1e6
"""Commits happen when a test says so, not by the clock."""


def group(position: int, versions: list[int]) -> TrajectoryGroup:
    """A group of two trajectories; its tokens are the position's, sampled by ``versions``."""
    trajectories = tuple(
        Trajectory(
            token_ids=np.array([position, *range(len(versions))], dtype=np.int32),
            loss_mask=np.array([False] + [True] * len(versions)),
            logprobs=np.array([0.0] + [-0.5 * i] * len(versions), dtype=np.float32),
            versions=np.array([-1, *versions], dtype=np.int32),
            reward=float(i),
            stop=StopReason.LENGTH if i else StopReason.STOP,
            episode=i,
        )
        for i in range(2)
    )
    return TrajectoryGroup(position=position, prompt_id=f"p{position}", trajectories=trajectories)


class MemoryStore:
    """The specification."""

    def __init__(self, capacity: int, max_staleness: int, num_slots: int, order: FixedOrder | None = None) -> None:
        self.shape, self.order = (capacity, max_staleness, num_slots), order
        self.ring = MemoryRing(*self.shape, order=order)

    @property
    def epoch(self) -> int:
        return self.ring.epoch

    @property
    def reader(self) -> Any:
        return self.ring.reader

    def writer(self, slot: int) -> Any:
        return self.ring.writer(slot)

    def flush(self, writer: Any) -> None:
        pass

    def kill(self, writer: Any) -> None:
        pass

    def restart(self, state: Mapping[str, Any] | None, parent: WeightVersion | None) -> None:
        self.ring = MemoryRing(*self.shape, order=self.order, before=self.ring, state=state, parent=parent)

    def close(self) -> None:
        pass


class DiskStore:
    """The ring, with segments so small that they roll all the time."""

    def __init__(self, capacity: int, max_staleness: int, num_slots: int, order: FixedOrder | None = None) -> None:
        self.directory = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.run = RunDir.create(Path(self.directory.name) / "run")
        self.shape: dict[str, Any] = {"capacity": capacity, "num_slots": num_slots, "order": order}
        self.config = BufferConfig(max_staleness=max_staleness, segment_mb=0.002, commit_s=NEVER_S)
        self.writers: list[RingWriter] = []
        self.restart(None, None)

    def writer(self, slot: int) -> RingWriter:
        shape = {"config": self.config, **self.shape}
        writer = RingWriter(self.run, self.epoch, slot=slot, poll_s=0.0, fence_s=0.0, **shape)
        self.writers.append(writer)
        return writer

    def flush(self, writer: RingWriter) -> None:
        writer.flush()

    def kill(self, writer: RingWriter) -> None:
        writer._commits.stop()
        writer._chain.close()
        self.writers.remove(writer)

    def restart(self, state: Mapping[str, Any] | None, parent: WeightVersion | None) -> None:
        self.epoch = claim_epoch(self.run, {"job": "test"})
        shape = {"config": self.config, **self.shape}
        self.reader = RingReader(self.run, self.epoch, state=state, parent=parent, poll_s=0.0, discover_s=0.0, **shape)
        self.reader.write_start(WeightVersion(self.epoch, parent.step if parent else 0), "data", {})

    def close(self) -> None:
        for writer in list(self.writers):
            self.kill(writer)
        self.directory.cleanup()


class Worker:
    """How a rollout worker walks its shard of the stream: positions to run again first."""

    def __init__(self, writer: Any, slot: int, num_slots: int) -> None:
        self.writer, self.position, self.num_slots = writer, slot, num_slots
        self.again: list[int] = []
        self.open: list[Ticket] = []

    def reserve(self) -> Ticket | None:
        issued = self.writer.issued()
        if issued is None:
            return None
        self.again += self.writer.reissues()
        while self.position in issued and not self.again:
            self.position += self.num_slots
            issued = self.writer.issued() if not self.open else issued
        position = self.again[0] if self.again else self.position
        ticket: Ticket | None = self.writer.try_reserve(position)
        if ticket is None:
            return None
        if self.again:
            self.again.pop(0)
        else:
            self.position += self.num_slots
        self.open.append(ticket)
        return ticket
