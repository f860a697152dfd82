"""The ring in one process: the specification of what the one on disk does, and the laptop's implementation.

The same Ledger decides; the logs are lists, and what is written is seen at once. A restart is a new MemoryRing made
from the old one's logs and a checkpoint's state: the old ring's ends raise Fenced from then on.

    ring = MemoryRing(capacity=8, max_staleness=1, num_slots=2)
    ring.reader.release(WeightVersion(ring.epoch, 0))
    ticket = ring.writer(0).try_reserve(position=0)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal_hpc.buffer.chain import ChainName
from areal_hpc.buffer.epochs import ROOT, branch
from areal_hpc.buffer.ledger import Key, Ledger, share, unshard
from areal_hpc.buffer.order import FixedOrder
from areal_hpc.buffer.records import encode_group, group_ref, newest_weights
from areal_hpc.errors import ConfigError, Fenced
from areal_hpc.types import Drop, Dropped, GroupRef, Ticket, TrajectoryGroup, WeightVersion
from areal_hpc.watermark import Watermark

Event = Callable[[Ledger], None]


class MemoryRing:
    """All writers and the reader of one attempt.

    Args:
        order: the fixed order of deterministic training; None for the oldest first.
        before: the attempt before this one; None for the first.
        state, parent: the reader's state in the checkpoint that this attempt goes on from, and that checkpoint's
            version; None for a fresh start.
    """

    def __init__(
        self,
        capacity: int,
        max_staleness: int,
        num_slots: int = 1,
        *,
        order: FixedOrder | None = None,
        before: MemoryRing | None = None,
        state: Mapping[str, Any] | None = None,
        parent: WeightVersion | None = None,
    ) -> None:
        self.epoch: int = before.epoch + 1 if before else 1
        self.parents: dict[int, WeightVersion] = {**(before.parents if before else {}), self.epoch: parent or ROOT}
        self.logs: dict[str, list[Event]] = dict(before.logs) if before else {}
        self.groups: dict[Key, TrajectoryGroup] = before.groups if before else {}
        self.version = WeightVersion(self.epoch, -1)
        self.fenced = False
        self.live: dict[int, str] = {}
        self.ledger = Ledger(capacity, max_staleness, num_slots, branch(self.epoch, self.parents), order)
        if before is not None:
            before.fenced = True
        if state is not None:
            self.ledger.load_state_dict(state)
        for chain, events in self.logs.items():
            for event in events:
                event(self.ledger)
            self.ledger.retired(chain, 0)
        self.done = self.ledger.begin(parent.step if parent else 0)
        self.reader = MemoryReader(self)

    def writer(self, slot: int) -> MemoryWriter:
        """A new writer for ``slot``; the one before it, if any, is taken for dead."""
        capacity, num_slots = self.ledger.capacity, self.ledger.num_slots
        if share(capacity, slot, num_slots) < 1:
            raise ConfigError(f"{num_slots} writers share {capacity} tickets: lower rollout.workers to {capacity}")
        self.retire(slot)
        chain = str(ChainName.new(slot, self.epoch, 0))
        self.live[slot] = chain
        self.logs[chain] = []
        return MemoryWriter(self, slot, chain)

    def write(self, chain: str, event: Event) -> None:
        """Append to a log; what a writer that was replaced appends is seen only by the next attempt."""
        self.logs[chain].append(event)
        if chain in self.live.values():
            event(self.ledger)

    def retire(self, slot: int) -> None:
        chain = self.live.pop(slot, None)
        if chain is not None:
            self.ledger.retired(chain, slot)

    def check_fence(self) -> None:
        if self.fenced:
            raise Fenced(f"attempt {self.epoch} was replaced; this process must stop")


class MemoryWriter:
    """See RolloutWriter."""

    def __init__(self, ring: MemoryRing, slot: int, chain: str) -> None:
        self._ring, self._slot, self.chain = ring, slot, chain
        self._share = share(ring.ledger.capacity, slot, ring.ledger.num_slots)
        self._reserved = self._dropped = self._serial = 0
        self._open: set[int] = set()

    @property
    def version(self) -> WeightVersion:
        self._ring.check_fence()
        return self._ring.version

    def try_reserve(self, position: int, oldest: int | None = None) -> Ticket | None:
        self._ring.check_fence()
        if not self._followed or not self._has_room(position):
            return None
        version = self._ring.version.no_newer_than(oldest)
        ticket = Ticket(chain=self.chain, number=self._reserved, position=position, version=version)
        self._reserved += 1
        self._open.add(ticket.number)
        self._ring.write(self.chain, lambda ledger: ledger.reserved(ticket))
        return ticket

    def _has_room(self, position: int) -> bool:
        ledger = self._ring.ledger
        if ledger.order is not None:
            return ledger.order.admits(position, self._ring.version)
        outstanding = self._reserved - self._dropped - ledger.freed[self.chain] + ledger.carried(self._slot)
        return outstanding < self._share

    def lacks(self) -> tuple[str, str]:
        return "a free ticket", ""

    def seal(self, ticket: Ticket, group: TrajectoryGroup) -> None:
        assert group.position == ticket.position, (group.position, ticket)
        if self._ring.ledger.order is not None:
            self._ring.ledger.order.check(group)
        self._finish(ticket)
        self._ring.groups[Key(ticket.chain, ticket.number)] = group
        meta = {**encode_group(group)[0], "ticket": ticket.number, "version": ticket.version}
        ref = group_ref(self.chain, meta)
        newest = newest_weights(self._ring.epoch, meta)
        self._ring.write(self.chain, lambda ledger: ledger.sealed(ref, newest))

    def drop(self, ticket: Ticket, reason: Drop) -> None:
        self._finish(ticket)
        self._dropped += 1
        self._ring.write(self.chain, lambda ledger: ledger.dropped(Key(ticket.chain, ticket.number), reason))

    def reissues(self) -> list[int]:
        self._ring.check_fence()
        ledger = self._ring.ledger
        mine = [(s, p) for p, s in ledger.reissues.items() if p % ledger.num_slots == self._slot and s > self._serial]
        if not self._followed or not mine:
            return []
        self._serial = max(mine)[0]
        return [position for _, position in sorted(mine)]

    def issued(self) -> Watermark | None:
        self._ring.check_fence()
        ledger = self._ring.ledger
        return unshard(ledger.issued[self._slot], self._slot, ledger.num_slots) if self._followed else None

    def close(self) -> None:
        if self._followed:
            self._ring.retire(self._slot)

    @property
    def _followed(self) -> bool:
        """Whether the trainer has begun, and nobody has taken this writer's place."""
        return self._ring.version.step >= 0 and self._ring.live.get(self._slot) == self.chain

    def _finish(self, ticket: Ticket) -> None:
        self._ring.check_fence()
        assert ticket.chain == self.chain and ticket.number in self._open, f"{ticket} is not open here"
        self._open.remove(ticket.number)


