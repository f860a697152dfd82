"""A run whose engines are all to join, while none is there: since when, and which satellites wait in Slurm's queue.

    attempts/N/alone.json      there as long as that lasts

    launcher      looks each second whether an engine is up; while none is, asks squeue now and then where the run's
                  satellites are, and says so in its log; has the run stop after limits.alone_s, with a checkpoint
    trainer       counts limits.join_s only while none of them waits in the queue (``Fleet``)
    status, why   tell for how long, and why

Known are the satellites that were submitted with the run, and those that have been with it. One that rests for a later
attempt is not waited for. A scheduler that cannot be asked may have some in its queue.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from areal_hpc.cluster.jobs import WAITS, Place, places
from areal_hpc.cluster.reasons import explained
from areal_hpc.errors import SubmissionError
from areal_hpc.fs import publish, publish_json, read_if_listed
from areal_hpc.liveness import seats
from areal_hpc.liveness.job import satellite_jobs, satellites_of
from areal_hpc.liveness.resting import resting
from areal_hpc.liveness.rounds import Rounds
from areal_hpc.run_dir import AttemptDir, RunDir

log = logging.getLogger(__name__)

LOOK_S = 1.0
ASK_S = 120.0
"""How often Slurm is asked while no engine is there."""
NUM_JOBS = 64
"""Of the jobs that have been with the run, how many are asked about: where a site does not requeue, each has come in
the place of one before."""
NUM_NAMED = 4
"""Jobs that a sentence names before it counts."""
NOT_ASKED = "Slurm has not answered yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What the launcher knows of a run without engines."""

    since: float
    """Seconds since the epoch."""
    waits: Mapping[str, str] = field(default_factory=dict)
    """Satellites in the queue, and what each waits for, as Slurm calls it."""
    problem: str = ""
    """Why ``waits`` is not known."""

    def is_in_the_queue(self) -> bool:
        """Whether a satellite may be on its way that has no nodes yet."""
        return bool(self.waits or self.problem)

    def text(self) -> str:
        """Whom the run waits for, in words, and what can be done."""
        if self.problem:
            return f"whether satellites are in Slurm's queue is not known: {self.problem}"
        if not self.waits:
            return "no satellite waits in Slurm's queue that the run knows; limits.join_s counts"
        by_reason = defaultdict[str, list[str]](list)
        for job, reason in self.waits.items():
            by_reason[explained(reason) if reason else "Slurm has not said yet what they wait for"].append(job)
        return "; ".join(f"{_named(jobs)} in Slurm's queue: {reason}" for reason, jobs in by_reason.items())


def _named(jobs: Sequence[str]) -> str:
    more = len(jobs) - NUM_NAMED
    return ", ".join(jobs[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def alone(attempt: AttemptDir) -> Alone | None:
    """What the attempt's launcher says of it; None while an engine is there."""
    record = read_if_listed(attempt.alone)
    return None if record is None else Alone(**record)


class Lookout:
    """The launcher's watch for engines: it keeps alone.json, and asks for a stop after ``alone_s``."""

    def __init__(
        self,
        run: RunDir,
        epoch: int,
        alone_s: float,
        *,
        ask: Callable[[Sequence[str]], Mapping[str, Place]] = places,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._run, self._attempt, self._alone_s = run, run.attempt(epoch), alone_s
        self._ask, self._clock, self._now = ask, clock, now
        self._told: Alone | None = None
        self._next_look = clock()
        self._begin()
        self.verdict = ""
        """Why the run is to stop, once it is."""

    def look(self) -> None:
        """Keep the file, and ask for a stop where that is due."""
        if self._clock() < self._next_look or self.verdict:
            return
        self._next_look = self._clock() + LOOK_S
        if seats.present(self._attempt):
            self._end()
            return
        if self._told is None:
            self._begin()
        self._rounds.look()
        waits, problem = self._answer
        told = Alone(since=self._told.since if self._told else self._now(), waits=waits, problem=problem)
        self._tell(told)
        if self._alone_s and self._clock() - self._began > self._alone_s:
            self.verdict = f"no engine was there for {self._alone_s:g} s (limits.alone_s)"
            log.warning("%s, so the run stops; `areal-hpc resume` goes on: %s", self.verdict, told.text())
            publish(self._attempt.stop_request, b"{}")

    def _begin(self) -> None:
        self._began = self._clock()
        self._answer: tuple[Mapping[str, str], str] = {}, NOT_ASKED
        self._rounds = Rounds(self.round, ASK_S, name="lookout", clock=self._clock)

    def round(self) -> None:
        """Ask Slurm."""
        resting_on = set(resting(self._run)) - set(resting(self._run, self._attempt.epoch))
        jobs = sorted({*satellites_of(self._run), *satellite_jobs(self._run)[-NUM_JOBS:]}, key=int)
        try:
            found = self._ask(jobs) if jobs else {}
        except SubmissionError as error:
            self._answer = {}, str(error)
            return
        waits = {job: place.reason for job, place in found.items() if place.state in WAITS and job not in resting_on}
        self._answer = waits, ""

    def _tell(self, alone: Alone) -> None:
        if alone == self._told:
            return
        publish_json(self._attempt.alone, asdict(alone))
        if alone.problem != NOT_ASKED and (self._told is None or alone.text() != self._told.text()):
            log.warning("no engine is there: %s", alone.text())
        self._told = alone

    def _end(self) -> None:
        if self._told is not None:
            self._attempt.alone.unlink(missing_ok=True)
            self._told = None
