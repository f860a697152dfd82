"""Which evaluations of a run are due: asked for, and without a result in the surviving history.

    asked for       at the edge of a step of which ``evaluation.*`` says so; from then on it is owed, whoever dies
    finished        by its result, a file that appears whole; one of a step that a restart took back counts for nothing
    committed       each checkpoint says what was owed at its step (``Agenda``); an attempt goes on from that and asks
                    for nothing again, so what has a result by then is not done twice, and what has none is not lost

Where several are due the newest stands for those before it: the weights of those are no longer on the engines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from areal_hpc.buffer.epochs import lineage, read_start
from areal_hpc.config.schema import EvaluationConfig
from areal_hpc.fs import read_json
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion


def is_asked_for(step: int, config: EvaluationConfig, total_steps: int) -> bool:
    """Whether the weights of ``step`` are to be evaluated, when they are the newest."""
    if config.every_steps == 0 or step == 0:
        return config.every_steps > 0 and config.at_start
    return step == total_steps or (step < total_steps and step % config.every_steps == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agenda:
    """What was owed at a step; at a fresh start nothing, and not even step 0 has been asked for."""

    through: int = -1
    """Evaluations up to this step have been asked for, by the configuration of that time."""
    owed: tuple[int, ...] = ()
    """Those of them, ascending, that have no result and come after the last one that has."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        return cls(through=record["through"], owed=tuple(record["owed"]))

    def record(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)

    def at(self, step: int, config: EvaluationConfig, total_steps: int, finished: Collection[int]) -> Agenda:
        """What is owed at ``step``, from what was owed when this was written.

        Args:
            finished: steps with a result that counts; those after ``step`` are ignored, since a restart from ``step``
                takes them back.
        """
        if config.every_steps == 0:
            return Agenda(through=step)
        steps = {0, total_steps, *range(config.every_steps, min(step, total_steps) + 1, config.every_steps)}
        asked = {s for s in steps if self.through < s <= step and is_asked_for(s, config, total_steps)}
        last = max((done for done in finished if done <= step), default=-1)
        return Agenda(through=step, owed=tuple(sorted(s for s in {*self.owed, *asked} if s > last)))


def results(run: RunDir, epoch: int) -> dict[int, Mapping[str, Any]]:
    """Results by step, for attempt ``epoch``, which has said how it begins. What a restart took back is not among them:
    those weights are no longer this run's."""
    return dict(_results(run, epoch, run.evaluated_steps()))


def last_result(run: RunDir, epoch: int, step: int) -> int | None:
    """The last step up to ``step`` that has one of ``results``; reads no more of them than it must."""
    found = _results(run, epoch, sorted((s for s in run.evaluated_steps() if s <= step), reverse=True))
    return next((each for each, _ in found), None)


def _results(run: RunDir, epoch: int, steps: Iterable[int]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    start = read_start(run, epoch, known=True)
    assert start is not None, "engines serve before the trainer said how the attempt begins"
    survives = lineage(run, epoch, start.parent)
    for step in steps:
        result = read_json(run.evaluation(step))
        if survives(WeightVersion(result["epoch"], step)):
            yield step, result
