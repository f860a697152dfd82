"""When a checkpoint begins, when it counts, and how its failure is told: with a disk that waits until it may write."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commits_world import World

from areal_hpc.buffer.epochs import claim_epoch
from areal_hpc.checkpoint import verify
from areal_hpc.config.describe import dump
from areal_hpc.errors import Fenced, RoleDied, WaitTimeout
from areal_hpc.fs import publish_json
from areal_hpc.roles.wiring.carried import wandb_id
from areal_hpc.training.ranks import Ranks


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with closing(World(tmp_path / "run")) as made:
        yield made


def test_training_goes_on_while_the_disk_is_slow_and_the_checkpoint_holds_what_was(world: World) -> None:
    world.train(1)
    world.backend.disk.clear()
    world.commits.begin(1, weights=11)
    world.train(2)  # model and ring go on
    world.commits.settle()
    assert (world.steps(), world.reader.told) == ([], [])
    world.backend.disk.set()
    world.commits.settle(wait=True)
    found = verify(world.path(1))
    assert (world.path(1) / "model-0").read_text() == "1"
    assert found.state["ring"] == {"consumed": {"low": 2, "above": []}}
    assert world.reader.told == [2]


def test_the_state_says_all_that_a_resumed_run_needs(world: World) -> None:
    world.commits.begin(0, weights=11)
    world.commits.settle(wait=True)
    found = verify(world.path(0))
    assert sorted(found.state) == ["config", "evaluations", "merged", "prompts", "ring", "trackers", "weights"]
    assert found.state["evaluations"] == {"through": 0, "owed": [0]}
    assert found.state["trackers"] == {"wandb": wandb_id(world.run, 1)}
    assert (found.state["prompts"], found.state["weights"], found.layout) == ({"rows": 7}, 11, {"ranks": 1})
    assert found.state["merged"] is False
    assert (world.path(0) / "config.yaml").read_text() == dump(world.config)
    assert len(bytes.fromhex(found.state["config"])) == 32
    (record,) = world.records
    assert (record["kind"], record["step"]) == ("checkpoint", 0)
    assert 0 <= record["seconds_stalled"] <= record["seconds"]


def test_C12_the_ring_may_delete_nothing_before_the_checkpoint_is_durable(world: World) -> None:
    for step in (1, 2, 3):
        world.train(step)
        world.commits.begin(step, weights=0)
        assert world.reader.told == [2 * done for done in range(1, step)]
    world.commits.settle(wait=True)
    assert world.reader.told == [2, 4, 6]
    assert world.steps() == [2, 3]  # keep = 2


def test_at_most_one_is_in_flight_and_the_next_waits_for_it(world: World) -> None:
    world.backend.disk.clear()
    world.commits.begin(1, weights=0)
    threading.Timer(0.05, world.backend.disk.set).start()
    world.commits.begin(2, weights=0)
    assert world.steps()[0] == 1
    assert world.reader.told == [0]


@pytest.mark.parametrize("call", ["settle", "begin"])
def test_a_save_that_failed_is_an_error_at_the_next_edge_and_the_old_one_stands(world: World, call: str) -> None:
    world.commits.begin(1, weights=0)
    world.commits.settle(wait=True)
    world.backend.problems.append(OSError(28, "No space left on device"))
    world.commits.begin(2, weights=0)
    world.commits._background.wait(10)
    with pytest.raises(OSError, match="No space left") as raised:
        world.commits.settle() if call == "settle" else world.commits.begin(3, weights=0)
    assert raised.value.__notes__ == ["in the background, while making the checkpoint of step 2"]
    assert world.steps() == [1]
    assert sorted(path.name for path in world.run.checkpoints.iterdir()) == [world.path(1).name]
    assert world.reader.told == [0]


def test_waiting_for_the_disk_has_a_limit_and_names_the_checkpoint(world: World) -> None:
    world.process.config = replace(world.config, limits=replace(world.config.limits, checkpoint_s=0.01))
    world.backend.disk.clear()
    world.commits.begin(4, weights=0)
    with pytest.raises(WaitTimeout, match=r"the checkpoint of step 4; .*limits\.checkpoint_s"):
        world.commits.settle(wait=True)


def test_the_fence_comes_after_the_slow_part_and_a_fenced_trainer_deletes_nothing(world: World) -> None:
    for step in (1, 2):
        world.commits.begin(step, weights=0)
    world.commits.settle(wait=True)
    world.backend.disk.clear()
    world.commits.begin(3, weights=0)
    claim_epoch(world.run, {})  # while it writes, somebody takes the run over
    world.backend.disk.set()
    with pytest.raises(Fenced):
        world.commits.settle(wait=True)
    assert world.steps() == [1, 2]
    assert world.reader.told == [0, 0]


def test_a_checkpoint_exists_only_once_all_that_it_trained_on_is_archived(world: World) -> None:
    sealed, outcome = threading.Event(), list[OSError]()

    def durable() -> None:
        assert sealed.wait(10)
        for error in outcome:
            raise error

    world.side.archiver = SimpleNamespace(seal=lambda: durable)
    world.commits.begin(1, weights=0)
    assert world.steps() == []
    sealed.set()
    world.commits.settle(wait=True)
    assert world.steps() == [1]
    outcome.append(OSError(28, "No space left on device"))
    world.commits.begin(2, weights=0)
    with pytest.raises(OSError, match="No space left"):
        world.commits.settle(wait=True)
    assert world.steps() == [1]


def test_synchronous_is_the_same_with_a_wait(tmp_path: Path) -> None:
    world = World(tmp_path / "run", asynchronous=False)
    world.train(1)
    world.commits.begin(1, weights=0)
    assert (world.steps(), world.reader.told) == ([1], [2])
    world.backend.problems.append(OSError(5, "Input/output error"))
    with pytest.raises(OSError, match="Input/output"):
        world.commits.begin(2, weights=0)


def test_an_error_elsewhere_does_not_throw_away_a_checkpoint_under_way(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.backend.disk.clear()
    world.commits.begin(1, weights=0)
    threading.Timer(0.05, world.backend.disk.set).start()
    world.commits.close()
    assert world.steps() == [1]
    world.backend.problems.append(OSError(28, "No space left on device"))
    world.commits.begin(2, weights=0)
    with caplog.at_level(logging.WARNING):
        world.commits.close()
    assert "No space left on device" in caplog.text


# What stays


def evaluate(world: World, step: int, **result: Any) -> None:
    publish_json(world.run.evaluation(step), {"epoch": 1, "step": step, **result})


def test_C14_C23_the_best_checkpoint_by_any_value_of_an_evaluation_stays(tmp_path: Path) -> None:
    """Evaluations at 2, 3 and 6, checkpoints at 2, 4, 6 ...: neither period divides the other."""
    world = World(tmp_path / "run", keep=1, keep_best="accuracy")
    evaluate(world, 2, accuracy=0.5)
    evaluate(world, 3, accuracy=0.9)
    evaluate(world, 6, reward_mean=1.0)  # has no such value
    for step in (2, 4, 6, 8):
        world.commits.begin(step, weights=0)
    world.commits.settle(wait=True)
    assert world.steps() == [2, 8]


@pytest.mark.parametrize("name", ["acuracy", "answers"])
def test_a_value_that_no_evaluation_has_as_a_number_is_said(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path / "run", keep=1, keep_best=name)
    evaluate(world, 1, accuracy=0.5, answers=[{"id": "a", "rewards": [1.0]}])
    with caplog.at_level(logging.WARNING):
        world.commits.begin(1, weights=0)
        world.commits.settle(wait=True)
    assert f"no evaluation has {name}; there are accuracy, epoch, step" in caplog.text


# Several ranks


class ThreadRanks(Ranks):
    """Two ranks as two threads; rank 0's value reaches rank 1 as JSON."""

    def __init__(self, rank: int, meeting: threading.Barrier, table: list[str]) -> None:
        self.rank, self.size, self._meeting, self._table = rank, 2, meeting, table

    def share(self, value: Any) -> Any:
        if self.leads:
            self._table.append(json.dumps(value))
        self._meeting.wait(10)
        return json.loads(self._table[-1])


