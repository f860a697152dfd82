"""RolloutWriter and RolloutReader: the same cases on the ring on disk and on its specification in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal_hpc.buffer.epochs import claim_epoch
from areal_hpc.buffer.memory import MemoryRing
from areal_hpc.buffer.order import FixedOrder
from areal_hpc.buffer.reader import RingReader
from areal_hpc.buffer.writer import RingWriter
from areal_hpc.config.schema import BufferConfig
from areal_hpc.errors import ConfigError, Fenced
from areal_hpc.fs import RunDir
from areal_hpc.types import Drop, StopReason, Ticket, Trajectory, TrajectoryGroup, WeightVersion

NEVER_S = 1e6
"""Commits happen when a test says so, not by the clock."""


def group(position: int, versions: list[int]) -> TrajectoryGroup:
    """A group of two trajectories; its tokens are the position's, sampled by ``versions``."""
    trajectories = tuple(
        Trajectory(
            token_ids=np.array([position, *range(len(versions))], dtype=np.int32),
            loss_mask=np.array([False] + [True] * len(versions)),
            logprobs=np.array([0.0] + [-0.5 * i] * len(versions), dtype=np.float32),
            versions=np.array([-1, *versions], dtype=np.int32),
            reward=float(i),
            stop=StopReason.LENGTH if i else StopReason.STOP,
            episode=i,
        )
        for i in range(2)
    )
    return TrajectoryGroup(position=position, prompt_id=f"p{position}", trajectories=trajectories)


class MemoryStore:
    """The specification."""

    def __init__(self, capacity: int, max_staleness: int, num_slots: int, order: FixedOrder | None = None) -> None:
        self.shape, self.order = (capacity, max_staleness, num_slots), order
        self.ring = MemoryRing(*self.shape, order=order)

    @property
    def epoch(self) -> int:
        return self.ring.epoch

    @property
    def reader(self) -> Any:
        return self.ring.reader

    def writer(self, slot: int) -> Any:
        return self.ring.writer(slot)

    def flush(self, writer: Any) -> None:
        pass

    def kill(self, writer: Any) -> None:
        pass

    def restart(self, state: Mapping[str, Any] | None, parent: WeightVersion | None) -> None:
        self.ring = MemoryRing(*self.shape, order=self.order, before=self.ring, state=state, parent=parent)

    def close(self) -> None:
        pass


class DiskStore:
    """The ring, with segments so small that they roll all the time."""

    def __init__(self, capacity: int, max_staleness: int, num_slots: int, order: FixedOrder | None = None) -> None:
        self.directory = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.run = RunDir.create(Path(self.directory.name) / "run")
        self.shape: dict[str, Any] = {"capacity": capacity, "num_slots": num_slots, "order": order}
        self.config = BufferConfig(max_staleness=max_staleness, segment_mb=0.002, commit_s=NEVER_S)
        self.writers: list[RingWriter] = []
        self.restart(None, None)

    def writer(self, slot: int) -> RingWriter:
        shape = {"config": self.config, **self.shape}
        writer = RingWriter(self.run, self.epoch, slot=slot, poll_s=0.0, fence_s=0.0, **shape)
        self.writers.append(writer)
        return writer

    def flush(self, writer: RingWriter) -> None:
        writer.flush()

    def kill(self, writer: RingWriter) -> None:
        writer._commits.stop()
        writer._chain.close()
        self.writers.remove(writer)

    def restart(self, state: Mapping[str, Any] | None, parent: WeightVersion | None) -> None:
        self.epoch = claim_epoch(self.run, {"job": "test"})
        shape = {"config": self.config, **self.shape}
        self.reader = RingReader(self.run, self.epoch, state=state, parent=parent, discover_s=0.0, **shape)
        self.reader.write_start(WeightVersion(self.epoch, parent.step if parent else 0), "data")

    def close(self) -> None:
        for writer in list(self.writers):
            self.kill(writer)
        self.directory.cleanup()


Make = Callable[[int, int, int], Any]


@pytest.fixture(params=[MemoryStore, DiskStore])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    stores = []

    def make_store(capacity: int, max_staleness: int, num_slots: int) -> Any:
        stores.append(request.param(capacity, max_staleness, num_slots))
        return stores[-1]

    yield make_store
    for store in stores:
        store.close()


def begin(store: Any, *slots: int, step: int = 0) -> list[Any]:
    """Writers for ``slots`` that the reader follows, under published weights of ``step``."""
    version = WeightVersion(store.epoch, step)
    store.reader.release(version)
    writers = [store.writer(slot) for slot in slots]
    assert store.reader.claim(10**6, version) is None  # looks for new writers
    return writers


