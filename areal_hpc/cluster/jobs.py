"""What Slurm says of a job, asked once for each command of ours and never in a loop.

    queued(job)        squeue: is it in the queue, in which state, and why it waits
    queued_beside(...) squeue: the same, and how many tasks of arrays are in which state
    states(jobs)       squeue, and sacct of those that the controller has forgotten: state of each component
    accounted(jobs)    sacct: how each of its incarnations ended, and which step failed first
    places(jobs)       squeue: where it has each of several jobs, why it waits there, and whether it is held
    cancel(jobs)       scancel: whole jobs
    release(jobs)      scontrol: jobs that are held may start
    submit_script(...) sbatch: a script that is nothing but one
    verdict(script)    sbatch --test-only: would it take this

Output is asked for without headings and with a separator, so that no column has a width: a long user name or state
would be cut off, or take another's place. Node lists are not taken from JSON, whose form differs between versions.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.errors import SubmissionError

ASK_S = 30.0
NO_ANSWER = ("ontact slurm", "configuration source", "imed out")
UNKNOWN_JOB = "Invalid job id specified"
OVER = (UNKNOWN_JOB, "already completing or completed")
"""What Slurm says of a job that cannot be cancelled since it has ended."""
QUEUE_FIELDS = ("%i", "%T", "%r", "%S")
PLACE_FIELDS = ("%i", "%T", "%Q", "%r")
ACCOUNT_FIELDS = (
    *("JobID", "State", "ExitCode", "DerivedExitCode", "Start", "End", "ElapsedRaw", "ConsumedEnergyRaw"),
    "AllocTRES",
)
SEPARATOR = "|"
UNKNOWN = ("N/A", "Unknown", "None", "")
"""What Slurm writes where it has nothing to say."""
WENT_WELL = ("COMPLETED", "RUNNING", "PENDING")
WAITS = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
"""States of a job in the queue that has no nodes (yet, or any more)."""
FORGOTTEN = "FORGOTTEN"
"""Our word for a job that was there and of which Slurm tells nothing any more."""
FINAL = (
    *("COMPLETED", "PREEMPTED", "CANCELLED", "DEADLINE", "REVOKED", "TIMEOUT", "BOOT_FAIL", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "FAILED", FORGOTTEN),
)
"""States of a job that is over, the better ones first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A job in the queue."""

    state: str
    """Such as PENDING or RUNNING; of a heterogeneous job, its first component's."""
    reason: str = ""
    """Why it waits, as Slurm calls it."""
    starts: str = ""
    """When it is expected to start, or has started; empty where Slurm does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the queue has one of several jobs."""

    state: str
    is_held: bool
    """Whether it starts only after somebody has released it: its priority is 0."""
    reason: str = ""
    """Why it waits, as Slurm calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounted:
    """One line of the accounts: an incarnation of a job's component, or one of its steps."""

    job: str
    """Number of the job, such as 12, or 13_2 of an array's task; all components of a heterogeneous one share it."""
    component: int = 0
    step: str = ""
    """Such as 0 or batch; empty for the job itself."""
    state: str
    exit_code: int
    """The exit code, or minus the signal."""
    derived_code: int = 0
    """The highest exit code of the job's steps: a step's failure does not always reach the job's own."""
    start: str = ""
    end: str = ""
    elapsed_s: int = 0
    energy_j: int | None = None
    """Joules, where the site counts them."""
    nodes: int = 0
    gpus: int = 0
    """GPUs of all its nodes, where the site counts them."""


def queued(job_id: str) -> Queued | None:
    """A job as the queue has it; None if it is not there (any more).

    Raises:
        SubmissionError: Slurm does not answer.
    """
    return parse_queue(_queue([job_id]))


def queued_beside(job_id: str, array_ids: Sequence[str]) -> tuple[Queued | None, dict[str, dict[str, int]]]:
    """A job as ``queued`` has it, and arrays: how many tasks of each are in which state, without those that end and
    without arrays that have none left.

    Raises:
        SubmissionError: Slurm does not answer.
    """
    lines = [line.strip() for line in _queue([job_id, *array_ids]).splitlines()]
    found: dict[str, dict[str, int]] = {}
    for array_id in array_ids:
        own = (f"{array_id}_", f"{array_id}{SEPARATOR}")  # a satellite may also be a job of its own
        states = Counter(line.split(SEPARATOR)[1] for line in lines if line.startswith(own))
        del states["COMPLETING"]
        if states:
            found[array_id] = dict(sorted(states.items()))
    beside = tuple(f"{array_id}{end}" for array_id in array_ids for end in ("_", SEPARATOR))
    return parse_queue("\n".join(line for line in lines if not line.startswith(beside))), found


