"""The launcher's last resort: where it hangs in a file call itself, a thread that touches no file ends the run.

    launcher's loop     beat()           each round
    guard's thread      looks            no round for ``limit_s``: names the call, ends every process, exit code 70

The watchdog judges the roles from files, so a server that answers nobody stops the launcher's loop as well, and nothing
interrupts such a call. What the guard does has limits, too: a log on the same mount takes no message, and a process
that hangs in the kernel ends only when that server answers.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType

from areal_hpc.waits import FILE_SYSTEM, open_waits

log = logging.getLogger(__name__)

LOOK_S = 0.25
LAST_ACTS_S = 25.0
"""How long ending the processes and saying why may take, each: longer than trainers and then the others are waited for
that hang in the kernel after they were killed."""


class Guard(AbstractContextManager["Guard"]):
    """Watches one thread, which says each time that it comes round.

    Args:
        place: the directory that its file calls are about, for the message.
        limit_s: longest time for a round.
        end_all: ends every process of the attempt; called in a thread of its own.
        leave: ends this process with an exit code.
    """

    def __init__(
        self,
        place: Path,
        limit_s: float,
        end_all: Callable[[], object],
        *,
        exit_code: int,
        leave: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place, self._limit_s, self._end_all, self._exit_code = place, limit_s, end_all, exit_code
        self._leave, self._clock = leave, clock
        self._rounds = self._seen = 0
        self._looked, self._still_s = clock(), 0.0  # when, and for how long nothing has come round
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)

    def __enter__(self) -> Guard:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def beat(self) -> None:
        """Say that the loop has come round."""
        self._rounds += 1

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            if self._has_hung():
                text = self._text()
                _within(LAST_ACTS_S, self._end_all)
                _within(LAST_ACTS_S, partial(log.critical, "%s", text))
                self._leave(self._exit_code)
                return

    def _has_hung(self) -> bool:
        """Look once. What passed between two looks counts for a second at most: a launcher that a signal had stopped,
        or that got no processor, has not hung."""
        passed_s, self._looked = self._clock() - self._looked, self._clock()
        self._still_s = self._still_s + min(passed_s, 1.0) if self._rounds == self._seen else 0.0
        self._seen = self._rounds
        return self._still_s > self._limit_s

    def _text(self) -> str:
        call = next((wait.what for wait in open_waits() if FILE_SYSTEM in wait.parties), "a file call")
        return (
            f"the launcher itself has hung for {self._still_s:.0f} s (limits.stall_s) at {call}: the file system of "
            f"{self._place} does not answer. All processes of the attempt were told to end; once it answers again, "
            "go on from the last checkpoint with --resume"
        )


def _within(limit_s: float, act: Callable[[], object]) -> None:
    """Do it, but wait no longer than that."""
    thread = threading.Thread(target=act, name="last act", daemon=True)
    thread.start()
    thread.join(limit_s)
