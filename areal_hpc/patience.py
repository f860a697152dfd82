"""Errors of file calls: which ones may pass or lie, how long they are borne, and the path that each is about."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

RETRY_PAUSES_S = (0.02, 0.08, 0.32)
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EBUSY)
"""Errors that may pass: somebody frees space, the server comes back, a reader on NFS lets go of a deleted file."""

T = TypeVar("T")


class naming:  # noqa: N801  a context, used like a function; a generator would cost a read of a group a tenth more
    """Give the errors of calls on descriptors, which name nothing, the path that they are about."""

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self._path)


def retried(call: Callable[[], T]) -> T:
    """What ``call`` returns; a stale handle or an I/O error is tried again a few times, since a new lookup mends it.

    Raises:
        OSError: it failed every time, for about half a second, or in another way.
    """
    for pause_s in RETRY_PAUSES_S:
        try:
            return call()
        except OSError as error:
            if error.errno not in (errno.ESTALE, errno.EIO):
                raise
        time.sleep(pause_s)
    return call()


def rename(source: Path, target: Path) -> None:
    """``os.replace``, which may answer that ``source`` is not there although it has moved it: a server did as it was
    asked, the answer was lost, and the repeated request found nothing. Not durable before the directory is synced.
    """
    inode = source.stat().st_ino
    try:
        os.replace(source, target)
    except FileNotFoundError:
        if not target.exists() or opened_status(target).st_ino != inode:
            raise


def opened_status(path: Path) -> os.stat_result:
    """The status of ``path`` through a fresh descriptor: opening is what revalidates it on a network file system."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)
