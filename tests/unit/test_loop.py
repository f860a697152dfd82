"""The training loop with a backend that only notes what it is given, on the ring in memory."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from areal_hpc.buffer.memory import MemoryRing
from areal_hpc.buffer.order import FixedOrder
from areal_hpc.config.algorithm import AlgorithmConfig, ProximalMethod
from areal_hpc.errors import CorruptRecord, WaitTimeout
from areal_hpc.training.loop import Pace, TrainingLoop
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import Batch, Drop, GroupRef, StopReason, TrainedStep, Trajectory, TrajectoryGroup, WeightVersion

GROUP_SIZE = 3


def reward(position: int, episode: int) -> float:
    return float((position * 7 + episode * 3) % 5)


def expected_advantage(position: int, episode: int, eps: float = 1e-5) -> float:
    """Shao et al. 2024 (GRPO): the reward less the group's mean, by its deviation (n - 1)."""
    rewards = np.array([reward(position, e) for e in range(GROUP_SIZE)])
    return float((rewards[episode] - rewards.mean()) / (rewards.std(ddof=1) + eps))


def group(position: int, version: int) -> TrajectoryGroup:
    """Trajectories that say in their tokens whose they are: position, episode, then two sampled tokens."""
    return TrajectoryGroup(
        position=position,
        prompt_id=f"p{position}",
        trajectories=tuple(
            Trajectory(
                token_ids=np.array([position, episode, 8, 9], dtype=np.int32),
                loss_mask=np.array([False, False, True, True]),
                logprobs=np.array([0, 0, -1, -2], dtype=np.float32),
                versions=np.array([-1, -1, version, version], dtype=np.int32),
                reward=reward(position, episode),
                stop=StopReason.STOP,
                episode=episode,
            )
            for episode in range(GROUP_SIZE)
        ),
    )


def branched(position: int, version: int) -> TrajectoryGroup:
    """The same episodes, the first of them recorded as three branches."""
    whole = group(position, version)
    return replace(whole, trajectories=(*whole.trajectories[:1] * 3, *whole.trajectories[1:]))


class Workers:
    """Rollout workers that have a group ready whenever the ring gives a ticket."""

    def __init__(self, ring: MemoryRing) -> None:
        self.ring, self.writer, self.make = ring, ring.writer(0), group
        self.positions = itertools.count()
        self.refused: set[int] = set()

    def produce(self) -> None:
        again = iter(self.writer.reissues())
        for position in itertools.chain(again, self.positions):
            ticket = self.writer.try_reserve(position)
            if ticket is None:
                self.positions = itertools.chain([position], self.positions)
                return
            if position in self.refused:
                self.writer.drop(ticket, Drop.FILTERED)
                continue
            self.writer.seal(ticket, self.make(position, ticket.version.step))


class Backend:
    """Notes every call in ``calls`` and every minibatch in ``trained``."""

    def __init__(self, calls: list[str], data_ranks: Ranks) -> None:
        self.calls, self.trained, self.data_ranks = calls, list[list[Batch]](), data_ranks

    def logprobs(self, batch: Batch) -> NDArray[np.float32]:
        self.calls.append("logprobs")
        return batch.behaviour - 0.5

    def train_step(self, minibatches: Sequence[Batch]) -> Mapping[str, float]:
        self.calls.append("train")
        self.trained.append(list(minibatches))
        return {"loss": 0.25}

    def weights(self) -> Iterator[tuple[str, Any]]:
        self.calls.append("weights")
        yield "w", None

    def snapshot(self) -> Callable[[Path], None]:
        raise AssertionError("the loop leaves that to whoever commits")

    def load(self, directory: str) -> None: ...


