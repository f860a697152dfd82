"""Rank 0's end of a weight group, where its own part hangs; no process group, nothing is sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

import pytest
import torch

from areal_hpc.buckets import plan_buckets
from areal_hpc.errors import WeightUpdateError
from areal_hpc.protocols import WeightTarget
from areal_hpc.transfer import GroupAddress, TensorSpec
from areal_hpc.weights import group as module
from areal_hpc.weights.group import WeightGroup
from areal_hpc.weights.membership import Membership

LIMIT_S = 0.2


class Engine:
    """Dies when the first bucket comes, which is when NCCL's ranks meet."""

    name, num_ranks = "engine-0", 1

    async def join(self, group: GroupAddress, rank_offset: int) -> None: ...

    async def leave(self, group_name: str) -> None:
        raise WeightUpdateError("it does not answer")

    async def load_bucket(self, group_name: str, specs: Sequence[TensorSpec]) -> None:
        raise WeightUpdateError("it has died")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What holds rank 0's thread; its group is one that can be left."""
    over = threading.Event()
    monkeypatch.setattr(module, "join_group", lambda *_, **__: object())
    monkeypatch.setattr(module, "leave_group", lambda _: None)
    monkeypatch.setattr(module, "broadcast", lambda *_: over.wait())
    yield over
    over.set()


def group_after_an_update(engine: Engine, held: threading.Event, words: str) -> WeightGroup:
    """Of rank 0 and this engine, after a bucket whose sending has failed with these words."""
    [bucket] = plan_buckets([("w", torch.ones(3))], 100)
    names = (f"w-1-{number}" for number in count())
    membership = Membership([cast(WeightTarget, engine)], LIMIT_S)
    group = WeightGroup(membership, names=names, backend="nccl", host="127.0.0.1")

    async def update() -> None:
        await group.gather()
        try:
            await asyncio.wait_for(group.send(bucket), 60.0)
        finally:
            held.set()  # or the loop would wait for the thread at its end

    with pytest.raises(WeightUpdateError, match=words):
        asyncio.run(update())
    return group


def test_fault_46_an_entry_without_a_limit_is_given_up_and_who_died_is_named(held: threading.Event) -> None:
    group = group_after_an_update(Engine(), held, "it has died")
    assert list(group.membership.lost) == ["engine-0"]


class Taker(Engine):
    """Says that it has taken what rank 0 is still to send."""

    async def leave(self, group_name: str) -> None: ...

    async def load_bucket(self, group_name: str, specs: Sequence[TensorSpec]) -> None: ...


def test_where_all_engines_are_through_and_rank_0_hangs_the_wait_ends_and_no_engine_is_blamed(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    group = group_after_an_update(Taker(), held, "rank 0 hangs where it was to load a bucket")
    assert not group.membership.lost and group._group is None, "the next publication makes another group"


def test_a_bucket_is_sent_beside_what_packs_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else that would wait: to wait for an operation of NCCL's, or of HCCL's, holds up the stream of who waits until it
    has ended (``WorkNCCL::synchronizeStream`` in torch 2.13), and all threads have the same one."""
    order: list[str] = []

    @contextmanager
    def beside(device: torch.device) -> Iterator[None]:
        order.append(f"beside on {device}")
        yield
        order.append("over")

    monkeypatch.setattr(module, "beside", beside)
    monkeypatch.setattr(module, "join_group", lambda *_, **__: object())
    monkeypatch.setattr(module, "broadcast", lambda *_: order.append("broadcast"))
    [bucket] = plan_buckets([("w", torch.ones(3))], 100)
    membership = Membership([cast(WeightTarget, Taker())], 10.0)
    group = WeightGroup(membership, names=iter(["w-1-0"]), backend="nccl", host="127.0.0.1")

    async def update() -> None:
        await group.gather()
        await group.send(bucket)

    asyncio.run(update())
    assert order == ["beside on cpu", "broadcast", "over"]
