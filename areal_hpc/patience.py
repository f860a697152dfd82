"""Errors of file calls: which ones may pass, how long they are borne, and the path that each is about."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

RETRY_PAUSES_S = (0.02, 0.08, 0.32)
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EBUSY)
"""Errors that may pass: somebody frees space, the server comes back, a reader on NFS lets go of a deleted file."""

T = TypeVar("T")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give the errors of calls on descriptors, which name nothing, the path that they are about."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


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
