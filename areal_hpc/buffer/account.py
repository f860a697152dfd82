"""How many tickets each writer may have begun: by the rules of the ledger, and by the bytes that the ring may hold.

The trainer's; ``quota`` has the arithmetic. Without a quota the ledger alone decides, and nothing here costs anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from areal_hpc.buffer.ledger import Ledger
from areal_hpc.buffer.quota import Quota, Segment, Standing, allowed, kept, size_of
from areal_hpc.buffer.scan import ChainReader
from areal_hpc.mount import MIB
from areal_hpc.types import WeightVersion

ENDED = "workers that have ended"


class Limit(NamedTuple):
    """What CONTROL tells one writer."""

    num_tickets: int
    """How many tickets of its chain may have begun by now, as ``Ledger.ended`` counts them."""
    short: bool
    """Whether it would be more, had the ring room for more bytes."""


class Shortage(NamedTuple):
    """Why no group can come any more for lack of bytes, even when all is deleted that may be."""

    text: str
    """Who holds what, and what is missing."""
    least_mb: float
    """What the quota would have to be for the groups that are missing, in MiB."""


class Account:
    """The tickets and bytes of all writers.

    Args:
        live: by slot, the chain that its writer adds to.
        retired: chains with files that nobody writes any more.
    """

    def __init__(
        self, ledger: Ledger, quota: Quota | None, live: Mapping[int, ChainReader], retired: Sequence[ChainReader]
    ) -> None:
        self._ledger, self._quota, self._live, self._retired = ledger, quota, live, retired
        self._given: dict[str, int] = {}  # chain -> the highest limit that was told, or may have been

    def saw(self, record_bytes: int) -> None:
        """A group has come, in a record of so many bytes."""
        if self._quota is not None:
            self._quota.saw(record_bytes)

    def retired(self, chain: str) -> None:
        """Nobody begins tickets of ``chain`` any more."""
        self._given.pop(chain, None)

    def held_bytes(self) -> int:
        """What lies in all segments, as they were looked at last."""
        return size_of(self._segments())

    def stats(self) -> dict[str, float]:
        """``bytes`` that are held, and ``max_bytes`` under a quota."""
        quota = {} if self._quota is None else {"max_bytes": self._quota.max_bytes}
        return {"bytes": self.held_bytes(), **quota}

    def limits(self, version: WeightVersion) -> tuple[list[Limit], int]:
        """The limit of each slot while ``version`` is published; and the bytes held or on their way, under a quota."""
        ledger, slots = self._ledger, range(self._ledger.num_slots)
        if self._quota is None:
            return [Limit(ledger.limit(chain_of(self._live, slot), slot), False) for slot in slots], 0
        held, standings = self.held_bytes(), self._standings(version)
        tickets = allowed(self._quota.num_tickets(held), standings)
        limits = []
        for slot, one, number in zip(slots, standings, tickets, strict=True):
            chain = chain_of(self._live, slot)
            self._given[chain] = self._given.get(chain, 0) + number - one.unused
            limits.append(Limit(self._given[chain], number < one.wanted))
        coming = sum(tickets) + sum(one.in_flight for one in standings)
        return limits, held + coming * self._quota.charge

    def is_crowded(self, begun: Mapping[str, int]) -> bool:
        """Whether a checkpoint should begin before the next step; ``begun`` has the lows of the newest begun."""
        if self._quota is None:
            return False
        now = {chain: numbers.low for chain, numbers in self._ledger.finished.items()}
        return self._quota.is_crowded(self._segments(), begun, now, len(self._ledger.waiting))

    def shortage(self, version: WeightVersion, reclaim: Mapping[str, int]) -> Shortage | None:
        """None while a group can come, if only when all below the lows ``reclaim`` is deleted."""
        if self._quota is None:
            return None
        segments, missing = kept(self._segments(), reclaim), self._ledger.missing()
        if self._quota.num_tickets(size_of(segments)) > 0:
            return None
        if any(one.in_flight or min(one.unused, one.wanted) for one in self._standings(version)):
            return None
        charge, least_mb = self._quota.charge / MIB, self._quota.least(size_of(segments), missing) / MIB
        text = f"{self._holding(segments)}, {missing} groups are missing, and each may take {charge:.3g} MiB"
        return Shortage(text, math.ceil(100 * least_mb) / 100)

    def text(self) -> str:
        """How the quota stands, as the end of a sentence; nothing without one."""
        return "" if self._quota is None else f"; {self._holding(self._segments())}"

    def _holding(self, segments: Sequence[Segment]) -> str:
        """Who holds how much of the quota."""
        assert self._quota is not None
        owners = {str(chain.name): f"rollout-{slot}" for slot, chain in sorted(self._live.items())}
        bytes_of = dict.fromkeys([*owners.values(), ENDED], 0)
        for one in segments:
            bytes_of[owners.get(one.chain, ENDED)] += one.num_bytes
        parts = ", ".join(f"{name} {num_bytes / MIB:.3g}" for name, num_bytes in bytes_of.items())
        whole, total = self._quota.max_bytes / MIB, sum(bytes_of.values()) / MIB
        return f"of buffer.max_mb = {whole:.4g} MiB {total:.4g} are held ({parts})"

    def _segments(self) -> list[Segment]:
        live = [one for chain in self._live.values() for one in chain.segments(live=True)]
        return live + [one for chain in self._retired for one in chain.segments(live=False)]

    def _standings(self, version: WeightVersion) -> list[Standing]:
        """Each slot's; a slot without a writer wants nothing."""
        ledger, standings = self._ledger, []
        in_flight, in_ring = ledger.tickets()
        admitted = None if ledger.order is None else ledger.admitted(version)
        for slot in range(ledger.num_slots):
            chain = chain_of(self._live, slot)
            begun = ledger.ended(chain) + in_flight[chain] + in_ring[chain]
            wanted = ledger.limit(chain, slot) - begun if admitted is None else admitted[slot]
            unused = max(0, self._given.get(chain, 0) - begun)
            standing = Standing(in_flight=in_flight[chain], unused=unused, wanted=max(0, wanted) if chain else 0)
            standings.append(standing)
        return standings


def chain_of(live: Mapping[int, ChainReader], slot: int) -> str:
    """The name of the chain that the writer of ``slot`` adds to; empty where there is no writer."""
    return str(live[slot].name) if slot in live else ""
