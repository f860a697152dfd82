"""The rules alone: shares, shards, and when a claim must wait."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given

from areal_hpc.buffer.ledger import Ledger, shard, share, unshard
from areal_hpc.types import GroupRef, Ticket, WeightVersion
from areal_hpc.watermark import Watermark


def ticket(number: int, step: int) -> Ticket:
    return Ticket(chain="00000.x", number=number, position=number, version=WeightVersion(1, step))


def ref(of: Ticket) -> GroupRef:
    return GroupRef(
        chain=of.chain,
        segment=0,
        offset=0,
        seq=of.number,
        ticket=of.number,
        position=of.position,
        prompt_id="",
        version=of.version,
        rewards=(),
        lengths=(),
        generated=(),
        truncated=(),
        episodes=(),
    )


@given(st.integers(1, 1000), st.integers(1, 50))
def test_shares_are_even_and_sum_to_the_capacity(capacity: int, num_slots: int) -> None:
    shares = [share(capacity, slot, num_slots) for slot in range(num_slots)]
    assert sum(shares) == capacity
    assert max(shares) - min(shares) <= 1


@given(st.integers(0, 40), st.sets(st.integers(0, 80)), st.integers(1, 7))
def test_shards_are_the_positions_of_each_writer(low: int, above: set[int], num_slots: int) -> None:
    positions = Watermark(low, (n for n in above if n > low))
    for slot in range(num_slots):
        local = shard(positions, slot, num_slots)
        back = unshard(local, slot, num_slots)
        for position in range(slot, 100, num_slots):
            assert (position // num_slots in local) == (position in positions)
            assert (position in back) == (position in positions)


def can_be_scheduled(steps: list[int], num_groups: int, step: int, max_staleness: int) -> bool:
    """By brute force: can these tickets be put into the claims from ``step`` on, ``num_groups`` each, none too old?"""
    room = dict.fromkeys(range(step, step + max_staleness + 1), num_groups)
    for reserved_at in sorted(steps):
        free = [at for at in room if room[at] and at <= reserved_at + max_staleness]
        if not free:
            return False
        room[min(free)] -= 1
    return True


@given(
    max_staleness=st.integers(0, 3),
    num_groups=st.integers(1, 3),
    ages=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12),
)
def test_a_claim_waits_exactly_when_the_rest_could_not_be_in_time(
    max_staleness: int, num_groups: int, ages: list[tuple[int, bool]]
) -> None:
    step = 10
    ages = [(min(age, max_staleness), sealed) for age, sealed in ages][: (max_staleness + 1) * num_groups]
    tickets = [ticket(number, step - age) for number, (age, _) in enumerate(ages)]
    if not can_be_scheduled([t.version.step for t in tickets], num_groups, step, max_staleness):
        return  # more old ones than the law of slots allows
    ledger = Ledger(len(ages) or 1, max_staleness, 1, lambda _: True)
    for one, (_, sealed) in zip(tickets, ages, strict=True):
        ledger.reserved(one)
        if sealed:
            ledger.sealed(ref(one), one.version)
    sealed_tickets = [one for one, (_, sealed) in zip(tickets, ages, strict=True) if sealed]
    possible = any(
        can_be_scheduled([t.version.step for t in tickets if t not in chosen], num_groups, step + 1, max_staleness)
        for chosen in itertools.combinations(sealed_tickets, num_groups)
    )
    refs = ledger.claim(num_groups, WeightVersion(1, step))
    assert (refs is not None) == possible
    if refs is not None:
        steps = sorted(t.version.step for t in sealed_tickets)
        assert [r.version.step for r in refs] == steps[:num_groups]


def test_tickets_that_were_seen_too_late_are_not_waited_for() -> None:
    ledger = Ledger(2, 1, 1, lambda _: True)
    ledger.reserved(ticket(0, 3))
    ledger.reserved(ticket(1, 5))
    ledger.sealed(ref(ticket(1, 5)), WeightVersion(1, 5))
    refs = ledger.claim(1, WeightVersion(1, 5))
    assert refs is not None and refs[0].position == 1


def test_carried_groups_fill_the_shares_evenly() -> None:
    ledger = Ledger(7, 3, 3, lambda _: True)
    for number in range(7):
        ledger.reserved(ticket(number, 0))
        ledger.sealed(ref(ticket(number, 0)), WeightVersion(1, 0))
    ledger.retired("00000.x", 0)
    assert ledger.carried(0) == 7
    ledger.begin()
    assert [ledger.carried(slot) for slot in range(3)] == [share(7, slot, 3) for slot in range(3)]
