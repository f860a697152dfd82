"""What a submission hands out: submitit's ``Job``, with states and logs that are right for our jobs as well.

    from areal_hpc.cli import main             in a notebook, on a login node
    from areal_hpc.roles.submission import submit_run
    job = submit_run(config, main).job         which is what `areal-hpc submit` does
    job.state                                  one word for all components; job.states has one each
    job.done(), job.wait()                     also end where Slurm keeps no accounts
    job.result()                               0, the run's exit code; or UncompletedJobError with the end of its log
    job.stdout()                               the batch script's output, over all requeues
    job.cancel()                               all components

submitit asks the accounts alone, which many sites do not keep and which are silent for a second, and takes no name such
as 12+1 for a job's; a job that dies without a result is then waited for without end. Here the controller is asked
first. A job is over when it has been for ``SETTLED_S``: one that is being requeued looks failed for an instant. Of a
chain (cluster.requeue=false) this is the first job; ``liveness.job.jobs_of`` names all.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from submitit.core import utils
from submitit.slurm import slurm

from areal_hpc.cluster.hetjob import log_of
from areal_hpc.cluster.jobs import FINAL, FORGOTTEN, cancel, folded, states
from areal_hpc.errors import SubmissionError

log = logging.getLogger(__name__)

SETTLED_S = 2.0
LONGEST_S = 30
"""Between two questions to Slurm."""


class Watcher(slurm.SlurmInfoWatcher):  # type: ignore[misc]  # untyped
    """Asks for all jobs of this process at once, at growing intervals."""

    def __init__(self, delay_s: int = LONGEST_S) -> None:
        super().__init__(delay_s)
        self._over_since: dict[str, float] = {}

    def update(self) -> None:
        """Ask now. A scheduler that does not answer leaves what was known before."""
        self._num_calls += 1
        self._last_status_check = now = time.time()
        if not (jobs := sorted(self._registered - self._finished, key=int)):
            return
        try:
            told = states(jobs)
        except SubmissionError as error:
            log.warning("job %s: %s", ", ".join(jobs), error)
            return
        for job in jobs:
            state = folded(told[job]) if job in told else FORGOTTEN
            self._info_dict[job] = {"JobID": job, "State": state, "States": ",".join(told.get(job, [state]))}
            if state not in FINAL:
                self._over_since.pop(job, None)
            elif now - self._over_since.setdefault(job, now) >= SETTLED_S:
                self._finished.add(job)

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        self.get_info(job_id, mode)
        return job_id in self._finished


class Paths(utils.JobPaths):  # type: ignore[misc]  # untyped
    """submitit's files of a job, and our log of it, which has both streams."""

    @property
    def stdout(self) -> Path:
        return log_of(self.folder.parent, str(self.job_id))


class SubmittedJob(slurm.SlurmJob):  # type: ignore[misc]  # untyped
    """A run in Slurm's hands. Its one task is the launcher: ``num_tasks`` is 1, however many components it has."""

    watcher = Watcher()
    _results_timeout_s = 5

    def __init__(self, folder: Path | str, job_id: str, tasks: tuple[int, ...] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._paths = Paths(folder, job_id=job_id, task_id=self.task_id)

    @property
    def states(self) -> tuple[str, ...]:
        """The state of each component, that of the trainer first; asked now."""
        told = self.watcher.get_info(self.job_id, mode="force").get("States", "")
        return tuple(told.split(",")) if told else ()

    def cancel(self, check: bool = True) -> None:
        """Cancel all components.

        Raises:
            SubmissionError: Slurm refused, or does not answer; only with ``check``.
        """
        try:
            cancel([self.job_id])
        except SubmissionError:
            if check:
                raise
