"""A worker of SGLang or vLLM enters the trainer's weight group in a thread, and computes on meanwhile.

entry = entering(address, rank, limit_s)      the thread ends within that limit, whatever the others do
leave(entry)                                  at any time: the group is left now, or as soon as it is entered
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from areal_hpc.accelerator import card_here
from areal_hpc.collective import join_group, leave_group
from areal_hpc.transfer import GroupAddress

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def entering(address: GroupAddress, rank: int, limit_s: float) -> Future[ProcessGroup]:
    """Begin to enter, on the device of the calling thread, in a thread of its own: an entry that nobody wants any more
    must not be waited for.

    Args:
        limit_s: longest time of the entry, and then of each operation on the group.
    """
    pool = ThreadPoolExecutor(1, "joining")
    entry = pool.submit(join_group, address, rank, limit_s, card=card_here())
    pool.shutdown(wait=False)
    return entry


def leave(entry: Future[ProcessGroup]) -> None:
    """Leave the group now, or once it has formed after all: else nobody would give up its connections and its memory on
    a device."""
    entry.add_done_callback(_leave_entered)


def _leave_entered(entry: Future[ProcessGroup]) -> None:
    if entry.exception() is None:
        leave_group(entry.result())