class MemoryReader:
    """See RolloutReader."""

    def __init__(self, ring: MemoryRing) -> None:
        self._ring, self._ledger = ring, ring.ledger

    def claim(self, num_groups: int, version: WeightVersion) -> list[GroupRef] | None:
        self._ring.check_fence()
        return self._ledger.claim(num_groups, version)

    def read(self, ref: GroupRef) -> TrajectoryGroup:
        return self._ring.groups[Key(ref.chain, ref.ticket)]

    def may_publish(self, version: WeightVersion) -> bool:
        self._ring.check_fence()
        return self._ledger.may_publish(version)

    def discard(self, ref: GroupRef, reason: Drop) -> None:
        self._ledger.discard(ref, reason)

    def take_dropped(self) -> list[Dropped]:
        return self._ledger.take_dropped()

    def release(self, version: WeightVersion) -> None:
        self._ring.check_fence()
        self._ledger.release()
        self._ring.version = version

    def covered(self, state: Mapping[str, Any]) -> None:
        """Nothing lies on a disk, so nothing is deleted."""
        self._ring.check_fence()

    def waiting_for(self) -> str:
        return self._ledger.waiting_for()

    def state_dict(self) -> dict[str, Any]:
        return self._ledger.state_dict()

    def stats(self) -> Mapping[str, float]:
        return self._ledger.stats()
