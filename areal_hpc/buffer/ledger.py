"""What the trainer knows of every ticket: pure bookkeeping, no files, no clock. The rules of the ring are here.

    reserved --sealed--> waiting --claim--> claimed --release--> consumed
        |                   |                  |
        +--dropped----------+--expired---------+--discarded--->  consumed (filtered, failed) or issued again

Staleness. With n groups a step and a bound of eta steps, at most (eta + 1) n tickets are outstanding. A group whose
ticket is of version v may be claimed up to version v + eta. ``claim`` takes the oldest, and waits when going on would
leave more old tickets than the steps before their end can take: of the tickets that end with k more steps, k n may
stay. That is earliest-deadline-first; since at most (k + 1) n of them were there before the step, the oldest n always
satisfy it once they are sealed, so the wait ends and no ticket ever ends unclaimed. A slow episode is waited for
instead of being thrown away, so long answers are not filtered out.

With a ``FixedOrder`` a claim takes exactly the positions of its step instead, in their order, once all are settled;
some may have been dropped, and no others take their place.

Exactly once. A position counts as consumed when its group is released or it is dropped for good, and is then refused
for ever. Everything a checkpoint needs is in ``state_dict``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from areal_hpc.buffer.order import FixedOrder
from areal_hpc.errors import CorruptRecord, RunDirError
from areal_hpc.types import Drop, Dropped, GroupRef, Ticket, WeightVersion
from areal_hpc.watermark import Watermark


class Key(NamedTuple):
    """A ticket's name in the run."""

    chain: str
    number: int


def share(capacity: int, slot: int, num_slots: int) -> int:
    """How many tickets writer ``slot`` may have outstanding; the shares of all writers sum to ``capacity``."""
    return capacity // num_slots + (slot < capacity % num_slots)


