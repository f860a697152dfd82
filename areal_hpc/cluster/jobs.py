"""What Slurm says of a job, asked once and never in a loop."""

from __future__ import annotations

import subprocess

from areal_hpc.errors import SubmissionError

ASK_S = 30.0
UNKNOWN_JOB = "Invalid job id specified"


def queued(job_id: str) -> str:
    """The state of a job that is in the queue, such as RUNNING; empty if it is not there (any more).

    Raises:
        SubmissionError: Slurm does not answer.
    """
    # No column has a width: a long user name or state would be cut off, or take another's place.
    command = ["squeue", "--noheader", "--jobs", job_id, "--format", "%T"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SubmissionError(f"squeue does not answer: {error}; type this on a login node of the cluster") from error
    if asked.returncode and UNKNOWN_JOB not in asked.stderr:
        raise SubmissionError(f"squeue failed: {asked.stderr.strip()}; try again when Slurm answers")
    states = asked.stdout.split()
    return states[0] if states else ""
