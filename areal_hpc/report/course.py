"""The course of a run as plain data, for a page that asks again and again: reward, evaluations, age of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from areal_hpc.report.files import configuration
from areal_hpc.report.summary import Series, moving_mean, summarise
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Record, RecordReader

ROLES = ("trainer", "evaluator", "launcher")
MOST_POINTS = 1500
"""Steps that are told; of more, every second, third, ..."""


class Course:
    """Follows the records of all attempts; each ``told`` reads only what is new."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._readers: dict[int, RecordReader] = {}
        self._records: list[Record] = []

    def told(self) -> dict[str, Any]:
        """``steps`` with one value each in ``reward``, ``reward_mean`` (of ten) and ``staleness``; null is unknown."""
        for attempt in self._run.all_attempts():
            reader = self._readers.setdefault(attempt.epoch, RecordReader(attempt.telemetry, ROLES))
            self._records += [record for record in reader.poll() if record.kind in ("step", "evaluation", "run")]
        summary = summarise(self._records)
        every = max(1, math.ceil(summary.steps.size / MOST_POINTS))
        kept = slice((summary.steps.size - 1) % every if summary.steps.size else 0, None, every)
        reward = summary.columns["reward_mean"]
        return {
            "total_steps": configuration(self._run).get("trainer", {}).get("total_steps"),
            "outcome": summary.outcome,
            "steps": summary.steps[kept].tolist(),
            "reward": _plain(reward[kept]),
            "reward_mean": _plain(moving_mean(reward)[kept]),
            "staleness": _plain(summary.columns["staleness_max"][kept]),
            "evaluations": [[evaluation.step, evaluation.value] for evaluation in summary.evaluations],
            "attempts": list(summary.attempt_starts),
        }


def _plain(values: Series) -> Sequence[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
