"""What the training loop waits for, how a stop ends it, and what it says when nothing comes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
from loop_world import World

from areal_hpc.errors import ConfigError, WaitTimeout
from areal_hpc.types import Batch, GroupRef, WeightVersion


def test_deterministic_weights_wait_for_what_older_ones_still_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups a step, bound 1: version 0 samples positions 0 to 3. A stop request does not end the wait for 3."""
    world = World(total_steps=2, deterministic=True)
    workers = world.begin_without(3)
    asked: list[bool] = []
    may_publish = world.ring.reader.may_publish

    def watched(version: WeightVersion) -> bool:
        asked.append(may_publish(version))
        if len(asked) == 2:
            world.stop = True
            workers.produce()
        return asked[-1]

    monkeypatch.setattr(world.ring.reader, "may_publish", watched)
    assert world.loop.run() is False
    assert asked == [False, False, True]
    begun = ["weights", "publish 0", "logprobs", "train", "journal 1"]
    assert world.calls == [*begun, "weights", "publish 1", "commit 1", "durable"]


def test_a_wait_for_older_weights_ends_and_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(total_steps=2, deterministic=True)
    world.begin_without(3)
    train_step = world.backend.train_step

    def slow(minibatches: Sequence[Batch]) -> Mapping[str, float]:
        world.loop.clock = itertools.count(world.now, 40.0).__next__
        return train_step(minibatches)

    monkeypatch.setattr(world.backend, "train_step", slow)
    with pytest.raises(WaitTimeout, match=r"version 1 waited 60 s for what older ones sample.* the first is 3; 0 of"):
        world.loop.run()


def test_an_engine_that_comes_back_is_caught_up_while_the_trainer_waits_for_it() -> None:
    """No group would ever come otherwise, with this the only engine."""
    world = World(total_steps=1)
    produce = world.workers.produce if world.workers else None
    served = []

    def serve() -> bool:
        """Groups come only once the engine has been caught up."""
        if any(call.startswith("catch up") for call in world.calls) and produce is not None:
            served.append(world.loop.step)
            produce()
        return False

    world.loop.stop_requested = serve
    world.behind = [False, True, False, False]
    assert world.run() is True
    before = ["weights", "publish 0", "weights", "catch up 0 [('w', None)]"]
    assert world.calls == [*before, "logprobs", "train", "journal 1", "weights", "publish 1", "commit 1", "durable"]
    assert served


def test_catching_up_does_not_lengthen_the_wait_for_a_batch() -> None:
    world = World()
    world.loop.stop_requested = lambda: False  # and nobody produces
    world.behind = [True] * 1000

    def slowly(version: int, weights: Any) -> None:
        world.now += 7.0

    world.loop.engines.catch_up = slowly
    with pytest.raises(WaitTimeout, match=r"step 1 waited 60 s for a batch"):
        world.run()
    assert world.now < 60 + 7 + 7


def test_fault_40_a_checkpoint_makes_room_where_workers_begin_nothing_for_want_of_it() -> None:
    """Once for a step: a second one of the same would free nothing."""
    world = World(total_steps=2, max_staleness=0)
    produce = world.workers.produce if world.workers else None
    asked = []

    def space() -> bool:
        asked.append(world.loop.step)
        return world.loop.step == 1

    def begin_if_there_is_room() -> bool:
        if produce is not None and (world.loop.step == 0 or "commit 1" in world.calls):
            produce()
        return False

    world.loop.checkpoints.would_make_room, world.loop.stop_requested = space, begin_if_there_is_room
    assert world.run() is True
    after = world.calls[world.calls.index("publish 1") + 1 :]
    assert after[:2] == ["commit 1", "durable"], "while step 2 is waited for"
    assert after[2:] == ["logprobs", "train", "journal 2", "weights", "publish 2", "commit 2", "durable"]
    assert asked[-1] == 1 and asked.count(1) == 1


def test_a_checkpoint_that_made_no_room_ends_as_starvation() -> None:
    world = World()
    world.loop.checkpoints.would_make_room = lambda: True
    world.loop.stop_requested = lambda: False  # and nobody produces
    ticks = itertools.count(step=20.0)
    world.loop.clock = lambda: next(ticks)
    with pytest.raises(WaitTimeout, match=r"step 1 waited 60 s for a batch"):
        world.loop.run()
    assert world.calls == ["commit 0", "durable"]


def test_fault_40_a_checkpoint_of_a_crowded_ring_comes_before_the_next_step_which_does_not_wait_for_it() -> None:
    """Once a step, and not where the step has one anyway."""
    world = World(total_steps=4, checkpoint_every=3)
    world.loop.checkpoints.is_crowded = lambda: world.loop.step >= 2
    assert world.run() is True
    kept = [call for call in world.calls if call.startswith(("commit", "durable", "train"))]
    assert kept == ["train", "train", "commit 2", "train", "commit 3", "train", "commit 4", "durable"]


