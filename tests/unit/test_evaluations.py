"""Which evaluations are owed at a step: from the configuration, from what a commit owed, and from what has a result."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.buffer.epochs import StartRecord, claim_epoch, write_start
from areal_hpc.config.schema import EvaluationConfig
from areal_hpc.fs import publish_json
from areal_hpc.roles.wiring.evaluations import Agenda, last_result, results
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion
from areal_hpc.watermark import Watermark

FRESH = Agenda()
TOTAL = 22


@pytest.mark.parametrize(
    ("step", "every", "at_start", "finished", "owed"),
    [
        (0, 5, True, set(), (0,)),
        (0, 5, False, set(), ()),
        (0, 5, True, {0}, ()),
        (4, 5, True, {0}, ()),
        (5, 5, True, {0}, (5,)),
        (7, 5, True, {0}, (5,)),
        (7, 5, True, {0, 5}, ()),
        (19, 5, True, {0}, (5, 10, 15)),
        (19, 5, True, {0, 10}, (15,)),  # what is older than a result is stood for by it
        (19, 5, True, {0, 5, 20}, (10, 15)),  # a restart from 19 takes that one back
        (22, 5, True, {0, 15}, (20, 22)),  # the last step is asked for whatever every_steps says
        (22, 5, True, {22}, ()),
        (22, 100, False, set(), (22,)),
        (30, 5, True, {0, 25}, ()),  # total_steps was lowered below what is evaluated
        (30, 5, True, {0, 20}, (22,)),
    ],
)
def test_what_a_start_from_the_model_owes(
    step: int, every: int, at_start: bool, finished: set[int], owed: tuple[int, ...]
) -> None:
    config = EvaluationConfig(every_steps=every, at_start=at_start)
    assert FRESH.at(step, config, TOTAL, finished) == Agenda(through=step, owed=owed)


def test_what_was_asked_for_is_decided_once_and_a_changed_configuration_asks_from_there_on() -> None:
    """Every 10 steps up to a commit at 14, whose evaluation of 10 is under way; then every 3."""
    before = FRESH.at(14, EvaluationConfig(every_steps=10), 40, {0})
    assert before == Agenda(through=14, owed=(10,))
    after = EvaluationConfig(every_steps=3)
    assert before.at(14, after, 40, {0}).owed == (10,), "9 and 12 have not been asked for"
    assert before.at(16, after, 40, {0}).owed == (10, 15)
    assert before.at(16, after, 40, {0, 10}).owed == (15,)
    assert before.at(14, EvaluationConfig(), 40, {0}).owed == (), "evaluations were turned off"
    settled = FRESH.at(14, EvaluationConfig(every_steps=10), 40, {0, 10})
    assert settled.at(14, EvaluationConfig(every_steps=10), 40, finished=()).owed == (), "done is done, file or no file"


def test_an_evaluation_turned_on_later_asks_for_nothing_of_before() -> None:
    off = FRESH.at(17, EvaluationConfig(), 40, set())
    on = EvaluationConfig(every_steps=5)
    assert [off.at(step, on, 40, set()).owed for step in (17, 19, 20)] == [(), (), (20,)]


def test_an_agenda_survives_as_json() -> None:
    agenda = Agenda(through=14, owed=(5, 10))
    assert Agenda.from_record(agenda.record()) == agenda


@given(
    every=st.integers(1, 7),
    total=st.integers(1, 30),
    at_start=st.booleans(),
    commits=st.lists(st.integers(0, 30), max_size=5),
    lag=st.integers(0, 3),
)
def test_restarts_at_any_commits_ask_for_what_one_attempt_would(
    every: int, total: int, at_start: bool, commits: list[int], lag: int
) -> None:
    """Results come ``lag`` steps late. Whatever the steps of the commits that attempts went on from, at the end the
    same steps are owed as if nobody had died, and none of them had its result by then."""
    config = EvaluationConfig(every_steps=every, at_start=at_start)
    asked = [s for s in range(total + 1) if (s == total or s % every == 0) and (s or at_start)]
    agenda = FRESH
    for step in sorted(min(commit, total) for commit in commits):
        agenda = Agenda.from_record(agenda.at(step, config, total, {s for s in asked if s + lag <= step}).record())
    finished = {s for s in asked if s + lag <= total}
    owed = agenda.at(total, config, total, finished).owed
    assert owed == FRESH.at(total, config, total, finished).owed == tuple(s for s in asked if s + lag > total)


def test_C20_results_of_what_was_taken_back_do_not_count(tmp_path: Path) -> None:
    """Attempt 1 evaluated 10, 20 and 30. Attempt 2 went back to 10 and evaluated 20; attempt 3 went on from 25 of it,
    where 20 is known by attempt 2's result only, and 30 by none that counts."""
    run = RunDir.create(tmp_path / "run")

    def begin(parent: WeightVersion | None) -> None:
        epoch = claim_epoch(run, {})
        version = WeightVersion(epoch, 0 if parent is None else parent.step)
        write_start(run, epoch, StartRecord(parent=parent, version=version, consumed=Watermark(), fingerprint="f"))

    begin(None)
    for step in (0, 10, 20, 30):
        publish_json(run.evaluation(step), {"epoch": 1, "step": step})
    assert set(results(run, 1)) == {0, 10, 20, 30}
    begin(WeightVersion(1, 10))
    assert set(results(run, 2)) == {0, 10}
    publish_json(run.evaluation(20), {"epoch": 2, "step": 20})
    assert set(results(run, 2)) == {0, 10, 20}
    assert [last_result(run, 2, step) for step in (9, 19, 40)] == [0, 10, 20]
    begin(WeightVersion(2, 25))
    assert set(results(run, 3)) == {0, 10, 20}
    begin(WeightVersion(2, 15))
    assert set(results(run, 4)) == {0, 10}
