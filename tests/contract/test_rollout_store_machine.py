"""RolloutWriter and RolloutReader under random interleavings of everything that can happen, on disk and in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_stores import DiskStore, MemoryStore, Worker, group

from areal_hpc.types import Drop, Ticket, WeightVersion


class RingMachine(RuleBasedStateMachine):
    """Random interleavings of everything that can happen, against what the rules promise."""

    make: Callable[[int, int, int], Any]

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