def shard(positions: Watermark, slot: int, num_slots: int) -> Watermark:
    """The positions of writer ``slot`` (those that are ``slot`` modulo ``num_slots``) as 0, 1, 2, ..."""
    low = (positions.low - slot + num_slots - 1) // num_slots
    return Watermark(max(0, low), (p // num_slots for p in positions.above if p % num_slots == slot))


def unshard(local: Watermark, slot: int, num_slots: int) -> Watermark:
    """The inverse of ``shard``, as far as this writer's positions go; others below the watermark count as in."""
    return Watermark(local.low * num_slots + slot, (n * num_slots + slot for n in local.above))


def _age(ticket: Ticket | GroupRef) -> tuple[int, int]:
    """Sorts oldest first."""
    return (ticket.version.step, ticket.position)


class Ledger:
    """Fed by the logs (``reserved``, ``sealed``, ``dropped``, ``retired``), asked by the trainer (the rest).

    ``survives`` tells whether weights are on the branch that this attempt continues. An attempt begins with
    ``load_state_dict``, the logs of all attempts before it, and ``begin``.
    """

    def __init__(
        self,
        capacity: int,
        max_staleness: int,
        num_slots: int,
        survives: Callable[[WeightVersion], bool],
        order: FixedOrder | None = None,
    ) -> None:
        self.capacity, self.max_staleness, self.num_slots = capacity, max_staleness, num_slots
        self._survives = survives
        self.order = order
        self.in_flight: dict[Key, Ticket] = {}
        self.waiting: dict[Key, GroupRef] = {}
        self.claimed: dict[Key, GroupRef] = {}
        self.consumed = Watermark()
        self.finished: dict[str, Watermark] = {}
        """For each chain the ticket numbers that nothing more happens to."""
        self.drops = Counter[Drop]()
        self.duplicates = 0
        self.freed = Counter[str]()
        """For each chain the tickets that the trainer, not the writer, has finished."""
        self.reissues: dict[int, int] = {}
        """Positions to run again, with a serial number that says which are new to a writer."""
        self.issued = [Watermark() for _ in range(num_slots)]
        """For each writer the positions of its shard (see ``shard``) that its stream need not come to any more."""
        self._staleness: list[int] = []  # of the groups claimed last, in steps
        self._asked: tuple[int, WeightVersion] | None = None  # by the last claim
        self._awaited = range(0)  # the positions that the last question was about, in a fixed order
        self._carried: dict[Key, int] = {}  # groups of chains that have ended -> the writer whose share they take up
        self._held: set[int] = set()  # positions waiting or claimed
        self._serial = 0
        self._dropped: list[Dropped] = []  # not yet told

    # What the logs say

    def reserved(self, ticket: Ticket) -> None:
        key = Key(ticket.chain, ticket.number)
        if self._is_finished(key):
            return
        self.in_flight[key] = ticket
        self.reissues.pop(ticket.position, None)
        self._issue(ticket.position)

    def sealed(self, ref: GroupRef, newest: WeightVersion) -> None:
        """``newest``: the newest weights that sampled any of its tokens; they may be newer than the ticket."""
        key = Key(ref.chain, ref.ticket)
        if self._is_finished(key):
            return
        self.in_flight.pop(key, None)
        if ref.position in self.consumed or ref.position in self._held:
            self.duplicates += 1
            self._finish(key)
            return
        self.waiting[key] = ref
        self._held.add(ref.position)
        self.reissues.pop(ref.position, None)
        self._issue(ref.position)
        if not self._survives(newest):
            self.discard(ref, Drop.NEWER)

    def dropped(self, key: Key, reason: Drop) -> None:
        """The writer gave a ticket back, and has counted the slot as free already."""
        ticket = self.in_flight.pop(key, None)
        if ticket is not None:
            self._finish(key, by_writer=True)
            self._account(key, ticket.position, reason if self._survives(ticket.version) else Drop.NEWER)

    def retired(self, chain: str, slot: int) -> None:
        """No more records come from ``chain``: what it had in flight is run again, and what it sealed counts against
        the share of ``slot``."""
        for key in [key for key in self.in_flight if key.chain == chain]:
            position = self.in_flight.pop(key).position
            self._finish(key)
            self._account(key, position, Drop.ABANDONED)
        self._carried.update((key, slot) for key in (*self.waiting, *self.claimed) if key.chain == chain)
        self.freed.pop(chain, None)

    def begin(self, step: int = 0) -> Watermark:
        """All attempts before this one are read. The positions that need no new episode; the others are new again.

        Args:
            step: optimizer steps behind the weights that the attempt goes on from.

        Raises:
            RunDirError: in a fixed order, groups are missing whose weights are gone.
        """
        self.reissues.clear()
        if self.order is not None and (lost := self._unsettled(range(self.order.num_before(step)))):
            raise RunDirError(
                f"the ring has lost {len(lost)} groups that weights before step {step} sampled, first the one at "
                f"position {lost[0]}; deterministic training cannot make them again. Restore the run's ring/, or move "
                f"the checkpoints from step {self.order.version_of(lost[0]) + 1} on out of checkpoints/"
            )
        done = self.consumed.copy()
        room = [share(self.capacity, slot, self.num_slots) for slot in range(self.num_slots)]
        for key, ref in sorted(self.waiting.items(), key=lambda item: _age(item[1])):
            done.add(ref.position)
            slot = room.index(max(room))
            self._carried[key] = slot
            room[slot] -= 1
        self.issued = [shard(done, slot, self.num_slots) for slot in range(self.num_slots)]
        return done

    # What the trainer does

    def claim(self, num_groups: int, version: WeightVersion) -> list[GroupRef] | None:
        """The oldest ``num_groups`` waiting groups, or None while they are not there or older ones must come first.

        In a fixed order: the groups of this step that were not dropped, perhaps none; None while some are not settled.
        """
        self._asked = (num_groups, version)
        if self.order is not None:
            assert num_groups == self.order.groups_per_step, (num_groups, self.order)
            chosen = self._of(self.order.positions_of(version.step))
        else:
            chosen = self._oldest_in_time(num_groups, version.step)
        if chosen is None:
            return None
        for ref in chosen:
            key = Key(ref.chain, ref.ticket)
            self.claimed[key] = self.waiting.pop(key)
        self._staleness = [version.step - ref.version.step for ref in chosen]
        return chosen

    def may_publish(self, version: WeightVersion) -> bool:
        """Whether no episode needs older weights than ``version`` any more; always true without a fixed order."""
        if self.order is None:
            return True
        self._awaited = range(self.order.num_before(version.step))
        return not self._unsettled(self._awaited)

    def discard(self, ref: GroupRef, reason: Drop) -> None:
        """Take a waiting or claimed group out of the ring without training on it.

        Raises:
            CorruptRecord: in a fixed order, for a damaged one: the weights to make it again are gone.
        """
        if self.order is not None and reason is Drop.CORRUPT:
            version = self.order.version_of(ref.position)
            raise CorruptRecord(
                f"the group at position {ref.position} in {ref.chain} is damaged, and deterministic training cannot "
                f"leave it out. Move the checkpoints from step {version} on out of checkpoints/ and resume, so that it "
                "is made again; if that leaves none, begin again under another `name`"
            )
        key = Key(ref.chain, ref.ticket)
        where = self.claimed if key in self.claimed else self.waiting
        assert key in where, f"{key} is not in the ring"
        del where[key]
        self._held.discard(ref.position)
        self._finish(key)
        self._account(key, ref.position, reason)

    def release(self) -> None:
        """The claimed groups are in the published weights; their slots are free."""
        for key, ref in self.claimed.items():
            self.consumed.add(ref.position)
            self._held.discard(ref.position)
            self._finish(key)
        self.claimed.clear()

    def carried(self, slot: int) -> int:
        """How much of writer ``slot``'s share is taken up by groups of writers that have ended."""
        return sum(owner == slot for owner in self._carried.values())

    def ended(self, chain: str) -> int:
        """Tickets of ``chain`` whose slots are free again. Those that its writer dropped are left out, since the writer
        counts them itself; in a fixed order, where no other ticket takes their place, they are counted here."""
        return self.freed[chain] if self.order is None else len(self.finished.get(chain, ()))

    def limit(self, chain: str, slot: int) -> int:
        """How many tickets of ``chain`` may have begun, counted like these; in a fixed order positions allow fewer."""
        whole = share(self.capacity, slot, self.num_slots) - self.carried(slot)
        return self.ended(chain) + (whole if self.order is None else self.capacity)

    def tickets(self) -> tuple[Counter[str], Counter[str]]:
        """For each chain those in flight, and those whose group is in the ring."""
        in_ring = Counter(key.chain for key in (*self.waiting, *self.claimed))
        return Counter(key.chain for key in self.in_flight), in_ring

    def admitted(self, version: WeightVersion) -> Counter[int]:
        """In a fixed order, for each writer the positions that ``version`` lets begin and that have not."""
        assert self.order is not None
        begun = {ticket.position for ticket in self.in_flight.values()}
        missing = self._unsettled(range(self.order.num_before(version.step + 1)))
        return Counter(position % self.num_slots for position in missing if position not in begun)

    def missing(self) -> int:
        """Groups for lack of which the last claim, or the last ``may_publish``, had no answer."""
        if self.order is not None:
            return len(self._unsettled(self._awaited))
        return 0 if self._asked is None else max(0, self._asked[0] - len(self.waiting))

    # What it tells

    def take_dropped(self) -> list[Dropped]:
        """What was dropped since the last call, in order."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def waiting_for(self) -> str:
        """A sentence on why the last claim had no answer, or newer weights may not be published."""
        if self.order is not None:
            return self._waiting_in_order()
        if self._asked is None:
            return "nothing: no group was asked for yet"
        num_groups, version = self._asked
        text = f"{len(self.waiting)} of {num_groups} groups are sealed, {len(self.in_flight)} are in flight"
        if self.in_flight:
            oldest = min(ticket.version.step for ticket in self.in_flight.values())
            text += f", the oldest {version.step - oldest} versions behind"
        bound = self._must_wait_for(self._oldest(num_groups), num_groups, version.step)
        if bound is not None:
            late = [t for t in self.in_flight.values() if t.version.step <= bound]
            writers = sorted({int(t.chain.split(".")[0]) for t in late})
            text += (
                f"; waiting for tickets of version {bound} or older, which would become too old, of writers {writers}"
            )
        if self.drops:
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(self.drops.items()))
            text += f"; dropped so far: {counts}"
        return text

    def stats(self) -> dict[str, float]:
        outstanding = len(self.in_flight) + len(self.waiting) + len(self.claimed)
        stats: dict[str, float] = {
            "fill": outstanding / self.capacity,
            "sealed": len(self.waiting),
            "in_flight": len(self.in_flight),
            "claimed": len(self.claimed),
            "duplicates": self.duplicates,
            **{f"dropped_{reason.value}": self.drops[reason] for reason in Drop},
        }
        if self._staleness:
            stats["staleness_min"] = min(self._staleness)
            stats["staleness_mean"] = sum(self._staleness) / len(self._staleness)
            stats["staleness_max"] = max(self._staleness)
        return stats

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: everything that was finished when it was made."""
        return {
            "consumed": self.consumed.state_dict(),
            "finished": {chain: numbers.state_dict() for chain, numbers in self.finished.items()},
            "drops": {reason.value: count for reason, count in self.drops.items()},
            "duplicates": self.duplicates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.consumed = Watermark.from_state(state["consumed"])
        self.finished = {chain: Watermark.from_state(numbers) for chain, numbers in state["finished"].items()}
        self.drops = Counter({Drop(reason): int(count) for reason, count in state["drops"].items()})
        self.duplicates = int(state["duplicates"])

    # How

    def _of(self, positions: range) -> list[GroupRef] | None:
        """The waiting groups at ``positions``, in their order, once every one of them is settled."""
        self._awaited = positions
        if self._unsettled(positions):
            return None
        return sorted((ref for ref in self.waiting.values() if ref.position in positions), key=lambda ref: ref.position)

    def _unsettled(self, positions: range) -> list[int]:
        """The ``positions`` that are neither in the ring nor consumed."""
        new = range(max(positions.start, self.consumed.low), positions.stop)
        return [p for p in new if p not in self.consumed and p not in self._held]

    def _waiting_in_order(self) -> str:
        missing = self._unsettled(self._awaited)
        if not missing:
            return "nothing: every position that was asked for is settled"
        begun = {ticket.position for ticket in self.in_flight.values()}.intersection(missing)
        writers = sorted({position % self.num_slots for position in missing})
        return (
            f"of the positions below {self._awaited.stop}, {len(missing)} are neither sealed nor dropped, the first is "
            f"{missing[0]}; {len(begun)} of them are in flight; they are for writers {writers}"
        )

    def _oldest_in_time(self, num_groups: int, step: int) -> list[GroupRef] | None:
        oldest = step - self.max_staleness
        for ref in [ref for ref in self.waiting.values() if ref.version.step < oldest]:
            self.discard(ref, Drop.STALE)
        chosen = self._oldest(num_groups)
        if len(chosen) < num_groups or self._must_wait_for(chosen, num_groups, step) is not None:
            return None
        return chosen

    def _oldest(self, num_groups: int) -> list[GroupRef]:
        return sorted(self.waiting.values(), key=_age)[:num_groups]

    def _must_wait_for(self, chosen: list[GroupRef], num_groups: int, step: int) -> int | None:
        """The ticket version, in steps, up to which more must be sealed before ``chosen`` may be taken, or None.

        For each number of steps that are left after this one: of the tickets that end by then, no more may stay than
        those steps can take. Tickets that have ended already (seen late) are not waited for.
        """
        oldest = step - self.max_staleness
        steps = [t.version.step for t in self.waiting.values()] + [t.version.step for t in self.in_flight.values()]
        for steps_left in range(self.max_staleness + 1):
            newest = oldest + steps_left
            due = sum(oldest <= reserved_at <= newest for reserved_at in steps)
            taken = sum(ref.version.step <= newest for ref in chosen)
            if taken < min(num_groups, due - steps_left * num_groups):
                return newest
        return None

    def _account(self, key: Key, position: int, reason: Drop) -> None:
        self.drops[reason] += 1
        consumed = not reason.reissues() and position not in self._held and self.consumed.add(position)
        if reason.reissues():
            self._reissue(position)
        self._dropped.append(
            Dropped(chain=key.chain, ticket=key.number, position=position, reason=reason, consumed=consumed)
        )

    def _reissue(self, position: int) -> None:
        if position not in self.consumed and position not in self._held:
            self._serial += 1
            self.reissues[position] = self._serial

    def _issue(self, position: int) -> None:
        self.issued[position % self.num_slots].add(position // self.num_slots)

    def _is_finished(self, key: Key) -> bool:
        return key.chain in self.finished and key.number in self.finished[key.chain]

    def _finish(self, key: Key, *, by_writer: bool = False) -> None:
        self.finished.setdefault(key.chain, Watermark()).add(key.number)
        if self._carried.pop(key, None) is None and not by_writer:
            self.freed[key.chain] += 1