def test_fault_40_where_no_checkpoint_makes_room_the_run_ends_at_its_last_step_and_says_why() -> None:
    world = World()
    world.loop.stop_requested = lambda: False  # and nobody produces
    world.loop.checkpoints.would_make_room = lambda: True

    def refuse() -> None:
        raise ConfigError("buffer.max_mb: quota too small")

    world.loop.checkpoints.require_room = refuse
    with pytest.raises(ConfigError, match="quota too small"):
        world.loop.run()
    assert world.calls == ["commit 0", "durable"], "nothing is lost"


def test_fault_40_weights_that_wait_for_groups_without_room_end_the_run_as_well() -> None:
    """In deterministic training: the step is done, so no checkpoint can be made before its weights are published."""
    world = World(deterministic=True)
    world.begin_without(3)
    world.loop.checkpoints.require_room = Mock(side_effect=[None, ConfigError("buffer.max_mb: quota too small")])
    with pytest.raises(ConfigError, match="quota too small"):
        world.loop.run()
    assert world.calls[-1] == "journal 1", "weights were not published"


def test_the_time_of_such_a_checkpoint_is_not_the_workers() -> None:
    world = World()
    seconds, commit = [0.0], world.loop.checkpoints.begin

    def a_second_later() -> bool:
        seconds[0] += 1.0
        return False

    def slow(step: int) -> None:
        seconds[0] += 1000.0
        commit(step)

    world.loop.checkpoints.would_make_room, world.loop.checkpoints.begin = lambda: True, slow
    world.loop.stop_requested = a_second_later
    world.loop.clock = lambda: seconds[0]
    with pytest.raises(WaitTimeout, match=r"step 1 waited 60 s for a batch"):
        world.loop.run()
    assert 1060 <= seconds[0] <= 1065


def test_a_stop_while_waiting_commits_the_step_that_is_done() -> None:
    world = World(total_steps=100)
    stop_requested = world.stop_requested
    world.loop.stop_requested = lambda: world.loop.step == 3 or stop_requested()
    assert world.run() is False
    assert world.calls[-3:] == ["publish 3", "commit 3", "durable"]
    assert len(world.backend.trained) == 3


def test_a_stop_at_once_commits_what_the_run_started_from() -> None:
    world = World()
    world.stop = True
    assert world.run() is False
    assert world.calls == ["weights", "publish 0", "commit 0", "durable"]


def test_a_claim_that_a_stop_overtook_is_not_lost() -> None:
    """Groups claimed but not trained are in no consumed set, so the next attempt trains them."""
    world = World()
    claimed = world.ring.reader.claim

    def claim(num_groups: int, version: WeightVersion) -> list[GroupRef] | None:
        refs = claimed(num_groups, version)
        world.stop = refs is not None
        return refs

    world.ring.reader.claim = claim  # type: ignore[method-assign]
    assert world.run() is False
    assert world.backend.trained == []
    assert world.ring.reader.stats()["claimed"] == 2
    assert world.ring.reader.state_dict()["consumed"] == {"low": 0, "above": []}


def test_what_became_durable_is_looked_at_before_each_step_and_in_each_wait() -> None:
    """A failed save ends the run at the next step; and what a save frees may be what the workers wait for."""
    world = World(total_steps=3)
    world.run()
    assert world.settled >= 3 + 1  # each step, and the end
    world, asked = World(total_steps=1), itertools.count()
    world.loop.stop_requested = lambda: bool(next(asked) > 5 and world.stop_requested())
    world.run()
    assert world.settled >= 1 + 5

    def fail(wait: bool) -> None:
        if world.loop.step == 2:
            raise OSError(28, "No space left on device")

    world = World(total_steps=9, checkpoint_every=2)
    world.loop.checkpoints.settle = fail
    with pytest.raises(OSError, match="No space left"):
        world.run()
    assert world.calls[-1] == "commit 2"


def test_starvation_ends_with_the_ring_s_own_words() -> None:
    world = World()
    world.workers = None
    ticks = itertools.count(step=20.0)
    world.loop.clock = lambda: next(ticks)
    with pytest.raises(WaitTimeout, match=r"step 1 waited 60 s for a batch: 0 of 2 groups .*raise limits\.starve_s"):
        world.run()


def test_time_without_any_engine_is_no_starvation() -> None:
    """Satellites may be in Slurm's queue for hours."""
    world = World()
    world.workers = None
    ticks, now = itertools.count(step=20.0), [0.0]

    def clock() -> float:
        now[0] = next(ticks)
        return now[0]

    world.loop.clock = clock
    world.loop.engines.deserted_s = lambda: min(400.0, now[0])
    with pytest.raises(WaitTimeout, match="step 1 waited 60 s for a batch"):
        world.run()
    assert 460.0 <= now[0] <= 500.0
