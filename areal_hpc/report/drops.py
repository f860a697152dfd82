"""What was not trained on: how many groups were dropped, and a warning while not one is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from areal_hpc.report.text import MISSING, count, one_line
from areal_hpc.telemetry import Record
from areal_hpc.types import Drop

WARN_AFTER = 32
"""So many groups in a row without one that was kept are worth a warning."""
EXPECTED = (Drop.FILTERED, Drop.FAILED, Drop.STALE)
"""What happens in every run and is always told; the other reasons only where they have happened."""


class Drops:
    """Fed with the records of an attempt; keeps counts only."""

    def __init__(self) -> None:
        self._counts: Mapping[Drop, float | None] = {}
        self._row: Counter[str] = Counter()
        self.failures = 0
        """Samples that failed, each attempt at one counted."""
        self._last_failure = ""

    def feed(self, record: Record) -> None:
        """Take in one record; the trainer's steps have the counts of the whole run, the workers' groups the row."""
        if record.kind == "step":
            self._counts = {reason: record.number(f"ring_dropped_{reason}") for reason in Drop}
        elif record.kind == "group" and record.values.get("outcome") == "sealed":
            self._row.clear()
        elif record.kind == "group":
            self._row[f"{record.values.get('outcome')}: {record.values.get('reason')}"] += 1
        elif record.kind == "failure":
            self.failures += 1
            self._last_failure = f"{record.values.get('error')}: {record.values.get('message')}"

    @property
    def row(self) -> int:
        """How many groups ended since the last one that was kept."""
        return self._row.total()

    def text(self) -> str:
        """The counts as of the newest step."""
        return drops_text(self._counts)

    def failure_text(self) -> str:
        """How many samples failed and why the last one did, in one line of ASCII; empty while none has."""
        if not self.failures:
            return ""
        what = "1 sample" if self.failures == 1 else f"{count(self.failures)} samples"
        return f"{what} failed so far, the last by {one_line(self._last_failure)}"

    def warning(self) -> str:
        """What is wrong while no group is kept; empty where all is well."""
        if self.row < WARN_AFTER:
            return ""
        parts = ", ".join(f"{count(number)} {why}" for why, number in self._row.most_common())
        return f"no group was kept of the last {count(self.row)} ({parts}); look at the reward and rollout.filter"


def drops_text(counts: Mapping[Drop, float | None]) -> str:
    """Counts by reason in one line; a dash where none is known."""
    known = {reason: number for reason, number in counts.items() if number is not None}
    told = [reason for reason in Drop if reason in known and (reason in EXPECTED or known[reason])]
    return ", ".join(f"{count(known[reason])} {reason}" for reason in told) or MISSING
