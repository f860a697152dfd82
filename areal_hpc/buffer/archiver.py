"""Archiving off the critical path: the trainer's rank 0 says what a step is made of, a thread does the rest.

    loop     add(step)           returns at once; only MAX_BEHIND steps may wait            (limit: timeout_s)
    thread                       reads the groups from the ring, compresses, and every so many steps seals a file
    commit   done = seal()       the file under way ends with this step
             done()              waits until all of it is durable; then the checkpoint may exist

So everything that a checkpoint says is trained is in the archive, and the ring may reclaim it; what a restart takes
back is written again under the new attempt's epoch. A failure in the thread is raised by the next call.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from areal_hpc.buffer.archive import ArchiveFile
from areal_hpc.buffer.scan import intact
from areal_hpc.errors import WaitTimeout
from areal_hpc.fs import make_private_directory
from areal_hpc.protocols import Fetch
from areal_hpc.run_dir import RunDir
from areal_hpc.types import ArchivedStep, TrainedStep

MAX_BEHIND = 4
"""Steps that may wait for the thread: a step that waits holds references and log-probs, no tokens."""

Job = Future[None]


class Archiver:
    """Archives every trained step of one attempt.

    Args:
        epoch: the attempt's; what earlier ones left unfinished is removed.
        every_steps: steps in one file, at most.
        fetch: reads groups from the ring; called in the thread.
        timeout_s: longest wait for the thread.
    """

    def __init__(
        self,
        run: RunDir,
        epoch: int,
        *,
        every_steps: int,
        fetch: Fetch,
        timeout_s: float,
    ) -> None:
        assert every_steps > 0, every_steps
        self._run, self._every_steps, self._fetch, self._timeout_s = run, every_steps, fetch, timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="archive")
        self._pending: list[Job] = []
        self._file: ArchiveFile | None = None  # the thread's
        _sweep(make_private_directory(run.archive), epoch)

    def add(self, step: TrainedStep) -> None:
        """Archive ``step`` in the background; the groups must stay readable until ``seal`` says that it is done.

        Raises:
            OSError, CorruptRecord: a step before this one could not be archived.
            WaitTimeout: the thread is MAX_BEHIND steps behind and does not catch up.
        """
        self._finish([job for job in self._pending if job.done()])
        self._pending = [job for job in self._pending if not job.done()]
        self._finish(self._pending[: 1 - MAX_BEHIND])
        self._pending.append(self._thread.submit(self._write, step))

    def seal(self) -> Callable[[], None]:
        """End the file under way; what comes back waits until every step so far is durable, and raises as ``add``."""
        jobs = [*self._pending, self._thread.submit(self._seal)]
        self._pending = jobs
        return lambda: self._finish(jobs)

    def close(self) -> None:
        """Let the thread end; steps that no checkpoint has sealed are not on disk."""
        self._thread.shutdown(cancel_futures=True)

    def _finish(self, jobs: Sequence[Job]) -> None:
        done, late = wait(jobs, timeout=self._timeout_s)
        for job in jobs:
            if job in done:
                job.result()
        if late:
            where = f"waited {self._timeout_s:g} s for the archive in {self._run.archive}"
            raise WaitTimeout(f"{where}: {len(late)} jobs are not done; set archive.every_steps=0 to go on without it")

    # In the thread

    def _write(self, step: TrainedStep) -> None:
        readable = [g for g, intact_then in enumerate(step.readable) if intact_then]
        groups = dict(zip(readable, intact(self._fetch([step.refs[g] for g in readable])), strict=True))
        self._file = self._file or ArchiveFile(step.version)
        self._file.add(ArchivedStep(step=step, groups=groups))
        if self._file.num_steps >= self._every_steps:
            self._seal()

    def _seal(self) -> None:
        if self._file is not None:
            self._file.publish(self._run)
            self._file = None


def _sweep(archive: Path, epoch: int) -> None:
    """Remove the temporary files of attempts before ``epoch``; a kill leaves them."""
    for name in os.listdir(archive):
        match = re.fullmatch(r"\.steps-\d{8}-\d{8}\.e(\d{8})\.h5\..*\.tmp", name)
        if match and int(match[1]) < epoch:
            (archive / name).unlink()
