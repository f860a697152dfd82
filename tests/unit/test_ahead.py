"""Buckets packed one ahead, in a thread; no clock: the packer and the sender meet at events."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch

from areal_hpc.buckets import Bucket
from areal_hpc.weights.ahead import Ahead

LIMIT_S = 30.0


def bucket(number: int) -> Bucket:
    return Bucket(specs=(), buffer=torch.full((1,), number, dtype=torch.uint8))


class Packer:
    """Three buckets; says when each is begun, and finishes it when it is let."""

    def __init__(self) -> None:
        self.begun = [threading.Event() for _ in range(4)]
        self.let = [threading.Event() for _ in range(4)]

    def __iter__(self) -> Iterator[Bucket]:
        for number in range(3):
            self.begun[number].set()
            assert self.let[number].wait(LIMIT_S)
            yield bucket(number)
        self.begun[3].set()


def test_the_next_bucket_is_packed_while_one_is_on_its_way_and_no_other() -> None:
    async def body() -> None:
        packer = Packer()
        packer.let[0].set()
        with Ahead(iter(packer)) as ahead:
            for number in range(3):
                taken = await ahead.take()
                assert taken is not None and int(taken.buffer) == number
                # The caller has this bucket in hand, and the packer is at work on the next one.
                assert await asyncio.to_thread(packer.begun[number + 1].wait, LIMIT_S)
                assert not any(later.is_set() for later in packer.begun[number + 2 :])
                packer.let[number + 1].set()
            assert await ahead.take() is None
            assert await ahead.take() is None

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))


def test_a_bucket_that_cannot_be_packed_is_the_takers_error() -> None:
    def broken() -> Iterator[Bucket]:
        yield bucket(0)
        raise ValueError("it comes twice")

    async def body() -> None:
        with Ahead(broken()) as ahead:
            assert await ahead.take() is not None
            with pytest.raises(ValueError, match="it comes twice"):
                await ahead.take()

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))


def test_leaving_waits_for_the_bucket_that_was_begun_so_that_nobody_else_reads_beside_it() -> None:
    inside, left = threading.Event(), threading.Event()
    order: list[str] = []

    def slow() -> Iterator[Bucket]:
        yield bucket(0)
        inside.set()
        assert left.wait(LIMIT_S)
        order.append("packed")
        yield bucket(1)
        order.append("begun another")

    async def body() -> None:
        buckets = slow()
        with pytest.raises(RuntimeError, match="the engine has gone"), Ahead(buckets) as ahead:
            await ahead.take()
            assert await asyncio.to_thread(inside.wait, LIMIT_S)
            threading.Timer(0.05, left.set).start()
            raise RuntimeError("the engine has gone")
        order.append("left")
        assert next(buckets, None) is None

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))
    assert order == ["packed", "left", "begun another"]
