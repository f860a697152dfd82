"""A run in numbers, computed from the records of all its attempts. Pure: records in, ``Summary`` out.

An attempt that resumes from a checkpoint takes back what the one before did after it. So of every step the last attempt
that made it counts, and an earlier attempt's steps count only up to where a later one began:

    attempt 1   1 2 3 4 5 6 7           checkpoint at 4, killed after 7
    attempt 2           5 6             killed after 6
    counted     1 2 3 4 5 6             5 and 6 from attempt 2; 7 is taken back
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from areal_hpc.report.progress import WINDOW
from areal_hpc.telemetry import Record
from areal_hpc.types import Drop

Series = NDArray[np.float64]

OUTCOMES = ("sealed", "filtered", "failed")
"""How a group ended for the worker that ran it."""
RING_DROPS = (Drop.STALE, Drop.NEWER, Drop.CORRUPT)
"""Why a sealed group was dropped all the same; counted in the ring over the surviving history."""

COLUMNS = (
    "reward_mean",
    "loss",
    "staleness_mean",
    "staleness_max",
    "logprob_gap",
    "kept_fraction",
    "clip_fraction",
    "trainable_tokens",
    "tokens_trained",
    "tokens_generated",
    "seconds_step",
    "seconds_wait",
    "seconds_train",
    "seconds_publish",
    "seconds_paused",
    "weight_bytes",
    "weight_bytes_saved",
    "ring_bytes",
    "ring_max_bytes",
    *(f"ring_dropped_{reason}" for reason in RING_DROPS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation: the step it was due at, and the mean reward of its answers or the loss on given ones."""

    step: int
    samples: int | None
    reward_mean: float | None = None
    loss: float | None = None
    accuracy: float | None = None  # of pairs

    @property
    def value(self) -> float:
        """What was measured."""
        measured = self.loss if self.reward_mean is None else self.reward_mean
        assert measured is not None, "an evaluation without a result"
        return measured

    @property
    def merit(self) -> float:
        """More is better."""
        return self.value if self.reward_mean is not None else -self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Everything a report needs. Arrays have one entry for each counted step; NaN is a value that was not recorded."""

    steps: NDArray[np.int64]  # [S], ascending
    columns: Mapping[str, Series]  # each [S]
    evaluations: tuple[Evaluation, ...]  # ascending by step
    failed_evaluations: Mapping[int, str]  # step -> why not one sample of it succeeded
    attempt_starts: tuple[int, ...]  # first step of each attempt that made one, but the first
    num_attempts: int
    num_attempts_in_vain: int  # the newest in a row that made no step
    num_steps_taken_back: int
    restarts: Mapping[str, int]  # of processes that were replaced while the attempt went on, by name
    group_outcomes: Mapping[str, int]
    outcome: str | None  # how the newest attempt ended, where its launcher said so
    is_offline: bool = False  # trained on given answers: no rewards, no rollouts, no engines
    last_seen: Mapping[int, float] = field(default_factory=dict)  # epoch to the time of its last record
    failures: Mapping[int, str] = field(default_factory=dict)  # epoch to why its launcher began another
    of_all_steps: Mapping[str, float | None] = field(default_factory=dict)  # totals; also of steps taken back

    def facts(self) -> dict[str, float | int | str | None]:
        """The numbers of the summary, by name; None where the records do not tell."""
        column = self.columns
        seconds = _total(column["seconds_step"])
        tokens = column["trainable_tokens"]  # steps differ in these by multiples, as answers grow
        return {
            "outcome": self.outcome,
            "attempts": self.num_attempts,
            "attempts_in_vain": self.num_attempts_in_vain,
            "restarts": sum(self.restarts.values()),
            "last_step": int(self.steps[-1]) if self.steps.size else None,
            "steps_taken_back": self.num_steps_taken_back,
            **self._reward_facts(),
            "staleness_mean": _mean(column["staleness_mean"], tokens),
            "staleness_max": _largest(column["staleness_max"]),
            "logprob_gap_mean": _mean(column["logprob_gap"], tokens),
            "kept_fraction_mean": _mean(column["kept_fraction"], tokens),
            "clip_fraction_mean": _mean(column["clip_fraction"], tokens * column["kept_fraction"]),
            "tokens_trained": _total(column["tokens_trained"]),
            "tokens_generated": _total(column["tokens_generated"]),
            "seconds": seconds,
            "seconds_of_all_steps": self.of_all_steps.get("seconds_step"),
            "seconds_waited_in_all_steps": self.of_all_steps.get("seconds_wait"),
            "tokens_trained_per_s": _ratio(_total(column["tokens_trained"]), seconds),
            **{
                f"{part}_share": _ratio(_total(column[f"seconds_{part}"]), seconds)
                for part in ("wait", "train", "publish", "paused")
            },
            "weight_bytes": _total(column["weight_bytes"]),
            "weight_bytes_saved": _total(column["weight_bytes_saved"]),
            "ring_bytes_most": _largest(column["ring_bytes"]),
            "ring_max_bytes": _last(column["ring_max_bytes"]),
            **{f"groups_{name}": number for name, number in self.group_counts().items()},
        }

    def group_counts(self) -> dict[str, int | None]:
        """What became of the groups, in the order of their lives; a group that was sealed may also count as dropped."""
        outcomes: dict[str, int | None] = {
            name: self.group_outcomes.get(name, 0) if self.group_outcomes else None for name in OUTCOMES
        }
        return outcomes | {reason.value: _last(self.columns[f"ring_dropped_{reason}"]) for reason in RING_DROPS}

    def _reward_facts(self) -> dict[str, float | int | None]:
        rewards, losses = self.columns["reward_mean"], self.columns["loss"]
        found = self.evaluations
        best = max(found, key=lambda evaluation: evaluation.merit, default=None)
        return {
            "loss_first": _mean(losses[:WINDOW]),
            "loss_last": _mean(losses[-WINDOW:]),
            "reward_first": _mean(rewards[:WINDOW]),
            "reward_last": _mean(rewards[-WINDOW:]),
            "evaluation_first": found[0].value if found else None,
            "evaluation_last": found[-1].value if found else None,
            "evaluation_best": best.value if best else None,
            "evaluation_best_step": best.step if best else None,
            "evaluation_accuracy_last": found[-1].accuracy if found else None,
            "evaluations_failed": len(self.failed_evaluations),
        }


@dataclass(slots=True)
class _Gathered:
    """What of the records has to be kept until all are seen."""

    rows: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)  # (epoch, step) -> COLUMNS
    evaluations: dict[int, tuple[int, Evaluation | str]] = field(default_factory=dict)  # step -> (epoch, it or reason)
    epochs: set[int] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    ending: tuple[int, str | None] = (-1, None)  # (epoch, last event of its launcher)
    offline: bool = False
    last_seen: dict[int, float] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def take(self, record: Record) -> None:
        self.epochs.add(record.epoch)
        self.last_seen[record.epoch] = max(record.time, self.last_seen.get(record.epoch, record.time))
        step = record.number("step")
        if record.kind == "step" and step is not None:
            self.offline |= bool(record.values.get("offline"))
            self.rows[record.epoch, int(step)] = tuple(_or_nan(record.number(key)) for key in COLUMNS)
        elif record.kind == "evaluation" and step is not None:
            self._take_evaluation(record, int(step))
        elif record.kind == "group":
            self.outcomes[str(record.values.get("outcome"))] += 1
        elif record.kind == "restart" and (process := str(record.values.get("process"))) != "run":
            self.restarts[process] += 1
        elif record.kind == "restart":
            self.failures[record.epoch - 1] = str(record.values.get("reason"))
        elif record.kind == "run" and record.epoch >= self.ending[0]:
            self.ending = (record.epoch, str(record.values.get("event")))

    def _take_evaluation(self, record: Record, step: int) -> None:
        if self.evaluations.get(step, (-1,))[0] > record.epoch:
            return
        reward, loss, samples = (record.number(name) for name in ("reward_mean", "loss", "samples"))
        if reward is not None or loss is not None:
            found = Evaluation(
                step=step,
                samples=None if samples is None else int(samples),
                reward_mean=reward,
                loss=loss,
                accuracy=record.number("accuracy"),
            )
            self.evaluations[step] = (record.epoch, found)
        elif (reason := record.values.get("reason")) is not None:
            self.evaluations[step] = (record.epoch, str(reason))


def summarise(records: Iterable[Record]) -> Summary:
    """The summary of a run from the records of its attempts, in any order."""
    gathered = _Gathered()
    for record in records:
        gathered.take(record)
    starts = _first_steps(gathered.rows)
    counted = sorted(
        (step, epoch)
        for epoch, step in gathered.rows
        if all(step < start for later, start in starts.items() if later > epoch)
    )
    evaluated = [(step, found) for step, (_, found) in sorted(gathered.evaluations.items())]
    table = np.array([gathered.rows[epoch, step] for step, epoch in counted], dtype=np.float64)
    table = table.reshape(len(counted), len(COLUMNS))
    every = np.array(list(gathered.rows.values()), dtype=np.float64).reshape(len(gathered.rows), len(COLUMNS))
    return Summary(
        steps=np.array([step for step, _ in counted], dtype=np.int64),
        columns={key: table[:, place] for place, key in enumerate(COLUMNS)},
        evaluations=tuple(found for _, found in evaluated if isinstance(found, Evaluation)),
        failed_evaluations={step: found for step, found in evaluated if isinstance(found, str)},
        attempt_starts=tuple(start for _, start in sorted(starts.items())[1:]),
        num_attempts=len(gathered.epochs),
        num_attempts_in_vain=sum(epoch > max(starts, default=0) for epoch in gathered.epochs),
        num_steps_taken_back=len(gathered.rows) - len(counted),
        restarts=dict(gathered.restarts),
        group_outcomes=dict(gathered.outcomes),
        outcome=gathered.ending[1],
        is_offline=gathered.offline,
        last_seen=gathered.last_seen,
        failures=gathered.failures,
        of_all_steps={key: _total(every[:, COLUMNS.index(key)]) for key in ("seconds_step", "seconds_wait")},
    )


def _first_steps(rows: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The first step of each epoch that made one."""
    starts: dict[int, int] = {}
    for epoch, step in rows:
        starts[epoch] = min(step, starts.get(epoch, step))
    return starts