class World:
    """A loop on one rank and all that it talks to."""

    def __init__(
        self,
        *,
        step: int = 0,
        total_steps: int = 3,
        max_staleness: int = 1,
        checkpoint_every: int = 100,
        deterministic: bool = False,
        ranks: Ranks | None = None,
        data_ranks: Ranks | None = None,
        ring: MemoryRing | None = None,
        **algorithm: Any,
    ) -> None:
        self.algorithm = AlgorithmConfig(**{"groups_per_step": 2, **algorithm})
        capacity = (max_staleness + 1) * self.algorithm.groups_per_step
        ranks = ranks or Ranks()
        order = FixedOrder(groups_per_step=self.algorithm.groups_per_step, max_staleness=max_staleness)
        self.ring = ring or MemoryRing(capacity, max_staleness, order=order if deterministic else None)
        self.workers = Workers(self.ring) if ranks.leads else None
        self.stop = False
        self.calls: list[str] = []
        self.journal: dict[int, list[int]] = {}
        self.records: list[dict[str, Any]] = []
        self.backend = Backend(self.calls, data_ranks or ranks)
        self.now = 0.0
        self.behind: list[bool] = []  # what is answered, last first
        self.settled = 0
        self.loop = TrainingLoop(
            epoch=1,
            step=step,
            pace=Pace(
                total_steps=total_steps, checkpoint_every=checkpoint_every, max_new_tokens=2, starve_s=60.0, seed=1
            ),
            algorithm=self.algorithm,
            ranks=ranks,
            backend=self.backend,
            fetch=self.ring.reader.read,
            reader=self.ring.reader if ranks.leads else None,
            publish=self.publish,
            behind=lambda: self.behind.pop() if self.behind else False,
            catch_up=lambda version, weights: self.calls.append(f"catch up {version} {list(weights())}"),
            commit=lambda step: self.calls.append(f"commit {step}"),
            settle=self.settle,
            journal=self.note,
            stop_requested=self.stop_requested,
            record=lambda kind, values: self.records.append({"kind": kind, **values}),
            clock=lambda: self.now,
        )

    def publish(self, version: int, weights: Callable[[], Iterator[tuple[str, Any]]]) -> Mapping[str, float]:
        assert [name for name, _ in weights()] == ["w"]
        self.calls.append(f"publish {version}")
        return {"seconds_paused": 0.125}

    def settle(self, wait: bool) -> None:
        self.settled += 1
        if wait:
            self.calls.append("durable")

    def note(self, step: int, trained: Sequence[GroupRef]) -> None:
        self.calls.append(f"journal {step}")
        self.journal[step] = [ref.position for ref in trained]

    def stop_requested(self) -> bool:
        """Asked wherever the loop waits; meanwhile the workers work."""
        if self.workers is not None:
            self.workers.produce()
        return self.stop

    def run(self) -> bool:
        self.loop.announce()
        return self.loop.run()

    def begin_without(self, position: int) -> Workers:
        """Start weights published and the positions before ``position`` done; the workers wait to be told to go on."""
        workers, self.workers = self.workers, None
        assert workers is not None
        self.loop.announce()
        workers.positions = iter(range(position))
        workers.produce()
        workers.positions = itertools.count(position)
        return workers

    def trained(self) -> list[tuple[int, int]]:
        """(position, episode) of every trajectory trained on, in no particular order."""
        batches = [batch for minibatches in self.backend.trained for batch in minibatches]
        return [(int(b.token_ids[start]), int(b.token_ids[start + 1])) for b in batches for start in b.boundaries[:-1]]


def test_a_step_is_claim_prepare_train_publish_release() -> None:
    world = World(total_steps=2, minibatches=2)
    assert world.run() is True
    one, two = (["logprobs", "logprobs", "train", f"journal {step}", "weights", f"publish {step}"] for step in (1, 2))
    assert world.calls == ["weights", "publish 0", *one, *two, "commit 2", "durable"]


def test_slots_are_free_only_after_their_weights_are_published() -> None:
    world = World(total_steps=1, max_staleness=0)
    outstanding = []
    publish = world.publish

    def watched(version: int, weights: Callable[[], Iterator[tuple[str, Any]]]) -> Mapping[str, float]:
        outstanding.append(world.ring.reader.stats()["claimed"])
        return publish(version, weights)

    world.loop.publish = watched
    world.run()
    assert outstanding == [0, 2]
    assert world.ring.reader.stats()["claimed"] == 0


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

    world.loop.catch_up = slowly
    with pytest.raises(WaitTimeout, match=r"step 1 waited 60 s for a batch"):
        world.run()
    assert world.now < 60 + 7 + 7


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
    world.loop.settle = fail
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


def test_a_steps_reward_is_a_mean_over_episodes_not_over_branches() -> None:
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
    fetch = world.loop.fetch

    def fetch_or_fail(ref: GroupRef) -> TrajectoryGroup:
        if ref.position in left:
            left.remove(ref.position)
            raise CorruptRecord(f"position {ref.position} fails its checksum")
        return fetch(ref)

    return fetch_or_fail


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


def test_a_stop_that_only_one_rank_saw_stops_both_at_the_same_step() -> None:
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
