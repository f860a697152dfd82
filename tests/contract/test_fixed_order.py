"""The ring in the fixed order of deterministic training: the same cases on disk and in memory.

What a step is trained on must follow from its number alone, whatever is killed, lost, or taken back on the way.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize, precondition, rule
from ring_machine import RingMachine, cases
from rollout_stores import DiskStore, MemoryStore, Worker, group

from areal_hpc.buffer.order import FixedOrder
from areal_hpc.errors import CorruptRecord, GenerationError, RunDirError
from areal_hpc.types import Drop, GroupRef, Ticket, WeightVersion

ORDER = FixedOrder(groups_per_step=2, max_staleness=1)
Make = Callable[..., Any]


@pytest.fixture(params=[MemoryStore, DiskStore])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    stores = []

    def make_store(order: FixedOrder = ORDER, num_slots: int = 1) -> Any:
        stores.append(new_store(request.param, order, num_slots))
        return stores[-1]

    yield make_store
    for store in stores:
        store.close()


def new_store(kind: Callable[..., Any], order: FixedOrder, num_slots: int) -> Any:
    return kind((order.max_staleness + 1) * order.groups_per_step, order.max_staleness, num_slots, order)


def begin(store: Any, step: int = 0, num_slots: int = 1) -> list[Any]:
    """Writers that the reader follows, under published weights of ``step``."""
    version = WeightVersion(store.epoch, step)
    assert store.reader.may_publish(version)
    store.reader.release(version)
    writers = [store.writer(slot) for slot in range(num_slots)]
    store.reader.may_publish(version)  # looks for new writers
    return writers


def produce(store: Any, writer: Any, *positions: int) -> None:
    for position in positions:
        ticket = writer.try_reserve(position)
        assert ticket is not None
        writer.seal(ticket, group(position, [ticket.version.step]))
    store.flush(writer)


def positions_of(refs: list[GroupRef] | None) -> list[int] | None:
    return None if refs is None else [ref.position for ref in refs]


def test_a_position_waits_for_its_weights_and_weights_wait_for_their_positions(make: Make) -> None:
    """Two groups a step, bound 1: version 0 samples positions 0 to 3, then each version two more."""
    store = make()
    (writer,) = begin(store)
    first, second = WeightVersion(store.epoch, 0), WeightVersion(store.epoch, 1)
    produce(store, writer, 3, 1, 0)
    assert writer.try_reserve(4) is None
    assert positions_of(store.reader.claim(2, first)) == [0, 1]
    assert not store.reader.may_publish(second)
    assert store.reader.waiting_for() == (
        "of the positions below 4, 1 are neither sealed nor dropped, the first is 2; 0 of them are in flight; "
        "they are for writers [0]"
    )
    produce(store, writer, 2)
    assert writer.try_reserve(4) is None
    assert store.reader.may_publish(second)
    store.reader.release(second)
    assert positions_of(store.reader.claim(2, second)) == [2, 3]
    produce(store, writer, 5, 4)
    assert writer.try_reserve(6) is None


def test_what_is_not_durable_is_not_settled() -> None:
    store = new_store(DiskStore, ORDER, 1)
    (writer,) = begin(store)
    produce(store, writer, 0, 1, 2)
    last = writer.try_reserve(3)
    writer.seal(last, group(3, [0]))
    assert not store.reader.may_publish(WeightVersion(store.epoch, 1))
    store.flush(writer)
    assert store.reader.may_publish(WeightVersion(store.epoch, 1))
    store.close()


def test_a_dropped_position_is_not_replaced_and_a_step_may_be_empty(make: Make) -> None:
    store = make()
    (writer,) = begin(store)
    produce(store, writer, 1)
    for position, reason in ((0, Drop.FILTERED), (2, Drop.FAILED), (3, Drop.FILTERED)):
        writer.drop(writer.try_reserve(position), reason)
    store.flush(writer)
    for step, expected in ((0, [1]), (1, [])):
        version = WeightVersion(store.epoch, step)
        assert positions_of(store.reader.claim(2, version)) == expected
        if step == 1:
            produce(store, writer, 4, 5)
        assert store.reader.may_publish(WeightVersion(store.epoch, step + 1))
        store.reader.release(WeightVersion(store.epoch, step + 1))
    assert positions_of(store.reader.claim(2, WeightVersion(store.epoch, 2))) == [4, 5]


def test_shares_do_not_hold_up_a_writer_whose_positions_fall_together(make: Make) -> None:
    """Capacity 4 in three shares is 2, 1, 1, but of positions 2 to 5 two belong to writer 2."""
    store = make(num_slots=3)
    writers = begin(store, num_slots=3)
    for position in range(4):
        produce(store, writers[position % 3], position)
    assert positions_of(store.reader.claim(2, WeightVersion(store.epoch, 0))) == [0, 1]
    assert store.reader.may_publish(WeightVersion(store.epoch, 1))
    store.reader.release(WeightVersion(store.epoch, 1))
    produce(store, writers[2], 5)  # 2 waits to be trained on
    produce(store, writers[1], 4)
    assert store.reader.may_publish(WeightVersion(store.epoch, 2))


def test_tokens_of_other_weights_are_refused(make: Make) -> None:
    store = make()
    (writer,) = begin(store)
    ticket = writer.try_reserve(0)
    with pytest.raises(GenerationError, match="position 0 must be sampled by weights of version 0"):
        writer.seal(ticket, group(0, [0, 1]))
    writer.seal(ticket, group(0, [0, 0]))


def test_a_damaged_group_ends_the_run_with_what_to_do(make: Make) -> None:
    store = make()
    (writer,) = begin(store)
    produce(store, writer, 0, 1)
    refs = store.reader.claim(2, WeightVersion(store.epoch, 0))
    with pytest.raises(CorruptRecord, match=r"position 1 in 00000\..* from step 0 on out of checkpoints/ and resume"):
        store.reader.discard(refs[1], Drop.CORRUPT)


def test_a_restart_without_the_groups_that_its_weights_rely_on_is_refused() -> None:
    store = new_store(DiskStore, ORDER, 1)
    (writer,) = begin(store)
    produce(store, writer, 0, 1, 2, 3)
    store.reader.claim(2, WeightVersion(store.epoch, 0))
    parent = WeightVersion(store.epoch, 1)
    store.reader.release(parent)
    state = store.reader.state_dict()
    store.kill(writer)
    shutil.rmtree(Path(store.run.ring) / "chains" / writer.chain)
    with pytest.raises(
        RunDirError, match=r"lost 2 groups that weights before step 1 sampled.* position 2;.* step 1 on"
    ):
        store.restart(state, parent)
    store.close()


class OrderMachine(RingMachine):
    """Random interleavings of work, loss and kills; every step must be trained on exactly what its number says."""

    kind: Callable[..., Any]

    @initialize(order=st.builds(FixedOrder, groups_per_step=st.integers(1, 3), max_staleness=st.integers(0, 2)),
                num_slots=st.integers(1, 3), every=st.integers(2, 5))  # fmt: skip
    def start(self, order: FixedOrder, num_slots: int, every: int) -> None:
        self.order, self.every = order, every
        self.num_slots = min(num_slots, (order.max_staleness + 1) * order.groups_per_step)
        self.store = new_store(type(self).kind, order, self.num_slots)
        self.step, self.claimed, self.furthest = 0, False, 0
        self.checkpoints: list[tuple[Mapping[str, Any] | None, WeightVersion | None]] = [(None, None)]
        self.start_workers()

    def is_dropped(self, position: int) -> bool:
        """A filter's judgement: it follows from the group, which follows from its position."""
        return position % self.every == 0

    def start_workers(self) -> None:
        assert self.store.reader.may_publish(self.version), "an attempt begins without a wait"
        self.store.reader.release(self.version)
        self.workers = [self.new_worker(slot) for slot in range(self.num_slots)]

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        ticket = self.pick(data).reserve()
        assert ticket is None or ticket.version.step == self.step

    @precondition(RingMachine.has_open)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end(*self.pop_open(data))

    def end(self, worker: Worker, ticket: Ticket) -> None:
        """Not yet durable: a kill may take it."""
        if self.is_dropped(ticket.position):
            worker.writer.drop(ticket, Drop.FILTERED)
        else:
            worker.writer.seal(ticket, group(ticket.position, [ticket.version.step]))

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.store.flush(self.pick(data).writer)

    @rule()
    def train(self) -> None:
        """A step in its two halves: a kill may fall between the claim and the publication."""
        if not self.claimed:
            refs = self.store.reader.claim(self.order.groups_per_step, self.version)
            if refs is None:
                return
            self.claimed = True
            first, last = self.step * self.order.groups_per_step, (self.step + 1) * self.order.groups_per_step
            assert [ref.position for ref in refs] == [p for p in range(first, last) if not self.is_dropped(p)]
            for ref in refs:
                sampled_by = max(0, self.step - self.order.max_staleness)
                assert ref.version.step == sampled_by
                assert {int(v) for t in self.store.reader.read(ref).trajectories for v in t.versions} == {
                    -1,
                    sampled_by,
                }
        elif self.store.reader.may_publish(WeightVersion(self.store.epoch, self.step + 1)):
            self.step, self.claimed = self.step + 1, False
            self.furthest = max(self.furthest, self.step)
            self.store.reader.release(self.version)

    @precondition(lambda self: not self.claimed)
    @rule()
    def save(self) -> None:
        state = self.store.reader.state_dict()
        self.checkpoints = [self.checkpoints[-1], (state, self.version)]
        self.store.reader.covered(state)

    @rule(data=st.data())
    def kill_worker(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, self.num_slots - 1))
        self.store.kill(self.workers[slot].writer)
        self.workers[slot] = self.new_worker(slot)

    @rule(newest_is_damaged=st.booleans())
    def restart(self, newest_is_damaged: bool) -> None:
        self.kill_workers()
        state, parent = self.checkpoints[0 if newest_is_damaged else -1]
        self.checkpoints = [(state, parent)]
        self.step, self.claimed = parent.step if parent else 0, False
        self.store.restart(state, parent)
        self.start_workers()

    def drain(self) -> None:
        """However it went, the run goes on to steps that nobody has seen."""
        last = self.furthest + 2
        self.work_off(until=lambda: self.step >= last, times=20 * (last + 10), end=self.end)


class MemoryMachine(OrderMachine):
    kind = MemoryStore


class DiskMachine(OrderMachine):
    kind = DiskStore


TestRandomInMemory = cases(MemoryMachine, max_examples=100, steps=60)
TestRandomOnDisk = cases(DiskMachine, max_examples=20, steps=40)