def places(job_ids: Sequence[str]) -> dict[str, Place]:
    """Where the queue has each job, or task of an array; without those that are not there (any more).

    Raises:
        SubmissionError: Slurm does not answer.
    """
    rows = (line.strip().split(SEPARATOR) for line in _queue(job_ids, PLACE_FIELDS).splitlines() if line.strip())
    return {
        job: Place(state=state, is_held=priority == "0", reason="" if reason in UNKNOWN else reason)
        for job, state, priority, reason in rows
    }


def states(job_ids: Sequence[str]) -> dict[str, list[str]]:
    """The state of each component of each job, also of those that are over; without those of which nobody knows.

    Raises:
        SubmissionError: Slurm does not answer.
    """
    found: dict[str, list[str]] = {}
    lines = _queue(job_ids, ("%i", "%T"), "--states=all").splitlines()
    rows = [(line.strip().partition(SEPARATOR)[0].partition("+"), line.strip()) for line in lines if line.strip()]
    for (job, _, _), line in sorted(rows, key=lambda row: int(row[0][2] or 0)):
        found.setdefault(job, []).append(line.partition(SEPARATOR)[2])
    if lost := [job for job in job_ids if job not in found]:
        for row in _accounted_if_kept(lost):
            if not row.step:
                newest = found.setdefault(row.job, [])
                newest[row.component :] = [row.state]  # a later line of the same component is a later incarnation
    return found


def _accounted_if_kept(job_ids: Sequence[str]) -> list[Accounted]:
    """What the accounts hold; nothing where there are none."""
    try:
        return accounted(job_ids)
    except SubmissionError:
        return []


def folded(components: Sequence[str]) -> str:
    """One state for a job: while any component goes on, of the first that does; then the worst."""
    going = [state for state in components if state not in FINAL]
    return going[0] if going else max(components, key=FINAL.index)


def _queue(job_ids: Sequence[str], columns: Sequence[str] = QUEUE_FIELDS, *options: str) -> str:
    """squeue's lines: one for each component of a job, and for each task of an array."""
    jobs = ["--jobs", ",".join(job_ids)]
    asked = ask(["squeue", "--noheader", "--array", *options, *jobs, "--format", SEPARATOR.join(columns)])
    if asked.returncode and UNKNOWN_JOB not in asked.stderr:
        raise SubmissionError(f"squeue failed: {asked.stderr.strip()}; try again when Slurm answers")
    return asked.stdout


def parse_queue(text: str) -> Queued | None:
    """squeue's lines, one a component; the first component speaks for the job, any may say what it waits for."""
    rows = [line.strip().split(SEPARATOR) for line in text.splitlines() if line.strip()]
    if not rows:
        return None
    reasons = [reason for _, _, reason, _ in rows if reason not in UNKNOWN]
    starts = rows[0][3]
    return Queued(state=rows[0][1], reason=reasons[0] if reasons else "", starts="" if starts in UNKNOWN else starts)


def accounted(job_ids: Sequence[str]) -> list[Accounted]:
    """What the accounts hold of jobs, earlier incarnations included, in the order in which Slurm lists them.

    Raises:
        SubmissionError: there are no accounts here, or they do not answer.
    """
    words = ["--noheader", "--parsable2", "--duplicates", f"--format={','.join(ACCOUNT_FIELDS)}"]
    asked = ask(["sacct", *words, "--jobs", ",".join(job_ids)])
    if asked.returncode:
        raise SubmissionError(f"sacct failed: {asked.stderr.strip()}; this site may keep no accounts")
    return parse_accounts(asked.stdout)