def produce(store: Any, writer: Any, position: int) -> Ticket:
    ticket = writer.try_reserve(position)
    assert ticket is not None
    writer.seal(ticket, group(position, [ticket.version.step]))
    store.flush(writer)
    return ticket


def test_a_group_travels_unchanged(make: Make) -> None:
    store = make(2, 0, 1)
    (writer,) = begin(store, 0)
    produce(store, writer, 7)
    (ref,) = store.reader.claim(1, WeightVersion(store.epoch, 0))
    assert (ref.position, ref.rewards, ref.lengths, ref.generated) == (7, (0.0, 1.0), (2, 2), (1, 1))
    assert (ref.truncated, ref.episodes, ref.version) == ((False, True), (0, 1), WeightVersion(store.epoch, 0))
    read, sent = store.reader.read(ref), group(7, [0])
    assert (read.position, read.prompt_id) == (7, "p7")
    for ours, theirs in zip(read.trajectories, sent.trajectories, strict=True):
        for name in ("token_ids", "loss_mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), strict=True)
        assert (ours.reward, ours.stop, ours.episode) == (theirs.reward, theirs.stop, theirs.episode)


def test_nothing_is_reserved_before_the_weights_are_published(make: Make) -> None:
    store = make(2, 0, 1)
    writer = store.writer(0)
    assert writer.try_reserve(0) is None
    assert writer.version.step < 0


def test_E27_a_bound_of_zero_still_has_a_step_of_slots(make: Make) -> None:
    """Synchronous training: B slots, all free again once the step's weights are published, and not before."""
    store = make(2, 0, 1)
    (writer,) = begin(store, 0)
    for step in range(3):
        version = WeightVersion(store.epoch, step)
        for position in (2 * step, 2 * step + 1):
            produce(store, writer, position)
        assert writer.try_reserve(99) is None
        assert [ref.position for ref in store.reader.claim(2, version)] == [2 * step, 2 * step + 1]
        assert writer.try_reserve(99) is None
        store.reader.release(WeightVersion(store.epoch, step + 1))


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
def test_C8_shares_sum_to_the_capacity(make: Make, num_slots: int) -> None:
    store = make(7, 0, num_slots)
    writers = begin(store, *range(num_slots))
    taken = 0
    for slot, writer in enumerate(writers):
        while writer.try_reserve(slot) is not None:
            taken += 1
    assert taken == 7


def test_more_writers_than_slots_is_refused_with_what_to_do(make: Make) -> None:
    store = make(2, 0, 3)
    with pytest.raises(ConfigError, match=r"rollout\.workers to 2"):
        store.writer(2)


def test_the_oldest_come_first_and_a_late_one_is_waited_for(make: Make) -> None:
    """Bound 1, one group a step. The slow ticket of version 0 must go into the step at version 1: it waits."""
    store = make(2, 1, 1)
    (writer,) = begin(store, 0)
    slow = writer.try_reserve(0)
    produce(store, writer, 1)
    assert [ref.position for ref in store.reader.claim(1, WeightVersion(store.epoch, 0))] == [1]
    store.reader.release(WeightVersion(store.epoch, 1))
    produce(store, writer, 2)
    assert store.reader.claim(1, WeightVersion(store.epoch, 1)) is None
    assert "1 of 1 groups are sealed, 1 are in flight, the oldest 1 versions behind" in store.reader.waiting_for()
    assert "of version 0 or older, which would become too old, of writers [0]" in store.reader.waiting_for()
    writer.seal(slow, group(0, [0]))
    store.flush(writer)
    assert [ref.position for ref in store.reader.claim(1, WeightVersion(store.epoch, 1))] == [0]
    assert store.reader.stats()["staleness_max"] == 1


def test_two_late_ones_that_share_one_last_step_are_waited_for_in_time(make: Make) -> None:
    """Bound 2, one group a step: at version 1 both slow ones are young enough, but only one fits into version 2."""
    store = make(3, 2, 1)
    (writer,) = begin(store, 0)
    slow = [writer.try_reserve(position) for position in (0, 1)]
    produce(store, writer, 2)
    assert [ref.position for ref in store.reader.claim(1, WeightVersion(store.epoch, 0))] == [2]
    store.reader.release(WeightVersion(store.epoch, 1))
    produce(store, writer, 3)
    assert store.reader.claim(1, WeightVersion(store.epoch, 1)) is None
    for step, position in ((1, 1), (2, 0)):
        writer.seal(slow[position], group(position, [0]))
        store.flush(writer)
        assert [ref.position for ref in store.reader.claim(1, WeightVersion(store.epoch, step))] == [position]
        store.reader.release(WeightVersion(store.epoch, step + 1))
    assert store.reader.stats()["dropped_stale"] == 0


def test_a_drop_frees_its_slot_at_once_and_consumes_the_position(make: Make) -> None:
    store = make(1, 0, 1)
    (writer,) = begin(store, 0)
    ticket = writer.try_reserve(0)
    assert writer.try_reserve(1) is None
    writer.drop(ticket, Drop.FILTERED)
    produce(store, writer, 0)  # a duplicate of a consumed position
    assert store.reader.claim(1, WeightVersion(store.epoch, 0)) is None
    assert writer.reissues() == []
    stats = store.reader.stats()
    assert (stats["dropped_filtered"], stats["duplicates"], stats["fill"]) == (1, 1, 0)
    produce(store, writer, 1)  # the duplicate's slot is free
    assert [ref.position for ref in store.reader.claim(1, WeightVersion(store.epoch, 0))] == [1]


def test_a_group_that_is_too_old_is_dropped_and_run_again(make: Make) -> None:
    store = make(2, 1, 1)
    (writer,) = begin(store, 0)
    produce(store, writer, 0)
    store.reader.release(WeightVersion(store.epoch, 2))
    assert store.reader.claim(1, WeightVersion(store.epoch, 2)) is None
    assert store.reader.stats()["dropped_stale"] == 1
    assert writer.reissues() == [0]
    assert writer.reissues() == []
    produce(store, writer, 0)
    assert [ref.position for ref in store.reader.claim(1, WeightVersion(store.epoch, 2))] == [0]


def test_a_discarded_group_is_run_again_or_consumed_as_its_reason_says(make: Make) -> None:
    store = make(4, 0, 1)
    (writer,) = begin(store, 0)
    for position in range(3):
        produce(store, writer, position)
    version = WeightVersion(store.epoch, 0)
    corrupt, failed, good = store.reader.claim(3, version)
    store.reader.discard(corrupt, Drop.CORRUPT)
    store.reader.discard(failed, Drop.FAILED)
    store.reader.release(WeightVersion(store.epoch, 1))
    assert writer.reissues() == [corrupt.position]
    state = store.reader.state_dict()
    assert state["consumed"] == {"low": 0, "above": [failed.position, good.position]}
    assert state["drops"] == {"corrupt": 1, "failed": 1}


def test_a_replaced_writer_gives_back_what_it_had_in_flight(make: Make) -> None:
    """Capacity 2: one group sealed by the dead writer still counts, its ticket in flight does not."""
    store = make(2, 1, 1)
    (first,) = begin(store, 0)
    produce(store, first, 0)
    assert first.try_reserve(1) is not None
    store.flush(first)
    store.kill(first)
    second = store.writer(0)
    version = WeightVersion(store.epoch, 0)
    assert store.reader.claim(10, version) is None
    issued = second.issued()
    assert issued is not None and 0 in issued and 1 in issued and 2 not in issued
    assert second.reissues() == [1]
    produce(store, second, 1)
    assert second.try_reserve(2) is None
    assert [ref.position for ref in store.reader.claim(1, version)] == [0]
    store.reader.release(WeightVersion(store.epoch, 1))
    assert second.try_reserve(2) is not None


def test_a_closed_writer_ends_its_tickets(make: Make) -> None:
    store = make(2, 1, 1)
    (writer,) = begin(store, 0)
    writer.try_reserve(0)
    writer.close()
    assert store.reader.claim(1, WeightVersion(store.epoch, 0)) is None
    (second,) = begin(store, 0)
    assert second.reissues() == [0]


def test_C5_C6_a_restart_keeps_sealed_groups_and_runs_the_rest_again(make: Make) -> None:
    store = make(4, 1, 1)
    (writer,) = begin(store, 0)
    for position in range(2):
        produce(store, writer, position)
    store.reader.claim(2, WeightVersion(store.epoch, 0))
    store.reader.release(WeightVersion(store.epoch, 1))
    state, parent = store.reader.state_dict(), WeightVersion(store.epoch, 1)
    store.reader.covered(state)
    for position in (2, 3):
        produce(store, writer, position)
    writer.try_reserve(4)
    store.flush(writer)
    store.restart(state, parent)
    with pytest.raises(Fenced):
        writer.try_reserve(5)
    (writer,) = begin(store, 0, step=1)
    issued = writer.issued()
    assert [position in issued for position in range(6)] == [True] * 4 + [False] * 2
    assert writer.reissues() == []
    assert writer.try_reserve(4) is not None
    assert writer.try_reserve(5) is not None
    assert writer.try_reserve(6) is None  # two carried, two reserved
    assert [ref.position for ref in store.reader.claim(2, WeightVersion(store.epoch, 1))] == [2, 3]


def test_groups_of_a_lost_branch_are_dropped_and_run_again(make: Make) -> None:
    """Sampled in part by step 2, which the restart from step 1 took back; the filtered one of that branch as well."""
    store = make(6, 2, 1)
    (writer,) = begin(store, 0)
    store.reader.release(WeightVersion(store.epoch, 1))
    state, parent = store.reader.state_dict(), WeightVersion(store.epoch, 1)
    kept, mixed = writer.try_reserve(0), writer.try_reserve(1)
    store.reader.release(WeightVersion(store.epoch, 2))
    late, filtered = writer.try_reserve(2), writer.try_reserve(3)
    writer.seal(kept, group(0, [1, 1]))
    writer.seal(mixed, group(1, [1, 2]))
    writer.seal(late, group(2, [2]))
    writer.drop(filtered, Drop.FILTERED)
    store.flush(writer)
    store.restart(state, parent)
    (writer,) = begin(store, 0, step=1)
    issued = writer.issued()
    assert [position in issued for position in range(4)] == [True, False, False, False]
    assert store.reader.stats()["dropped_newer"] == 3
    assert [ref.position for ref in store.reader.claim(1, WeightVersion(store.epoch, 1))] == [0]


def test_a_replaced_trainer_is_fenced(make: Make) -> None:
    store = make(2, 1, 1)
    begin(store, 0)
    old, version = store.reader, WeightVersion(store.epoch, 1)
    store.restart(None, None)
    with pytest.raises(Fenced):
        old.release(version)
    with pytest.raises(Fenced):
        old.covered(old.state_dict())


class Worker:
    """How a rollout worker walks its shard of the stream: positions to run again first."""

    def __init__(self, writer: Any, slot: int, num_slots: int) -> None:
        self.writer, self.position, self.num_slots = writer, slot, num_slots
        self.again: list[int] = []
        self.open: list[Ticket] = []

    def reserve(self) -> Ticket | None:
        issued = self.writer.issued()
        if issued is None:
            return None
        self.again += self.writer.reissues()
        while self.position in issued and not self.again:
            self.position += self.num_slots
            issued = self.writer.issued() if not self.open else issued
        position = self.again[0] if self.again else self.position
        ticket: Ticket | None = self.writer.try_reserve(position)
        if ticket is None:
            return None
        if self.again:
            self.again.pop(0)
        else:
            self.position += self.num_slots
        self.open.append(ticket)
        return ticket


class RingMachine(RuleBasedStateMachine):
    """Random interleavings of everything that can happen, against what the rules promise."""

    make: Make

    @initialize(max_staleness=st.integers(0, 2), num_groups=st.integers(1, 3), num_slots=st.integers(1, 3))
    def start(self, max_staleness: int, num_groups: int, num_slots: int) -> None:
        self.max_staleness, self.num_groups = max_staleness, num_groups
        self.capacity = (max_staleness + 1) * num_groups
        self.num_slots = min(num_slots, self.capacity)
        self.store = type(self).make(self.capacity, max_staleness, self.num_slots)
        self.step = 0
        self.outstanding: dict[int, Ticket] = {}  # by position
        self.written: list[tuple[Ticket, int]] = []  # sealed on this branch, with the newest weights of its tokens
        self.consumed: dict[int, str] = {}
        self.filtered: list[Ticket] = []
        self.checkpoint: tuple[Any, WeightVersion | None, dict[int, str]] = (None, None, {})
        self.start_workers()

    def start_workers(self) -> None:
        self.store.reader.release(self.version)
        self.workers = [self.new_worker(slot) for slot in range(self.num_slots)]

    def new_worker(self, slot: int) -> Worker:
        return Worker(self.store.writer(slot), slot, self.num_slots)

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.store.epoch, self.step)

    def pick(self, data: st.DataObject, *, with_open: bool = False) -> Worker:
        workers = [w for w in self.workers if w.open or not with_open]
        return data.draw(st.sampled_from(workers))

    def has_open(self) -> bool:
        return any(worker.open for worker in self.workers)

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        worker = self.pick(data)
        ticket = worker.reserve()
        if ticket is not None:
            assert ticket.position not in self.consumed and ticket.position not in self.outstanding
            self.outstanding[ticket.position] = ticket
            self.store.flush(worker.writer)

    @precondition(has_open)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        worker = self.pick(data, with_open=True)
        ticket = worker.open.pop(data.draw(st.integers(0, len(worker.open) - 1)))
        newest = data.draw(st.integers(ticket.version.step, self.step))
        worker.writer.seal(ticket, group(ticket.position, [ticket.version.step, newest]))
        self.written.append((ticket, newest))
        self.store.flush(worker.writer)

    @precondition(has_open)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        worker = self.pick(data, with_open=True)
        ticket = worker.open.pop()
        worker.writer.drop(ticket, Drop.FILTERED)
        self.store.flush(worker.writer)
        del self.outstanding[ticket.position]
        assert ticket.position not in self.consumed
        self.consumed[ticket.position] = "filtered"
        self.filtered.append(ticket)

    @rule()
    def train(self) -> None:
        self.try_train()

    def try_train(self) -> bool:
        refs = self.store.reader.claim(self.num_groups, self.version)
        if refs is None:
            return False
        assert len(refs) == self.num_groups
        for ref in refs:
            assert 0 <= self.step - ref.version.step <= self.max_staleness
            assert self.store.reader.read(ref).position == ref.position
            assert ref.position not in self.consumed, "trained twice"
            self.consumed[ref.position] = "trained"
        self.step += 1
        self.store.reader.release(self.version)
        for ref in refs:
            assert self.outstanding.pop(ref.position).version == ref.version
        return True

    @rule()
    def save(self) -> None:
        state = self.store.reader.state_dict()
        self.checkpoint = (state, self.version, dict(self.consumed))
        self.store.reader.covered(state)

    @rule(data=st.data(), seal_unseen=st.booleans())
    def kill_worker(self, data: st.DataObject, seal_unseen: bool) -> None:
        slot = data.draw(st.integers(0, self.num_slots - 1))
        worker = self.workers[slot]
        if seal_unseen and isinstance(self.store, DiskStore):
            for ticket in worker.open:
                worker.writer.seal(ticket, group(ticket.position, [ticket.version.step]))
        self.store.kill(worker.writer)
        for ticket in worker.open:
            del self.outstanding[ticket.position]
        self.workers[slot] = self.new_worker(slot)

    @rule()
    def restart(self) -> None:
        for worker in self.workers:
            self.store.kill(worker.writer)
        state, parent, consumed = self.checkpoint
        self.step = parent.step if parent else 0
        self.store.restart(state, parent)
        self.consumed = dict(consumed)
        self.filtered = [t for t in self.filtered if t.version.step <= self.step]
        for ticket in self.filtered:
            self.consumed.setdefault(ticket.position, "filtered")
        self.written = [(ticket, newest) for ticket, newest in self.written if newest <= self.step]
        kept = (ticket for ticket, _ in self.written if ticket.position not in self.consumed)
        self.outstanding = {ticket.position: ticket for ticket in kept}
        self.start_workers()
        assert self.store.reader.stats()["sealed"] == len(self.outstanding)

    @invariant()
    def never_more_than_capacity(self) -> None:
        assert len(self.outstanding) <= self.capacity
        assert self.store.reader.stats()["fill"] <= 1

    @invariant()
    def nothing_becomes_too_old(self) -> None:
        assert self.store.reader.stats()["dropped_stale"] == 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.drain()
            self.store.close()

    def drain(self) -> None:
        """However it went, the run goes on: every position comes to be consumed."""
        last = max([0, *self.consumed, *(t.position for t in self.outstanding.values())])
        for _ in range(20 * (last + 10)):
            if all(position in self.consumed for position in range(last + 1)):
                return
            self.try_train()
            for worker in self.workers:
                while worker.reserve():
                    ticket = worker.open[-1]
                    self.outstanding[ticket.position] = ticket
                for ticket in worker.open:
                    worker.writer.seal(ticket, group(ticket.position, [ticket.version.step]))
                    self.written.append((ticket, ticket.version.step))
                worker.open.clear()
                self.store.flush(worker.writer)
        raise AssertionError(f"stuck: {self.store.reader.waiting_for()}")


class MemoryMachine(RingMachine):
    make = MemoryStore


class DiskMachine(RingMachine):
    make = DiskStore


TestRandomInMemory = MemoryMachine.TestCase
TestRandomInMemory.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestRandomOnDisk = DiskMachine.TestCase
TestRandomOnDisk.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
