"""RolloutWriter and RolloutReader: the same cases on the ring on disk and on its specification in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from rollout_stores import DiskStore, MemoryStore, group

from areal_hpc.errors import ConfigError, Fenced
from areal_hpc.types import Drop, Ticket, WeightVersion

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


def test_an_episode_that_began_before_its_ticket_is_as_old_as_its_oldest_weights(make: Make) -> None:
    """The ticket is of the oldest weights behind the tokens: trained within the bound, dropped beyond it."""
    store = make(6, 1, 1)
    (writer,) = begin(store, 0, step=5)
    for position, oldest in ((0, 5), (1, 4), (2, 3), (3, 9)):
        ticket = writer.try_reserve(position, oldest)
        assert ticket.version == WeightVersion(store.epoch, min(oldest, 5))
        writer.seal(ticket, group(position, [oldest, 5]))
    store.flush(writer)
    claimed = store.reader.claim(3, WeightVersion(store.epoch, 5))
    assert [ref.position for ref in claimed] == [1, 0, 3]
    assert [(drop.position, drop.reason, drop.consumed) for drop in store.reader.take_dropped()] == [
        (2, Drop.STALE, False)
    ]


def test_D24_nothing_is_reserved_before_the_weights_are_published(make: Make) -> None:
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
