"""The training loop step by step, on several ranks, with damaged groups, and into an archive."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from loop_world import GROUP_SIZE, Backend, World, branched, expected_advantage, reward
from numpy.typing import NDArray

from areal_hpc.buffer.scan import one_by_one
from areal_hpc.config.algorithm import ProximalMethod
from areal_hpc.errors import CorruptRecord
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import Batch, Drop, GroupRef, TrainedStep, TrajectoryGroup
from areal_hpc.waits import achieved


def test_a_step_is_claim_prepare_train_publish_release() -> None:
    world = World(total_steps=2, minibatches=2)
    assert world.run() is True
    one, two = (["logprobs", "logprobs", "train", f"journal {step}", "weights", f"publish {step}"] for step in (1, 2))
    assert world.calls == ["weights", "publish 0", *one, *two, "commit 2", "durable"]


def test_a_step_counts_once_for_whoever_asks_however_many_updates_it_made() -> None:
    before = achieved().get("steps trained")
    World(total_steps=3, minibatches=2).run()
    assert achieved()["steps trained"].count - (before.count if before else 0) == 3


def test_a_step_at_which_trainer_and_engines_differ_is_told_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(total_steps=3)
    world.loop.gap_watch = lambda step, stats: f"step {step} differs" if step == 2 else None
    assert world.run() is True
    assert [record for record in world.records if record["kind"] == "alarm"] == [
        {"kind": "alarm", "step": 2, "problem": "step 2 differs"}
    ]
    assert caplog.messages.count("step 2 differs") == 1


def test_slots_are_free_only_after_their_weights_are_published() -> None:
    world = World(total_steps=1, max_staleness=0)
    outstanding = []
    publish = world.publish

    def watched(version: int, weights: Callable[[], Iterator[tuple[str, Any]]]) -> Mapping[str, float]:
        outstanding.append(world.ring.reader.stats()["claimed"])
        return publish(version, weights)

    world.loop.engines.publish = watched
    world.run()
    assert outstanding == [0, 2]
    assert world.ring.reader.stats()["claimed"] == 0


def test_a_step_whose_groups_were_all_refused_is_a_step() -> None:
    world = World(total_steps=3, max_staleness=0, deterministic=True)
    assert world.workers is not None
    world.workers.refused = {1, 2, 3}
    assert world.run() is True
    assert [position for position, _ in world.trained()] == [0] * GROUP_SIZE + [4, 4, 4, 5, 5, 5]
    assert [record["tokens_trained"] for record in world.records] == [12, 0, 24]
    assert [math.isnan(record["reward_mean"]) for record in world.records] == [False, True, False]


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize("total_steps", [1, 2, 7])
def test_C21_every_run_ends_exactly_at_its_last_step(max_staleness: int, minibatches: int, total_steps: int) -> None:
    world = World(total_steps=total_steps, max_staleness=max_staleness, groups_per_step=4, minibatches=minibatches)
    assert world.run() is True
    assert world.loop.step == len(world.backend.trained) == total_steps
    assert all(len(step) == minibatches for step in world.backend.trained)
    assert [record["step"] for record in world.records] == list(range(1, total_steps + 1))
    assert max(record["ring_staleness_max"] for record in world.records) <= max_staleness
    assert set(Counter(world.trained()).values()) == {1}
    assert len(world.trained()) == total_steps * 4 * GROUP_SIZE
    assert world.calls[-2:] == [f"commit {total_steps}", "durable"]


@pytest.mark.parametrize(
    ("start", "total", "every", "commits"),
    [
        (0, 7, 3, [3, 6, 7]),
        (0, 6, 3, [3, 6]),
        (0, 1, 1, [1]),
        (5, 6, 3, [6]),
        (6, 6, 3, [6]),  # C2: resumed at the very end
        (7, 6, 3, [7]),  # total_steps was lowered
    ],
)
def test_C2_commits_come_every_few_steps_and_once_at_the_end(
    start: int, total: int, every: int, commits: list[int]
) -> None:
    world = World(step=start, total_steps=total, checkpoint_every=every)
    assert world.run() is True
    assert [call for call in world.calls if call.startswith("commit")] == [f"commit {step}" for step in commits]
    assert len(world.backend.trained) == max(0, total - start)


def test_advantages_reach_the_trajectories_they_were_computed_for() -> None:
    world = World(total_steps=4, groups_per_step=4, minibatches=3)
    world.run()
    seen = 0
    for batch in itertools.chain.from_iterable(world.backend.trained):
        assert batch.proximal is not None
        np.testing.assert_array_equal(batch.proximal, batch.behaviour - 0.5)
        for start, end in itertools.pairwise(batch.boundaries):
            position, episode = batch.token_ids[start : start + 2]
            expected = expected_advantage(int(position), int(episode))
            np.testing.assert_allclose(batch.advantages[start:end], [0, 0, expected, expected], rtol=1e-5)
            seen += 1
    assert seen == 4 * 4 * GROUP_SIZE


@pytest.mark.parametrize("method", [ProximalMethod.REUSE, ProximalMethod.LOGLINEAR])
def test_no_proximal_forward_where_nobody_uses_it(method: ProximalMethod) -> None:
    world = World(proximal=method)
    world.run()
    assert "logprobs" not in world.calls
    assert all(batch.proximal is None for batch in itertools.chain.from_iterable(world.backend.trained))


def test_a_steps_record_says_what_its_weights_came_to() -> None:
    world = World(total_steps=1)
    world.run()
    assert {name: value for name, value in world.records[0].items() if name.startswith("weight_")} == {
        "weight_bytes": 20.0,
        "weight_bytes_saved": 60.0,
    }


def test_I14_a_steps_reward_is_the_one_that_is_trained_as_a_mean_over_episodes() -> None:
    world = World(total_steps=2)
    assert world.workers is not None
    world.workers.make = branched
    assert world.run() is True
    for step, record in enumerate(world.records):
        rewards = [reward(position, episode) for position in (2 * step, 2 * step + 1) for episode in range(GROUP_SIZE)]
        assert (record["reward_mean"], record["reward_std"]) == (np.mean(rewards), np.std(rewards))


def damaged(world: World, *positions: int) -> Callable[[GroupRef], TrajectoryGroup]:
    """A fetch that fails for these positions, once each."""
    left = set(positions)
    read = world.ring.reader.read

    def read_or_fail(ref: GroupRef) -> TrajectoryGroup:
        if ref.position in left:
            left.remove(ref.position)
            raise CorruptRecord(f"position {ref.position} fails its checksum")
        return read(ref)

    return one_by_one(read_or_fail)


@pytest.mark.parametrize("bad", [(1,), (0, 1)], ids=["one", "the whole step"])
def test_a_damaged_group_is_left_out_and_made_again(bad: tuple[int, ...]) -> None:
    world = World(total_steps=4)
    world.loop.fetch = damaged(world, *bad)
    assert world.run() is True
    first = {int(b.token_ids[start]) for b in world.backend.trained[0] for start in b.boundaries[:-1]}
    assert first == {0, 1} - set(bad)
    assert sorted(world.journal[1]) == sorted(first), "the journal names what was trained, not what was claimed"
    assert sorted(itertools.chain.from_iterable(world.journal.values())) == sorted({p for p, _ in world.trained()})
    assert set(bad) <= {position for position, _ in world.trained()}
    assert set(Counter(world.trained()).values()) == {1}
    assert world.records[-1][f"ring_dropped_{Drop.CORRUPT}"] == len(bad)
    whole = world.records[-1]["tokens_generated"]
    assert world.records[0]["tokens_generated"] == whole * (2 - len(bad)) / 2, "what was left out is not counted"
    assert math.isnan(world.records[0]["reward_mean"]) == (len(bad) == 2)


class ThreadRanks(Ranks):
    """Two ranks as two threads that meet at a barrier; values go through JSON as they do between processes."""

    def __init__(self, rank: int, meeting: threading.Barrier, table: dict[int, str]) -> None:
        self.rank, self.size, self._meeting, self._table = rank, 2, meeting, table

    def share(self, value: Any) -> Any:
        return self.gather(value)[0]

    def gather(self, value: Any) -> list[Any]:
        self._table[self.rank] = json.dumps(value)
        self._meeting.wait(timeout=10)
        values = [json.loads(self._table[rank]) for rank in range(2)]
        self._meeting.wait(timeout=10)
        return values

    def gather_floats(self, values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return [np.array(one, dtype=np.float32) for one in self.gather(values.tolist())]

    def any_each(self, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.any(self.gather(flags.tolist()), axis=0)


def two_ranks(prepare: Callable[[list[World]], None], **settings: Any) -> tuple[list[World], list[bool]]:
    meeting, table = threading.Barrier(2), dict[int, str]()
    leader = World(ranks=ThreadRanks(0, meeting, table), **settings)
    worlds = [leader, World(ranks=ThreadRanks(1, meeting, table), ring=leader.ring, **settings)]
    prepare(worlds)
    with ThreadPoolExecutor(2) as pool:
        return worlds, list(pool.map(World.run, worlds))


def test_two_ranks_share_each_step_without_overlap() -> None:
    worlds, finished = two_ranks(lambda _: None, total_steps=3, groups_per_step=4, minibatches=2)
    assert finished == [True, True]
    trained = worlds[0].trained() + worlds[1].trained()
    assert set(Counter(trained).values()) == {1}
    assert len(trained) == 3 * 4 * GROUP_SIZE
    assert abs(len(worlds[0].trained()) - len(worlds[1].trained())) <= 3 * 2  # balanced in each minibatch
    assert worlds[0].records and not worlds[1].records


def test_ranks_that_hold_one_copy_of_the_model_are_dealt_the_same_sequences() -> None:
    worlds, finished = two_ranks(lambda _: None, total_steps=3, groups_per_step=4, minibatches=2, data_ranks=Ranks())
    assert finished == [True, True]
    assert worlds[0].trained() == worlds[1].trained()
    assert len(worlds[0].trained()) == 3 * 4 * GROUP_SIZE
    assert worlds[0].records and not worlds[1].records


def test_what_one_rank_cannot_read_is_left_out_on_both() -> None:
    def damage(worlds: list[World]) -> None:
        worlds[1].loop.fetch = damaged(worlds[1], 0, 1, 2, 3)

    worlds, finished = two_ranks(damage, total_steps=6, groups_per_step=4)
    assert finished == [True, True]
    by_step = [
        {int(b.token_ids[s]) for world in worlds for b in world.backend.trained[step] for s in b.boundaries[:-1]}
        for step in range(6)
    ]
    failed = set(range(4)) - by_step[0]
    assert failed, "rank 1 had no share of the first groups"
    counts = Counter(position for world in worlds for position, _ in world.trained())
    assert set(counts.values()) == {GROUP_SIZE}, "a group was trained in part"
    assert failed <= set(counts)


def test_A38_a_stop_that_only_one_rank_saw_stops_both_at_the_same_step() -> None:
    def stop_second(worlds: list[World]) -> None:
        worlds[1].loop.stop_requested = lambda: worlds[1].loop.step >= 2

    worlds, finished = two_ranks(stop_second, total_steps=50)
    assert finished == [False, False]
    assert [world.calls[-2] for world in worlds] == ["commit 2", "commit 2"]


# What an archive gets


def archived(world: World) -> list[TrainedStep]:
    steps: list[TrainedStep] = []
    world.loop.archive = steps.append
    world.run()
    return steps


def test_the_archive_gets_each_step_with_all_that_it_was_trained_on() -> None:
    world = World(total_steps=3, minibatches=2)
    steps = archived(world)
    assert [step.version for step in steps] == [(1, 1), (1, 2), (1, 3)]
    for step, minibatches in zip(steps, world.backend.trained, strict=True):
        trained = {(int(b.token_ids[s]), int(b.token_ids[s + 1])): b for b in minibatches for s in b.boundaries[:-1]}
        owners = [(ref.position, episode) for ref in step.refs for episode in ref.episodes]
        assert sorted(owners) == sorted(trained)
        assert step.readable == (True, True)
        expected = [expected_advantage(*owner) for owner in owners]
        np.testing.assert_allclose(step.advantages, expected, rtol=1e-5)
        assert sorted(step.proximal) == list(range(len(owners)))
        for n in step.proximal:  # the backend's proximal is the behaviour's less a half
            np.testing.assert_array_equal(step.proximal[n], np.array([-0.5, -0.5, -1.5, -2.5], dtype=np.float32))


def test_the_archive_knows_what_was_left_out_and_what_nobody_computed() -> None:
    world = World(total_steps=1, proximal=ProximalMethod.REUSE)
    world.loop.fetch = damaged(world, 1)
    (step,) = archived(world)
    assert [ref.position for ref in step.refs] == [0, 1]
    assert step.readable == (True, False)
    assert step.advantages.size == 2 * GROUP_SIZE
    assert step.proximal == {}


class Telling(Backend):
    """Proximal log-probs that say whose token they are of."""

    def logprobs(self, batch: Batch) -> NDArray[np.float32]:
        of_sequence = [-int(batch.token_ids[s]) - int(batch.token_ids[s + 1]) / 8 for s in batch.boundaries[:-1]]
        return np.repeat(of_sequence, np.diff(batch.boundaries)).astype(np.float32)


@pytest.mark.parametrize("bad", [(), (2,), (0, 1, 2, 3)])
def test_the_archive_gets_the_proximal_log_probs_of_every_rank_s_share(bad: tuple[int, ...]) -> None:
    steps: list[TrainedStep] = []

    def keep(worlds: list[World]) -> None:
        for world, take in zip(worlds, (steps.append, lambda step: None), strict=True):
            world.loop.archive, world.loop.backend = take, Telling([], world.backend.data_ranks)
        worlds[1].loop.fetch = damaged(worlds[1], *bad)

    two_ranks(keep, total_steps=2, groups_per_step=4, minibatches=2)
    assert [all(step.readable) for step in steps] == [not bad, True]
    for step in steps:
        owners = [(ref.position, episode) for ref in step.refs for episode in ref.episodes]
        readable = [n for n in range(len(owners)) if step.readable[n // GROUP_SIZE]]
        assert sorted(step.proximal) == readable
        for n in readable:
            position, episode = owners[n]
            np.testing.assert_array_equal(step.proximal[n], [-position - episode / 8] * 4)
