"""The door to submitit: a run as one of its jobs, with our batch script in the place of its own.

submitit pickles the function that the batch script calls, names its folder by the job's id, and keeps its result; it
knows nothing of heterogeneous jobs, so the text and the job's states are ours (``submitted``). The batch script's only
task is the run's launcher. Whether the job is requeued is decided in the script: submitit's own way of it never sees a
signal.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.cluster.hetjob import Job, render
from areal_hpc.errors import SubmissionError
from areal_hpc.extras import optional

if TYPE_CHECKING:
    from areal_hpc.cluster.submitted import SubmittedJob

log = logging.getLogger(__name__)

AWAY = "ontact slurm controller"
"""Slurm's word for a request that never reached the controller, so that it may be repeated; what merely timed out may
have made a job."""
CONTROLLER_S = 60.0
AGAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Launch:
    """What the batch script runs: pickled on the login node, called on the job's first node."""

    main: Callable[[Sequence[str]], int]
    arguments: tuple[str, ...]

    def __call__(self) -> int:
        """Run to the end; the exit code, if it is 0.

        Raises:
            SystemExit: it is another. submitit then keeps no result, which is right: the run failed, or will go on.
        """
        if code := self.main(self.arguments):
            sys.exit(code)
        return code


def submit(job: Job, launch: Launch, folder: Path, *, python: str) -> SubmittedJob:
    """Hand a job to Slurm and return at once, with submitit's ``Job`` of it.

    Args:
        folder: absolute directory for the script, the pickled function and its result; made if it is not there.
        python: shell words that start Python on the nodes.

    Raises:
        SubmissionError: sbatch refused it; carries what it said, and where the script is.
        ConfigError: submitit is not installed.
    """
    optional("submitit", extra="slurm", what="areal-hpc submit")
    from submitit.core import utils
    from submitit.slurm import slurm

    from areal_hpc.cluster.submitted import SubmittedJob

    class Executor(slurm.SlurmExecutor):  # type: ignore[misc]  # untyped; made here, so that only this needs submitit
        job_class = SubmittedJob

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            del uid
            return render(job, f"env SUBMITIT_EXECUTOR=slurm {command}")

        def _num_tasks(self) -> int:
            return 1

    deadline = time.monotonic() + CONTROLLER_S
    while True:
        try:
            submitted: SubmittedJob = Executor(folder / "%j", python=python).submit(launch)
        except (utils.FailedJobError, utils.FailedSubmissionError, subprocess.CalledProcessError) as error:
            if AWAY not in str(error) or time.monotonic() > deadline:
                raise SubmissionError(f"sbatch refused the job: {error}; the script is in {folder}") from error
            log.warning("Slurm's controller cannot be reached; asking again for %g s at most", CONTROLLER_S)
            time.sleep(AGAIN_S)
        except RuntimeError as error:  # submitit finds no srun
            raise SubmissionError(f"{error}; type this on a login node of the cluster") from error
        else:
            return submitted