def two(root: Path) -> tuple[World, World]:
    meeting, table = threading.Barrier(2), list[str]()
    one = World(root / "run", ThreadRanks(0, meeting, table))
    return one, World(root / "run", ThreadRanks(1, meeting, table))


def begin_both(one: World, other: World, step: int) -> None:
    thread = threading.Thread(target=other.commits.begin, args=(step, 0))
    thread.start()
    one.commits.begin(step, 0)
    thread.join(10)


def test_B5_rank_0_commits_when_every_rank_has_given_its_word(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    other.backend.disk.clear()
    begin_both(one, other, 1)
    one.commits.settle()
    assert one.steps() == []
    other.backend.disk.set()
    one.commits.settle(wait=True)
    other.commits.settle(wait=True)
    names = {path.name for path in one.path(1).iterdir()}
    assert names >= {"model-0", "model-1", "part-00001.json", "MANIFEST.json"}
    # Made one once all ranks had written, and before the manifest:
    assert (one.path(1) / "completed").read_text() == "model-0 model-1"
    assert verify(one.path(1)).layout == {"ranks": 2}
    assert (one.reader.told, other.reader.told) == ([0], [])


def test_B5_a_part_that_failed_is_a_checkpoint_that_never_was(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    other.backend.problems.append(OSError(122, "Disk quota exceeded"))
    begin_both(one, other, 1)
    with pytest.raises(RoleDied, match=r"trainer rank 1 could not write its part .*Disk quota exceeded.*see its log"):
        one.commits.settle(wait=True)
    with pytest.raises(OSError, match="Disk quota"):
        other.commits.settle(wait=True)
    assert list(one.run.checkpoints.iterdir()) == []


def test_a_rank_that_says_nothing_is_waited_for_with_a_limit(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    one.process.config = replace(one.config, limits=replace(one.config.limits, checkpoint_s=0.05))
    other.backend.disk.clear()
    begin_both(one, other, 1)
    one.commits._background.wait(10)
    with pytest.raises(WaitTimeout, match=r"the part of trainer rank 1 in .*look into its log"):
        one.commits.settle()
    other.backend.disk.set()
    assert one.steps() == []
