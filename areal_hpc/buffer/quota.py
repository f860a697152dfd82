"""What ``buffer.max_mb`` allows: the ring never holds more, workers wait instead, and checkpoints come in time.

    held       bytes of all segments that lie there, as the trainer saw them last
    a ticket   is charged a group as long as groups can be, from when it may begin until its group is in ``held``
    limits     CONTROL tells each writer how many tickets may have begun; a limit only grows, so an old one is safe

    held + tickets that may begin or are in flight, charged     <= max_mb

Where a group takes less than it was charged, the rest is given to others as soon as the trainer has seen the group.
Three things may come on top of the quota: a group larger than any before (an agent's that branches, or one with records
of experts; from then on all are charged as much, but some are in flight); two small records for each prompt that a
writer drops, until the trainer knows; and what a worker of an earlier attempt writes that has not ended yet.

A segment is deleted once a checkpoint and the one before it cover it, so consumed groups stay on the disk from the last
checkpoint but one on. ``is_crowded`` asks for a checkpoint before these take too much. The room that unconsumed groups
leave is divided by three: for groups consumed since the newest checkpoint was begun, for those consumed between it and
the checkpoint before, and for those that will be consumed until a checkpoint that is being written is durable. As long
as a third holds one step's groups, nobody waits for room. With s = max_staleness and B groups a step that takes room
for (s + 1) B unconsumed groups, for at most s B consumed ones that stand behind an unconsumed one in their chain, for
3 B in the thirds, and a fifteenth more for the writers' open segments.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from areal_hpc.config.schema import BufferConfig
from areal_hpc.mount import MIB

OPEN_SHARE = 16
"""All open segments together are one part in so many of the quota: they cannot be deleted, whatever they hold."""
SMALL_BYTES = 1 << 10
"""Records around a group: its RESERVE, COMMITs, a SEAL. Of each writer some may come behind the group seen last."""


def segment_bytes(config: BufferConfig, num_writers: int) -> int:
    """Size at which a segment is sealed."""
    if config.max_mb is None:
        return int(config.segment_mb * MIB)
    return int(min(config.segment_mb, config.max_mb / (OPEN_SHARE * num_writers)) * MIB)


class Segment(NamedTuple):
    """One file of the ring."""

    chain: str
    num_bytes: int
    newest_ticket: int
    """The highest one that it, or a segment of its chain before it, speaks of."""
    is_open: bool


def kept(segments: Iterable[Segment], lows: Mapping[str, int]) -> list[Segment]:
    """What is left when all has been deleted that speaks only of tickets below its chain's low."""
    return [one for one in segments if one.is_open or one.newest_ticket >= lows.get(one.chain, 0)]


def size_of(segments: Iterable[Segment]) -> int:
    """In bytes."""
    return sum(one.num_bytes for one in segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One writer's tickets, as far as the trainer knows."""

    in_flight: int
    unused: int
    """Tickets that it may begin and has not begun."""
    wanted: int
    """Tickets that it could begin if there were bytes enough, the unused ones among them."""


def allowed(num_tickets: int, standings: Sequence[Standing]) -> list[int]:
    """How many tickets each writer may begin now: no fewer than before, and what is left to those with the fewest.

    Args:
        num_tickets: how many tickets of all writers may be in flight or about to begin.
    """
    tickets = [one.unused for one in standings]
    more = [max(0, one.wanted - one.unused) for one in standings]
    spare = max(0, num_tickets - sum(one.in_flight + one.unused for one in standings))
    if spare >= sum(more):
        return [unused + extra for unused, extra in zip(tickets, more, strict=True)]
    poorest = [(one.in_flight + one.unused, slot) for slot, one in enumerate(standings) if more[slot]]
    heapq.heapify(poorest)
    for _ in range(spare):
        has, slot = heapq.heappop(poorest)
        tickets[slot] += 1
        if tickets[slot] < standings[slot].wanted:
            heapq.heappush(poorest, (has + 1, slot))
    return tickets


class Quota:
    """The numbers of one ring.

    Args:
        max_bytes: what all segments may hold together.
        group_bytes: the largest group to expect, with all its records.
        capacity: tickets that may be outstanding.
        num_writers: of the run.
        groups_per_step: that a step consumes.
    """

    def __init__(
        self, *, max_bytes: int, group_bytes: int, capacity: int, num_writers: int, groups_per_step: int
    ) -> None:
        self.max_bytes, self._capacity, self._groups_per_step = max_bytes, capacity, groups_per_step
        self._small = num_writers * SMALL_BYTES
        self.charge = group_bytes
        self._largest = 0  # that was seen

    def saw(self, record_bytes: int) -> None:
        """A group has come, in a record of so many bytes."""
        self._largest = max(self._largest, record_bytes + SMALL_BYTES)
        self.charge = max(self.charge, self._largest)

    def num_tickets(self, held_bytes: int) -> int:
        """Tickets that may be in flight or about to begin beside what is held; below 0 where too much is held."""
        return (self.max_bytes - self._small - held_bytes) // self.charge

    def is_crowded(
        self, segments: Sequence[Segment], begun: Mapping[str, int], now: Mapping[str, int], groups: int
    ) -> bool:
        """Whether a checkpoint should begin before the next step: see above.

        Args:
            begun: of each chain, the low of the newest checkpoint that was begun.
            now: the same of one that would begin now.
            groups: that wait to be consumed.
        """
        needed = size_of(kept(segments, now))
        consumed = size_of(kept(segments, begun)) - needed
        not_yet = (self._capacity - groups) * self._largest
        step = self._groups_per_step * self._largest
        return consumed > 0 and 3 * (consumed + step) > self.max_bytes - self._small - needed - not_yet

    def least(self, held_bytes: int, groups: int) -> int:
        """Bytes of a quota under which ``groups`` more can come while ``held_bytes`` stay."""
        return self._small + held_bytes + max(1, groups) * self.charge
