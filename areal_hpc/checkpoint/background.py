"""One job at a time in a thread of its own; its failure is raised where its result is taken, so none is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from areal_hpc.errors import WaitTimeout

Result = TypeVar("Result")


class Background(Generic[Result]):
    """Runs a job in a thread and hands its result over later.

        background.start("the checkpoint of step 20", job)
        ... result = background.take()              None while the job goes on; raises what the job raised
        background.wait(60)                         before the next ``start``, and at the end

    The thread is a daemon: a disk that hangs must not keep a process from ending.
    """

    def __init__(self) -> None:
        self._what = ""
        self._thread: threading.Thread | None = None
        self._result: Result | None = None
        self._failure: BaseException | None = None

    def start(self, what: str, job: Callable[[], Result]) -> None:
        """Run ``job``; ``what`` names it in whatever goes wrong."""
        assert self._thread is None, f"{self._what} is not taken yet"
        self._what = what
        self._thread = threading.Thread(target=self._run, args=(job,), name=what, daemon=True)
        self._thread.start()

    def _run(self, job: Callable[[], Result]) -> None:
        try:
            self._result = job()
        except BaseException as error:
            self._failure = error

    @property
    def is_busy(self) -> bool:
        """Whether there is a job whose result was not taken yet."""
        return self._thread is not None

    def take(self) -> Result | None:
        """The result of the job that has ended, once; None while it goes on or where there is none.

        Raises:
            Whatever the job raised, with a note that says which job it was.
        """
        if self._thread is None or self._thread.is_alive():
            return None
        result, failure = self._result, self._failure
        self._thread = self._result = self._failure = None
        if failure is not None:
            failure.add_note(f"in the background, while making {self._what}")
            raise failure
        return result

    def wait(self, timeout_s: float) -> None:
        """Return once no job is running.

        Raises:
            WaitTimeout: the job did not end in time; names it.
        """
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WaitTimeout(
                f"waited {timeout_s:g} s for {self._what}; look at its disk, or raise limits.checkpoint_s"
            )
