"""Satellites whose run is out rest in Slurm's queue, held, and the run lets them go when it is there again.

    slurm/satellites/resting-9_1    a job, or the task of an array, that rests; and the last attempt that is not for it

    satellite   has waited for limits.rejoin_s: leaves the name, and its script holds its job, or a new one for it
    launcher    of any later attempt: as long as there are names, asks squeue now and then what became of them, and
                releases those that are held
    satellite   starts again, and takes its name away

It is the same job all the time, so nobody comes twice, and a hold that comes after the launcher has looked is seen when
it looks again. One whose engines died too often rests as well, until the next attempt: there may be something wrong
with its node, and Slurm may then give it another. With the run's end, in whatever way, they leave the queue, or by
`areal-hpc stop` where its launcher could not end in order.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from areal_hpc.cluster.jobs import WAITS, Place, cancel, places, release
from areal_hpc.errors import SubmissionError
from areal_hpc.fs import names_in, publish_json, read_if_listed
from areal_hpc.liveness.rounds import Rounds
from areal_hpc.run_dir import RunDir

log = logging.getLogger(__name__)

NAME = re.compile(r"resting-(\d+(?:_\d+)?)")
LOOK_S = 30.0
"""How often a launcher asks about those that rest."""
LOOKS = 3
"""How often it looks for those that rest when the run is over."""


def rest(run: RunDir, job: str, after: int) -> None:
    """Leave on record that ``job`` is about to be held, and is for attempts after ``after``."""
    publish_json(run.satellites / f"resting-{job}", {"after": after})


def forget(run: RunDir, job: str) -> None:
    """Take a job's name away: it has started again, or has left the queue."""
    (run.satellites / f"resting-{job}").unlink(missing_ok=True)


def resting(run: RunDir, before: int | None = None) -> list[str]:
    """The jobs that rest, or only those that attempt ``before`` may let go."""
    directory = run.satellites
    names = names_in(directory) if directory.is_dir() else []
    found = sorted(match[1] for name in names if (match := NAME.fullmatch(name)))
    if before is None:
        return found
    told = ((job, read_if_listed(directory / f"resting-{job}")) for job in found)
    return [job for job, record in told if record is not None and record["after"] < before]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What is to be done about jobs that rest."""

    release: Sequence[str]
    forget: Sequence[str]
    """On their way by themselves, or gone; the others still run, and are held in a moment or have just started."""


def judged(jobs: Sequence[str], queue: Mapping[str, Place]) -> Judgement:
    """Decide from where Slurm's queue has each of them; one that is not in ``queue`` has left it."""
    gone = [job for job in jobs if job not in queue]
    waits = [job for job in jobs if job in queue and queue[job].state in WAITS]
    held = [job for job in waits if queue[job].is_held]
    return Judgement(release=held, forget=[*gone, *(job for job in waits if job not in held)])


class Recall:
    """Lets, from the launcher, those satellites start that rest for its attempt."""

    def __init__(
        self,
        run: RunDir,
        epoch: int,
        *,
        ask: Callable[[Sequence[str]], Mapping[str, Place]] = places,
        let_go: Callable[[Sequence[str]], None] = release,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._epoch, self._ask, self._let_go = run, epoch, ask, let_go
        self._rounds = Rounds(self.round, LOOK_S, name="recall", clock=clock)
        self._problem = ""

    def look(self) -> None:
        """Begin a round, if it is time for one."""
        self._rounds.look()

    def round(self) -> None:
        """Let go those that are held. A scheduler that does not answer is asked again in the next round."""
        if not (jobs := resting(self._run, self._epoch)):
            return
        try:
            judgement = judged(jobs, self._ask(jobs))
            if judgement.release:
                self._let_go(judgement.release)
                log.info("satellites that rested come again: %s", ", ".join(judgement.release))
        except SubmissionError as error:
            if str(error) != self._problem:  # once, though it may be away for days
                log.warning("satellites %s rest until Slurm lets them go: %s", ", ".join(jobs), error)
            self._problem = str(error)
            return
        self._problem = ""
        for job in judgement.forget:
            forget(self._run, job)


def dismiss(run: RunDir, end: Callable[[Sequence[str]], None] = cancel) -> None:
    """The run has ended: whoever rests for it leaves the queue.

    Where a site does not requeue, a name passes from a job to the one that rests in its place, perhaps at this moment;
    so it is looked for again. Who finds its name gone by then has the new job leave itself (cluster/satellites.py).
    """
    for _ in range(LOOKS):
        if not (jobs := resting(run)):
            return
        try:
            end(jobs)
        except SubmissionError as error:
            log.warning("%s; satellites may still rest in the queue: `scancel %s` ends them", error, " ".join(jobs))
        for job in jobs:
            forget(run, job)