def parse_accounts(text: str) -> list[Accounted]:
    """sacct's lines: ``12``, ``12.batch``, ``12.0``; of a heterogeneous job ``12+1``, ``12+1.0``; of an array's task
    ``13_2``, ``13_2.0``."""
    found = []
    for line in text.splitlines():
        if not line.strip():
            continue
        name, state, code, derived, start, end, elapsed, energy, allocated = line.strip().split(SEPARATOR)
        whole, _, step = name.partition(".")
        job, _, component = whole.partition("+")
        found.append(
            Accounted(
                job=job,
                component=int(component or 0),
                step=step,
                state=state.split()[0],  # "CANCELLED by 1000"
                exit_code=_code(code),
                derived_code=_code(derived),
                start="" if start in UNKNOWN else start,
                end="" if end in UNKNOWN else end,
                elapsed_s=int(elapsed or 0),
                energy_j=int(energy) if energy.isdigit() and int(energy) else None,
                nodes=_amount(allocated, "node"),
                gpus=_amount(allocated, "gres/gpu"),
            )
        )
    return found


def _amount(allocated: str, what: str) -> int:
    """How much of a resource ``billing=2,cpu=2,gres/gpu=4,node=1`` tells of."""
    found = dict(one.split("=", 1) for one in allocated.split(",") if "=" in one).get(what, "")
    return int(found) if found.isdigit() else 0


def _code(text: str) -> int:
    """``1:0`` is exit code 1, ``0:9`` ended by signal 9."""
    code, _, number = text.partition(":")
    return -int(number) if number.isdigit() and int(number) else int(code or 0)


def last_incarnation(rows: Sequence[Accounted]) -> list[Accounted]:
    """The lines of a job's newest incarnation: those that began with it or later; itself alone if it never began."""
    heads = [row for row in rows if not row.step and row.component == 0]
    if not heads or not heads[-1].start:
        return heads[-1:]
    return [row for row in rows if row.start >= heads[-1].start]


def first_failure(rows: Sequence[Accounted]) -> Accounted | None:
    """The step that failed first, by the time at which it ended; the batch script only where no other did."""
    failed = [row for row in rows if row.step and (row.exit_code or row.state not in WENT_WELL)]
    return min(failed, key=lambda row: (row.step in ("batch", "extern"), row.end or "~"), default=None)


def cancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs, all of their components; of several, each that Slurm lets go. One that has ended is no fault.

    Raises:
        SubmissionError: Slurm refused some, each of which it names, or does not answer.
    """
    asked = ask(["scancel", *job_ids])
    refused = [line.strip() for line in asked.stderr.splitlines() if not any(word in line for word in OVER)]
    if asked.returncode and (refused or not asked.stderr.strip()):
        said = "; ".join(refused) or f"it ended with {asked.returncode} and no word"
        raise SubmissionError(f"scancel failed: {said}; try again when Slurm answers")


def release(job_ids: Sequence[str]) -> None:
    """Let jobs start that are held.

    Raises:
        SubmissionError: Slurm refused some, or does not answer.
    """
    asked = ask(["scontrol", "release", *job_ids])
    if asked.returncode:
        raise SubmissionError(f"scontrol release failed: {asked.stderr.strip()}; `scontrol show job` tells why")


def submit_script(script: Path, options: Sequence[str]) -> str:
    """Hand a script to Slurm as it is; the job's id.

    Raises:
        SubmissionError: Slurm refused, or does not answer.
    """
    asked = ask(["sbatch", "--parsable", *options, str(script)])
    if asked.returncode:
        raise SubmissionError(f"sbatch refused the job: {asked.stderr.strip()}; the script is {script}")
    return asked.stdout.strip().splitlines()[-1].partition(";")[0]


def verdict(script: str) -> tuple[bool, str]:
    """Whether Slurm would take a batch script as it is, and what sbatch says of it; nothing is submitted."""
    if shutil.which("sbatch") is None:
        return True, "not asked: there is none on this machine"
    asked = ask(["sbatch", "--test-only"], script)
    words = [line.removeprefix("sbatch: ").strip() for line in asked.stderr.splitlines() if line.strip()]
    said = "; ".join(words) or "says nothing"
    if asked.returncode and any(word in said for word in NO_ANSWER):
        return True, f"does not answer: {said}"
    return asked.returncode == 0, said


def ask(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands to its end; ``text`` is its input.

    Raises:
        SubmissionError: it is not there, or does not answer in ``ASK_S``.
    """
    try:
        return subprocess.run(  # noqa: S603  no shell
            command, input=text, capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SubmissionError(
            f"{command[0]} does not answer: {error}; type this on a login node of the cluster"
        ) from error
