"""RolloutWriter and RolloutReader under random interleavings of everything that can happen, on disk and in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from ring_machine import RingMachine, cases
from rollout_stores import DiskStore, MemoryStore, Worker, group

from areal_hpc.types import Drop, Ticket, WeightVersion


class StoreMachine(RingMachine):
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

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        worker = self.pick(data)
        ticket = worker.reserve()
        if ticket is not None:
            assert ticket.position not in self.consumed and ticket.position not in self.outstanding
            self.outstanding[ticket.position] = ticket
            self.store.flush(worker.writer)

    @precondition(RingMachine.has_open)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        worker, ticket = self.pop_open(data)
        newest = data.draw(st.integers(ticket.version.step, self.step))
        worker.writer.seal(ticket, group(ticket.position, [ticket.version.step, newest]))
        self.written.append((ticket, newest))
        self.store.flush(worker.writer)

    @precondition(RingMachine.has_open)
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
        refs = self.store.reader.claim(self.num_groups, self.version)
        if refs is None:
            return
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
        self.kill_workers()
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

    def drain(self) -> None:
        """However it went, the run goes on: every position comes to be consumed."""
        last = max([0, *self.consumed, *(t.position for t in self.outstanding.values())])

        def end(worker: Worker, ticket: Ticket) -> None:
            self.outstanding[ticket.position] = ticket
            worker.writer.seal(ticket, group(ticket.position, [ticket.version.step]))
            self.written.append((ticket, ticket.version.step))

        def is_done() -> bool:
            return all(position in self.consumed for position in range(last + 1))

        self.work_off(until=is_done, times=20 * (last + 10), end=end)


class MemoryMachine(StoreMachine):
    make = MemoryStore


class DiskMachine(StoreMachine):
    make = DiskStore


TestRandomInMemory = cases(MemoryMachine, max_examples=150, steps=60)
TestRandomOnDisk = cases(DiskMachine, max_examples=25, steps=40)