def moving_mean(values: Series, window: int = WINDOW) -> Series:
    """Mean of the last ``window`` values at each place [S], of those that are known; NaN where none is."""
    known = np.isfinite(values)
    sums = np.cumsum(np.concatenate([np.zeros(1), np.where(known, values, 0.0)]))
    counts = np.cumsum(np.concatenate([np.zeros(1), known]))
    start = np.maximum(np.arange(values.size) + 1 - window, 0)
    end = np.arange(values.size) + 1
    number = counts[end] - counts[start]
    return np.where(number > 0, (sums[end] - sums[start]) / np.maximum(number, 1), np.nan)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _known(values: Series) -> Series:
    return values[np.isfinite(values)]


def _mean(values: Series, weights: Series | None = None) -> float | None:
    """Mean over the steps of which both are known, equal ones if there are no ``weights``; None if these sum to 0."""
    weights = np.ones(values.size) if weights is None else weights
    known = np.isfinite(values) & np.isfinite(weights)
    total = float(weights[known].sum())
    return float(values[known] @ weights[known]) / total if total else None


def _largest(values: Series) -> float | None:
    known = _known(values)
    return float(known.max()) if known.size else None


def _total(values: Series) -> float | None:
    known = _known(values)
    return float(known.sum()) if known.size else None


def _last(values: Series) -> int | None:
    known = _known(values)
    return int(known[-1]) if known.size else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
