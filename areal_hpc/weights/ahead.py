"""Buckets packed one ahead: while one is sent and loaded, the next is gathered from the trainer's ranks and summed.

    thread     pack 1 | pack 2 | pack 3 ...
    caller              send 1 | send 2 ...        at most two buckets are in memory

Gathering is collective over the trainer's ranks, so a bucket that was begun is always finished: ``close`` waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from areal_hpc.buckets import Bucket

AHEAD = 1
"""Buckets packed beside the one that the caller has in hand."""


class Ahead:
    """``with Ahead(buckets) as ahead: while (bucket := await ahead.take()) is not None: ...``

    ``buckets`` is asked in a thread of its own from the beginning; whoever else reads what it is made of does so after
    ``close``.
    """

    def __init__(self, buckets: Iterator[Bucket]) -> None:
        self._buckets = buckets
        self._pool = ThreadPoolExecutor(1, "packing")
        self._next = self._begin()

    def _begin(self) -> Future[Bucket | None]:
        return self._pool.submit(next, self._buckets, None)

    async def take(self) -> Bucket | None:
        """The next bucket, None after the last; the one after it is begun.

        Raises:
            whatever packing it raises.
        """
        bucket = await asyncio.wrap_future(self._next)
        self._next = self._begin()
        return bucket

    def close(self) -> None:
        """Wait for the bucket that is being packed, and begin no other."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
