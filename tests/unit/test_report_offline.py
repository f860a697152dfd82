"""Reports of runs on given answers: losses where other runs have rewards, and nothing of engines and staleness."""

from __future__ import annotations

import io
from itertools import count
from typing import Any

import pytest

from areal_hpc.report import LiveConsole, summarise
from areal_hpc.report.curves import draw
from areal_hpc.report.files import table
from areal_hpc.telemetry import Record


def record(kind: str, time: float = 0.0, **values: Any) -> Record:
    return Record(time=time, role="trainer", index=0, epoch=1, kind=kind, values=values)


RECORDS = [
    record("evaluation", step=0, loss=0.6931, accuracy=0.0, samples=64),
    record("step", 10.0, step=1, offline=True, loss=0.7, train_tokens_per_s=2345.6, tokens_trained=100, seconds_step=2),
    record("step", 20.0, step=2, offline=True, loss=0.5, train_tokens_per_s=2345.6, tokens_trained=100, seconds_step=2),
    record("evaluation", step=1, loss=0.25, accuracy=0.875, samples=64),
    record("evaluation", step=2, loss=0.5, accuracy=0.75, samples=64),
]


def test_a_step_has_one_line_of_its_loss() -> None:
    stream, clock = io.StringIO(), count(0.0, 1.0)
    with LiveConsole(2, stream, clock=clock.__next__) as console:
        console.feed(RECORDS)
    lines = stream.getvalue().splitlines()
    assert lines[:2] == [
        "evaluation loss 0.6931, accuracy 0 at step 0",
        "step 1/2 | loss 0.7 | eval loss 0.6931, accuracy 0 at step 0 | tokens/s 2,346 train | 0:00:02 elapsed, "
        "0:00:02 left",
    ]
    assert "evaluation loss 0.25, accuracy 0.875 at step 1" in lines


def test_the_best_evaluation_is_the_lowest_loss() -> None:
    summary = summarise(RECORDS)
    assert summary.is_offline
    facts = summary.facts()
    assert (facts["evaluation_best"], facts["evaluation_best_step"]) == (0.25, 1)
    assert dict(table(summary, 2, 0)) == {
        "outcome": "not recorded; `areal-hpc status` tells whether it still runs",
        "attempts": "1, 0 steps taken back by restarts",
        "steps": "2 of 2",
        "loss": "0.6 (first 10 steps) to 0.6 (last 10)",
        "evaluation": "loss first 0.6931, last 0.5, best 0.25 at step 1; accuracy 0.75",
        "tokens": "200 trained",
        "speed": "50 tokens trained per second",
        "time": "0:00:04 in steps: - training",
    }


def test_the_figure_has_one_panel() -> None:
    svg = draw(summarise(RECORDS), staleness_bound=2)["svg"].decode()
    assert ">Loss<" in svg
    assert ">Staleness<" not in svg
    assert ">0.25<" in svg


def test_without_pairs_there_is_no_accuracy() -> None:
    steps = [record("evaluation", step=2, loss=0.5), record("step", step=2, offline=True, loss=0.5)]
    rows = dict(table(summarise(steps), 2, 0))
    assert rows["evaluation"] == "loss first 0.5, last 0.5, best 0.5 at step 2"


@pytest.mark.parametrize("records", [[], [record("step", step=1)]])
def test_a_run_is_not_offline_by_what_is_missing(records: list[Record]) -> None:
    assert not summarise(records).is_offline
