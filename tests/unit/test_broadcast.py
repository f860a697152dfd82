"""In which order a broadcast pauses, sends and resumes; no process group, nothing is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from areal_hpc.buckets import Bucket
from areal_hpc.errors import WeightUpdateError
from areal_hpc.transfer import GroupAddress, Reception, TensorSpec
from areal_hpc.weights import broadcast
from areal_hpc.weights.baseline import DeltaBaseline
from areal_hpc.weights.broadcast import BroadcastTransport
from areal_hpc.weights.membership import Membership

WEIGHTS = {"a": torch.ones(400), "b": torch.ones(400), "c": torch.ones(400)}


class Target:
    num_ranks = 1

    def __init__(self, name: str, log: list[str], *, stages: bool, proves: bool = True, refuses: str = "") -> None:
        self.name, self._log, self.refuses = name, log, refuses
        self._stages, self._proves = stages, proves

    def note(self, what: str) -> None:
        self._log.append(f"{self.name} {what}")
        if what == self.refuses:
            raise WeightUpdateError(f"{self.name} refuses to {what}")

    async def prepare(self) -> Reception:
        self.note("prepare")
        return Reception(stages=self._stages, proves=self._proves)

    async def join(self, group: GroupAddress, rank_offset: int) -> None: ...

    async def leave(self, group_name: str) -> None: ...

    async def load_bucket(self, group_name: str, specs: Sequence[TensorSpec]) -> None: ...

    async def load_directory(self, path: str, version: int) -> None: ...

    async def pause(self) -> None:
        self.note("pause")

    async def resume(self, version: int) -> None:
        self.note(f"resume {version}")


class Group:
    """Notes what would be sent."""

    log: list[str]
    sent: list[TensorSpec]
    buffers: list[torch.Tensor]
    """Held, so that memory which is let go is nobody's."""
    breaks = False

    def __init__(self, membership: Membership, **_: Any) -> None:
        self.membership = membership

    async def gather(self) -> None:
        self.log.append("gather")

    async def send(self, bucket: Bucket) -> None:
        self.log.append("send")
        self.sent.extend(bucket.specs)
        self.buffers.append(bucket.buffer)
        if self.breaks:
            raise WeightUpdateError("broke off")

    async def close(self) -> None: ...


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Group.log, Group.sent, Group.buffers = [], [], []
    monkeypatch.setattr(broadcast, "WeightGroup", Group)
    return Group.log


def publish(transport: BroadcastTransport, version: int = 5) -> dict[str, float]:
    return dict(asyncio.run(transport.publish(version, WEIGHTS.items())))


SENDING = ["gather", "send", "send", "send"]


def test_engines_that_stage_are_paused_after_the_last_bucket(log: list[str]) -> None:
    targets = [Target(name, log, stages=True) for name in "xy"]
    told = publish(BroadcastTransport(targets, epoch=1, bucket_bytes=2000))
    paused = ["x pause", "y pause", "x resume 5", "y resume 5"]
    assert log == ["x prepare", "y prepare", *SENDING, *paused]
    assert told["seconds_paused"] < told["seconds"]


def test_one_that_does_not_stage_has_all_paused_before_the_first(log: list[str]) -> None:
    targets = [Target("x", log, stages=True), Target("y", log, stages=False, proves=False)]
    publish(BroadcastTransport(targets, epoch=1, bucket_bytes=2000))
    assert log == ["x prepare", "y prepare", "x pause", "y pause", *SENDING, "x resume 5", "y resume 5"]
    assert all(spec.checksum for spec in Group.sent), "x proves what comes"


def test_where_nobody_proves_what_comes_nobody_sums_it(log: list[str]) -> None:
    """What lies on a device would be copied to the host for that, while all are paused."""
    told = publish(BroadcastTransport([Target("x", log, stages=False, proves=False)], epoch=1, bucket_bytes=2000))
    assert [spec.checksum for spec in Group.sent] == [0, 0, 0]
    assert "fingerprint" not in told and told["bytes"] == 4800


@pytest.mark.parametrize("refused", ["prepare", "pause", "resume 5"])
def test_whoever_fails_is_lost_and_what_follows_is_whole(log: list[str], refused: str) -> None:
    good, bad = Target("good", log, stages=True), Target("bad", log, stages=True)
    transport = BroadcastTransport([good, bad], epoch=1, bucket_bytes=2000, baseline=DeltaBaseline(whole_every=100))
    publish(transport, 4)
    assert publish(transport, 4)["bytes_saved"] == 4800  # nothing had changed
    bad.refuses = refused
    with pytest.raises(WeightUpdateError, match=f"bad refuses to {refused}.*Engines left: good"):
        publish(transport)
    assert list(transport.membership.lost) == ["bad"]
    del Group.sent[:]
    assert publish(transport)["bytes_saved"] == 0
    assert [(spec.name, spec.num_changed) for spec in Group.sent] == [("a", None), ("b", None), ("c", None)]
    assert publish(transport)["bytes_saved"] == 4800
    assert [spec.num_changed for spec in Group.sent[3:]] == [0, 0, 0]


def test_an_update_takes_the_memory_of_the_one_before_it_unless_that_failed(log: list[str]) -> None:
    """After a failure somebody may still be sending from it."""
    transport = BroadcastTransport([Target("x", log, stages=True)], epoch=1, bucket_bytes=2000)

    def used() -> set[int]:
        started = len(Group.buffers)
        publish(transport)
        return {buffer.data_ptr() for buffer in Group.buffers[started:]}

    first = used()
    assert used() <= first
    Group.breaks = True
    with pytest.raises(WeightUpdateError, match="broke off"):
        publish(transport)
    Group.breaks = False
    assert not used() & first
