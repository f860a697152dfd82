"""The Slurm job that a run is, or was last: found in the run's files, and what Slurm says of it.

A job is known by its directory under ``slurm/``, which ``submit`` makes, and a job that chains for the next one; or, of
a script that somebody typed, by the attempts that ran in it. Slurm counts jobs up, so the highest number is the newest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from areal_hpc.cluster.hetjob import log_of
from areal_hpc.cluster.jobs import (
    WAITS,
    Accounted,
    Queued,
    accounted,
    cancel,
    first_failure,
    last_incarnation,
    queued,
    queued_beside,
)
from areal_hpc.cluster.owner import Owner
from areal_hpc.cluster.reasons import explained
from areal_hpc.errors import RunDirError, SubmissionError
from areal_hpc.fs import create_exclusive, make_private_directory, names_in, read_if_listed
from areal_hpc.liveness.resting import resting
from areal_hpc.liveness.stopping import ALIVE, state_of, stop_run
from areal_hpc.run_dir import RunDir

SUBMISSION = re.compile(r"submission-(\d{4})\.json")
"""What ``areal-hpc submit`` leaves of each submission."""
SUCCESSOR = re.compile(r"task-\d+")
"""Where the script of a satellite tells which job comes in its place (satellites.py)."""
JOINED = re.compile(r"joined-(\d+)(?:_\d+)?")
"""What a job leaves that joins with its engines; of an array, each of its tasks."""


def jobs_of(run: RunDir) -> list[str]:
    """The ids of all jobs of a run that its files tell of, oldest first."""
    made = {name for name in (names_in(run.slurm) if run.slurm.is_dir() else []) if name.isdigit()}
    ran = {job["job_id"] for attempt in run.all_attempts() if (job := read_if_listed(attempt.job))}
    return sorted(made | ran, key=int)


@dataclass(frozen=True, slots=True)
class Submission:
    """One call of ``areal-hpc submit``."""

    number: int
    record: Mapping[str, Any]
    """What the submission left in its file; without a ``job_id`` while it is under way."""
    path: Path

    @property
    def config(self) -> Path:
        """What was submitted: later edits of the configuration do not reach a queued job."""
        return self.path.with_name(f"config-{self.number:04d}.yaml")


def submission_of(run: RunDir, number: int) -> Submission:
    """The ``number``-th one, whether it is there or is to come."""
    path = run.slurm / f"submission-{number:04d}.json"
    return Submission(number, read_if_listed(path) or {}, path)


def newest_submission(run: RunDir) -> Submission | None:
    """The last one; None of a run that was never submitted."""
    names = names_in(run.slurm) if run.slurm.is_dir() else []
    numbers = [int(match[1]) for name in names if (match := SUBMISSION.fullmatch(name))]
    return submission_of(run, max(numbers)) if numbers else None


def batch_log(run: RunDir, job_id: str) -> Path:
    """The output of a submitted job's batch script, over all its requeues."""
    return log_of(run.slurm, job_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """What Slurm says of a run's newest job."""

    job_id: str
    queued: Queued | None = None
    """The job as the queue has it; None if it is not there, or Slurm does not answer."""
    ended: Sequence[Accounted] = ()
    """The accounts' lines on the newest incarnation of a job that has left the queue."""
    is_over: bool = False
    """Whether it has left the queue for certain: what Slurm will start again is listed there, whatever state it was
    in before."""
    problem: str = ""
    """Why Slurm, or its accounts, cannot be asked."""
    satellites: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """For each array of satellites, by its id, how many of its tasks in the queue are in which state."""

    def text(self) -> str:
        """In words, with what to do where a person can do something."""
        if self.queued is not None and self.queued.state in WAITS:
            when = f"; expected to start {self.queued.starts}" if self.queued.starts else ""
            why = explained(self.queued.reason) if self.queued.reason else "Slurm has not said yet what it waits for"
            return f"{self.job_id} {self.queued.state}: {why}{when}"
        if self.queued is not None:
            return f"{self.job_id} {self.queued.state}" + (f" since {self.queued.starts}" if self.queued.starts else "")
        if not self.ended:
            known = f"{self.job_id} has left the queue" if self.is_over else self.job_id
            return f"{known}; {self.problem or 'its accounts say nothing yet'}"
        return f"{self.job_id} {self.ending()}"

    def ending(self) -> str:
        """How a job that left the queue ended, with the first step that failed."""
        whole = self.ended[0]
        text = whole.state + (f" at {whole.end}" if whole.end else "")
        text += _code_text(whole.exit_code or whole.derived_code)
        failure = first_failure(self.ended)
        if failure is None or whole.state == "COMPLETED":
            return text
        component = f"+{failure.component}" if failure.component else ""
        code = _code_text(failure.exit_code) or f" ({failure.state})"
        return f"{text}; the first step that failed is {failure.job}{component}.{failure.step}{code}"


def _code_text(code: int) -> str:
    if not code:
        return ""
    return f" with exit code {code}" if code > 0 else f" by signal {-code}"


def look(run: RunDir) -> JobView | None:
    """The newest job of a run and the satellites beside it, asked of Slurm now: squeue once, and sacct once if the job
    left the queue; None if the run has none."""
    jobs = jobs_of(run)
    if not jobs:
        return None
    job_id, beside = jobs[-1], _beside(run)
    try:
        found, tasks = queued_beside(job_id, beside) if beside else (queued(job_id), {})
    except SubmissionError as error:
        return JobView(job_id=job_id, problem=str(error))
    view = JobView(job_id=job_id, queued=found, satellites=tasks)
    if found is not None:
        return view
    try:
        rows = [row for row in accounted([job_id]) if row.job == job_id]
    except SubmissionError as error:
        return replace(view, is_over=True, problem=f"how it ended is not known: {error}")
    return replace(view, is_over=True, ended=last_incarnation(rows))


def submitted_satellites(run: RunDir) -> str:
    """The array of satellites that was submitted last; empty if there is none."""
    return next(reversed(_submitted_arrays(run)), "")


def satellites_of(run: RunDir) -> list[str]:
    """The array submitted last and, where a site does not requeue, the jobs that its tasks have submitted in their
    place."""
    first = submitted_satellites(run)
    directory = run.satellites
    names = names_in(directory) if first and directory.is_dir() else []
    told = {read_if_listed(directory / name) or 0 for name in names if SUCCESSOR.fullmatch(name)}
    return [first, *(str(job) for job in sorted(told) if job > int(first))] if first else []


def _beside(run: RunDir) -> list[str]:
    """The run's satellites, and others that rest for it, which somebody has submitted by hand."""
    own = satellites_of(run)
    typed = {job.partition("_")[0] for job in resting(run)}
    return [*own, *sorted(typed.difference(own), key=int)]


def note_satellite(run: RunDir, job: str) -> None:
    """Leave on record that a job has engines for the run: what it costs is asked by that, its waiting included."""
    make_private_directory(run.slurm)
    create_exclusive(make_private_directory(run.satellites) / f"joined-{job}", b"")


def satellite_jobs(run: RunDir) -> list[str]:
    """The ids of all jobs, or arrays, that have had engines for the run."""
    names = names_in(run.satellites) if run.satellites.is_dir() else []
    return sorted({found[1] for name in names if (found := JOINED.fullmatch(name))}, key=int)


def _submitted_arrays(run: RunDir) -> list[str]:
    """The arrays of satellites that ``submit`` has handed in, oldest first."""
    names = names_in(run.slurm) if run.slurm.is_dir() else []
    records = sorted(name for name in names if SUBMISSION.fullmatch(name))
    told = (read_if_listed(run.slurm / name) or {} for name in records)
    return [record["satellites"] for record in told if record.get("satellites")]


def refuse_queued(run: RunDir, *, takeover: bool = False) -> JobView | None:
    """The run's last job, which has ended; None if there was none.

    Args:
        takeover: believe that it has, where Slurm does not say.

    Raises:
        RunDirError: a job of the run is in Slurm's queue.
        SubmissionError: that cannot be known.
    """
    view = look(run)
    if view is None or view.is_over:
        return view
    if view.queued is None and takeover:
        return view
    if view.queued is None:
        raise SubmissionError(
            f"{run.root} was job {view.job_id}, and nobody can say whether it lives: {view.problem}; add --takeover if "
            "it is over for certain"
        )
    raise RunDirError(
        f"{run.root} is job {view.job_id} in Slurm's queue ({view.queued.state}); stop it with `areal-hpc stop "
        f"{run.typed}` or `scancel {view.job_id}`, or set another `name`"
    )


def ended_with(run: RunDir, view: JobView | None) -> bool:
    """Whether the newest attempt ran in this job, which is over: Slurm has then ended all of its processes, also those
    on nodes that nobody here can look at."""
    if view is None or not view.is_over or (attempt := run.newest_attempt()) is None:
        return False
    job = read_if_listed(attempt.job)
    return job is not None and job["job_id"] == view.job_id


def works_outside(run: RunDir) -> bool:
    """Whether the newest attempt is at work and in no job: somebody went on with the run on one machine."""
    attempt = run.newest_attempt()
    if attempt is None or read_if_listed(attempt.job) is not None or (state := read_if_listed(attempt.state)) is None:
        return False
    return state["state"] in ALIVE and not Owner.from_record(state).is_gone()


def stop_submitted(
    run: RunDir,
    timeout_s: float,
    *,
    ask: Callable[[RunDir], JobView | None] = look,
    end: Callable[[Sequence[str]], None] = cancel,
    stop: Callable[[RunDir, float], str] = stop_run,
) -> str:
    """Have a run end, wherever it is: one that works writes a checkpoint first; one that waits in Slurm's queue leaves
    it, and so do its satellites. How it ended.

    Raises:
        RunDirError: there is nothing to stop, or it did not stop in time.
        SubmissionError: the job does not leave the queue.
    """
    view = None if works_outside(run) else ask(run)
    said = _stop_job(run, timeout_s, view, end, stop)
    arrays = list(view.satellites) if view is not None else []
    rest = [job for job in resting(run) if job.partition("_")[0] not in arrays]
    if arrays or rest:
        end([*arrays, *rest])
    return said


def _stop_job(
    run: RunDir,
    timeout_s: float,
    view: JobView | None,
    end: Callable[[Sequence[str]], None],
    stop: Callable[[RunDir, float], str],
) -> str:
    if view is None or (view.queued is None and not view.is_over):
        return stop(run, timeout_s)
    if view.queued is None:
        return f"over; job {view.text()}"
    if view.queued.state in WAITS:
        end([view.job_id])
        return f"job {view.job_id} was waiting in the queue and is cancelled"
    state = _state_in(run, view.job_id)
    if state in ALIVE:
        return stop(run, timeout_s)
    if state in ("finished", "failed"):  # the job is about to end as well
        return state
    end([view.job_id])
    return f"job {view.job_id} was between two attempts and is cancelled"


def _state_in(run: RunDir, job_id: str) -> str:
    """The state of the newest attempt if it runs, or ran, in the job; else nothing."""
    attempt = run.newest_attempt()
    if attempt is None or (job := read_if_listed(attempt.job)) is None or job["job_id"] != job_id:
        return ""
    return state_of(run, attempt.epoch)[0]
