"""Trackers and evaluations through commits, kills and restarts: what is in the state, and that it is what counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.buffer.epochs import StartRecord, claim_epoch, write_start
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config
from areal_hpc.fs import publish_json
from areal_hpc.roles.wiring.carried import OLD_ID, agenda_of, carried_at, carried_on, wandb_id
from areal_hpc.roles.wiring.evaluations import Agenda, results
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion
from areal_hpc.watermark import Watermark

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
FIRST = WeightVersion(1, 20)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


@pytest.fixture
def config() -> Config:
    return load([QUICKSTART], ["evaluation.every_steps=10"])


def begin(run: RunDir, parent: WeightVersion | None = None, state: Mapping[str, Any] | None = None) -> int:
    """The next attempt, as its trainer begins it."""
    epoch = claim_epoch(run, {})
    version = WeightVersion(epoch, parent.step if parent else 0)
    carried = carried_on(run, state)
    record = StartRecord(parent=parent, version=version, consumed=Watermark(), fingerprint="f", carried=carried)
    write_start(run, epoch, record)
    return epoch


def finish(run: RunDir, epoch: int, *steps: int) -> None:
    for step in steps:
        publish_json(run.evaluation(step), {"epoch": epoch, "step": step})


def due(run: RunDir, epoch: int, step: int, config: Config) -> tuple[int, ...]:
    """What an evaluator that begins now finds to do when ``step`` is the newest."""
    return agenda_of(run, epoch).at(step, config.evaluation, 60, set(results(run, epoch))).owed


def test_C15_the_tracker_run_is_that_of_the_commit_and_of_nothing_else(run: RunDir, config: Config) -> None:
    first = wandb_id(run, begin(run))
    assert first.startswith("run-")
    state = carried_at(20, run, 1, config)
    assert state["trackers"] == {"wandb": first}
    assert wandb_id(run, begin(run, FIRST, state)) == first
    assert carried_at(30, run, 2, config)["trackers"] == {"wandb": first}
    other = {"trackers": {"wandb": "another"}}
    assert wandb_id(run, begin(run, FIRST, state | other)) == "another", "the state decides"
    assert wandb_id(run, begin(run)) not in (first, "another"), "from the model alone: nothing to go on with"


def test_an_evaluation_alone_has_a_tracker_run_though_no_trainer_begins(run: RunDir) -> None:
    assert wandb_id(run, claim_epoch(run, {})).startswith("run-")


@pytest.mark.parametrize("died", ["before the commit", "between commit and result", "after the result"])
def test_C20_an_evaluation_is_neither_lost_nor_done_twice_wherever_a_kill_comes(
    died: str, run: RunDir, config: Config
) -> None:
    """Step 20 is asked for at its edge, where its commit begins; its result comes while the commit is written, later,
    or never."""
    begin(run)
    finish(run, 1, 0, 10)
    if died == "before the commit":  # of 20: the run goes on from that of 15, and asks for 20 when it comes to it
        parent, state = WeightVersion(1, 15), carried_at(15, run, 1, config)
        finish(run, 1, 20)  # of weights that nobody has any more
    else:
        parent, state = FIRST, carried_at(20, run, 1, config)
        assert state["evaluations"] == {"through": 20, "owed": (20,)}
    if died == "after the result":
        finish(run, 1, 20)
    epoch = begin(run, parent, state)
    assert due(run, epoch, parent.step, config) == {"between commit and result": (20,)}.get(died, ())
    assert due(run, epoch, 20, config) == (() if died == "after the result" else (20,))
    finish(run, epoch, 20)
    assert due(run, epoch, 29, config) == ()
    assert carried_at(29, run, epoch, config)["evaluations"] == {"through": 29, "owed": ()}


def test_a_result_that_a_commit_counts_is_not_asked_for_again_if_its_file_is_gone(run: RunDir, config: Config) -> None:
    begin(run)
    finish(run, 1, 0, 10, 20)
    state = carried_at(20, run, 1, config)
    run.evaluation(20).unlink()
    assert due(run, begin(run, FIRST, state), 25, config) == ()


def test_a_checkpoint_of_before_goes_on_with_what_its_run_has(run: RunDir, config: Config) -> None:
    """Its state says nothing of trackers and evaluations; the id was in a file, and results are where they were."""
    begin(run)
    run.trackers.mkdir()
    (run.trackers / OLD_ID).write_text("run-18f3")
    finish(run, 1, 0, 10)
    epoch = begin(run, FIRST, {"ring": {}, "prompts": {}})
    assert wandb_id(run, epoch) == "run-18f3"
    assert wandb_id(run, begin(run)) != "run-18f3", "from the model alone"
    assert agenda_of(run, epoch) == Agenda()
    assert due(run, epoch, 20, config) == (20,)
    finish(run, epoch, 20)
    assert due(run, epoch, 20, config) == ()
    assert carried_at(20, run, epoch, config) == {
        "trackers": {"wandb": "run-18f3"},
        "evaluations": {"through": 20, "owed": ()},
    }
