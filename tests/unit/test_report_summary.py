"""The summary: which steps count after a rollback, means against numpy, and runs of no or one step."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.report import summarise
from areal_hpc.report.summary import COLUMNS, moving_mean
from areal_hpc.telemetry import Record


def record(kind: str, epoch: int = 1, **values: Any) -> Record:
    return Record(time=1e9, role="trainer", index=0, epoch=epoch, kind=kind, values=values)


def step(number: int, epoch: int = 1, **values: Any) -> Record:
    return record("step", epoch, step=number, **values)


def test_a_later_attempt_takes_back_what_came_after_its_checkpoint() -> None:
    first = [step(n, 1, reward_mean=1.0) for n in range(1, 8)]  # checkpoint at 4, killed after 7
    second = [step(n, 2, reward_mean=2.0) for n in (5, 6)]
    summary = summarise([*second, *first])
    assert summary.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert summary.columns["reward_mean"].tolist() == [1, 1, 1, 1, 2, 2]
    assert (summary.num_attempts, summary.num_steps_taken_back, summary.attempt_starts) == (2, 3, (5,))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=5))
def test_every_history_of_rollbacks_leaves_the_last_lineage(attempts: list[tuple[int, int]]) -> None:
    """Against a list that is cut back to the checkpoint at each start, as the trainer's own state is."""
    lineage: list[tuple[int, int]] = []
    records = []
    for epoch, (back_to, num_steps) in enumerate(attempts, 1):
        lineage = lineage[:back_to]
        for number in range(len(lineage) + 1, len(lineage) + 1 + num_steps):
            records.append(step(number, epoch, reward_mean=epoch))
            lineage.append((number, epoch))
    summary = summarise(records)
    assert list(zip(summary.steps.tolist(), summary.columns["reward_mean"].tolist(), strict=True)) == lineage
    assert summary.num_steps_taken_back == len(records) - len(lineage)


def test_an_evaluation_counts_once_for_a_step_the_last_one() -> None:
    summary = summarise(
        [
            record("evaluation", 2, step=10, reward_mean=0.7),
            record("evaluation", 1, step=10, reward_mean=0.5, samples=8),
            record("evaluation", 1, step=0, reward_mean=-2.0, samples=8),
            record("evaluation", 1, step=5, reward_mean=None),
        ]
    )
    assert [(e.step, e.reward_mean, e.samples) for e in summary.evaluations] == [(0, -2.0, 8), (10, 0.7, None)]


def test_an_evaluation_that_failed_counts_as_failed_until_it_succeeds() -> None:
    failed = {"samples": 0, "reason": "all 8 samples failed"}
    records = [record("evaluation", 1, step=step, **failed) for step in (0, 5)]
    summary = summarise([*records, record("evaluation", 2, step=5, reward_mean=0.5)])
    assert [(e.step, e.reward_mean) for e in summary.evaluations] == [(5, 0.5)]
    assert summary.failed_evaluations == {0: "all 8 samples failed"}
    assert summary.facts()["evaluations_failed"] == 1


def test_J12_rewards_may_have_any_scale_and_sign() -> None:
    evaluations = [record("evaluation", step=s, reward_mean=r) for s, r in ((0, -40.0), (5, -7.5), (10, -9.0))]
    facts = summarise([step(1, reward_mean=-300.0), *evaluations]).facts()
    assert facts["reward_last"] == -300.0
    assert (facts["evaluation_best"], facts["evaluation_best_step"]) == (-7.5, 5)


def test_facts_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    rows = [{key: float(rng.uniform(1, 9)) for key in COLUMNS} for _ in range(25)]
    facts = summarise([step(n, **row) for n, row in enumerate(rows, 1)]).facts()
    column = {key: [row[key] for row in rows] for key in COLUMNS}
    seconds = math.fsum(column["seconds_step"])
    expected = {
        "reward_first": statistics.fmean(column["reward_mean"][:10]),
        "reward_last": statistics.fmean(column["reward_mean"][-10:]),
        "staleness_max": max(column["staleness_max"]),
        "tokens_trained": math.fsum(column["tokens_trained"]),
        "tokens_trained_per_s": math.fsum(column["tokens_trained"]) / seconds,
        "wait_share": math.fsum(column["seconds_wait"]) / seconds,
    }
    assert {key: facts[key] for key in expected} == pytest.approx(expected)


def test_means_of_tokens_are_over_the_tokens_of_the_run() -> None:
    """Of 1,000 tokens, 100 in a step of short answers: what is told of each token, and then the plain mean of all."""
    rng = np.random.default_rng(0)
    told: dict[str, list[float]] = {key: [] for key in ("staleness_mean", "logprob_gap", "kept_fraction", "clipped")}
    records = []
    for number, size in ((1, 100), (2, 900)):
        kept = rng.random(size) < 0.2 * number
        values = {
            "staleness_mean": rng.integers(0, 3 * number, size).astype(float),
            "logprob_gap": rng.random(size) / number,
            "kept_fraction": kept.astype(float),
            "clipped": (rng.random(size) < 0.4 / number)[kept].astype(float),  # only what is trained can be clipped
        }
        means = {key: float(of_tokens.mean()) for key, of_tokens in values.items()}
        records.append(step(number, trainable_tokens=size, clip_fraction=means.pop("clipped"), **means))
        for key, of_tokens in values.items():
            told[key] += of_tokens.tolist()
    nothing_trained = step(3, trainable_tokens=0, staleness_mean=None)
    facts = summarise([*records, nothing_trained]).facts()
    names = ("staleness_mean", "logprob_gap_mean", "kept_fraction_mean", "clip_fraction_mean")
    expected = [statistics.fmean(of_tokens) for of_tokens in told.values()]
    assert [facts[name] for name in names] == pytest.approx(expected)


def test_E17_a_run_without_a_record_has_a_summary() -> None:
    facts = summarise([]).facts()
    counts = ("attempts", "attempts_in_vain", "restarts", "steps_taken_back", "evaluations_failed")
    assert [facts.pop(name) for name in counts] == [0] * 5
    assert set(facts.values()) == {None}


def test_E18_a_run_of_one_step_has_a_summary() -> None:
    summary = summarise([step(1, reward_mean=0.5, seconds_step=0.0, tokens_trained=10)])
    facts = summary.facts()
    assert (facts["last_step"], facts["reward_first"], facts["reward_last"]) == (1, 0.5, 0.5)
    assert facts["tokens_trained_per_s"] is None, "no time passed"
    assert facts["staleness_mean"] is None, "not recorded"


def test_E17_steps_without_a_value_are_left_out_of_means() -> None:
    rewards = [0.5, None, {"accuracy": 1.0}, "nan", 1.5]
    facts = summarise([step(n, reward_mean=reward) for n, reward in enumerate(rewards, 1)]).facts()
    assert facts["reward_last"] == 1.0
    json.dumps(facts, allow_nan=False)


def test_what_is_not_known_is_ignored() -> None:
    summary = summarise([record("novelty", x=1), record("step"), step(1, novelty=3.0), record("evaluation")])
    assert summary.steps.tolist() == [1]


def test_outcome_and_groups_come_from_launcher_and_workers() -> None:
    groups = [record("group", outcome=outcome) for outcome in ("sealed", "filtered", "sealed")]
    events = [record("run", 2, event="started"), record("run", 1, event="failed"), record("run", 2, event="finished")]
    summary = summarise([*groups, *events])
    assert summary.group_outcomes == {"sealed": 2, "filtered": 1}
    assert summary.outcome == "finished"
    assert summary.facts()["groups_sealed"] == 2


@given(st.lists(st.none() | st.floats(-1e3, 1e3), max_size=40), st.integers(1, 12))
def test_moving_mean_is_the_mean_of_the_last_known_values(values: list[float | None], window: int) -> None:
    array = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    got = moving_mean(array, window)
    for place in range(len(values)):
        known = [value for value in values[max(0, place + 1 - window) : place + 1] if value is not None]
        assert got[place] == pytest.approx(statistics.fmean(known) if known else math.nan, abs=1e-9, nan_ok=True)
