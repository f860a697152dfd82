"""A ring with a quota in bytes: it never holds more, and a run under it goes on unless the error is right.

The world here is a trainer and its workers on real files, by turns: groups of random sizes end in random order,
checkpoints become durable late, workers and trainers are killed. Directories are measured after each act.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.buffer.account import Shortage
from areal_hpc.buffer.epochs import claim_epoch
from areal_hpc.buffer.order import FixedOrder
from areal_hpc.buffer.quota import Quota, Segment, Standing, allowed, kept, segment_bytes
from areal_hpc.buffer.reader import RingReader
from areal_hpc.buffer.records import COLUMNS, TOKEN_BYTES, encode_group
from areal_hpc.buffer.writer import RingWriter
from areal_hpc.config import derived
from areal_hpc.config.load import load
from areal_hpc.config.schema import BufferConfig, Config
from areal_hpc.mount import MIB
from areal_hpc.run_dir import RunDir
from areal_hpc.types import Drop, StopReason, Ticket, Trajectory, TrajectoryGroup, WeightVersion

MOST_TOKENS = 400
GROUP_BYTES = MOST_TOKENS * TOKEN_BYTES + derived.EPISODE_BYTES + derived.TICKET_BYTES
QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def quota(max_bytes: int, **changes: Any) -> Quota:
    settled = {"group_bytes": 100, "capacity": 4, "num_writers": 0, "groups_per_step": 1, **changes}
    return Quota(max_bytes=max_bytes, **settled)


def standing(in_flight: int, unused: int, wanted: int) -> Standing:
    return Standing(in_flight=in_flight, unused=unused, wanted=wanted)


@pytest.mark.parametrize(
    ("num_tickets", "standings", "expected"),
    [
        (9, [standing(0, 0, 3), standing(0, 0, 4)], [3, 4]),  # enough for all
        (5, [standing(2, 0, 3), standing(0, 0, 4)], [1, 2]),  # level: three each with those in flight
        (4, [standing(0, 0, 1), standing(0, 0, 4)], [1, 3]),  # nobody gets what it cannot use
        (4, [standing(3, 2, 2), standing(0, 0, 4)], [2, 0]),  # what was allowed stays so
        (-7, [standing(0, 1, 3)], [1]),
    ],
)
def test_tickets_go_to_those_with_the_fewest_and_are_never_taken_back(
    num_tickets: int, standings: list[Standing], expected: list[int]
) -> None:
    assert allowed(num_tickets, standings) == expected


@given(
    st.integers(-5, 40),
    st.lists(st.builds(standing, st.integers(0, 5), st.integers(0, 5), st.integers(0, 9)), max_size=5),
)
def test_no_more_tickets_than_there_is_room_for_and_none_left_over(num_tickets: int, standings: list[Standing]) -> None:
    tickets = allowed(num_tickets, standings)
    before, begun = sum(one.unused for one in standings), sum(one.in_flight for one in standings)
    assert all(number >= one.unused for number, one in zip(tickets, standings, strict=True))
    assert sum(tickets) == before or sum(tickets) + begun <= num_tickets
    unmet = any(number < one.wanted for number, one in zip(tickets, standings, strict=True))
    assert not unmet or sum(tickets) + begun >= num_tickets


def test_what_a_checkpoint_covers_is_let_go_of_but_not_what_is_written() -> None:
    segments = [Segment("a", 10, 4, False), Segment("a", 20, 7, True), Segment("b", 40, 2, False)]
    assert kept(segments, {}) == segments
    assert kept(segments, {"a": 4, "b": 3}) == segments[:2]
    assert kept(segments, {"a": 9, "b": 3}) == segments[1:2]


def test_a_checkpoint_is_due_before_a_third_of_what_is_not_needed_is_consumed() -> None:
    """1,000 bytes, of which 3 of 4 tickets may need 50 each, and a step takes 50: 300 remain for two steps of 50."""
    ring = quota(1000 + 150)
    ring.saw(50 - 1024)  # with the records around it
    done = [Segment("a", 50, number, False) for number in range(20)]
    waiting, open_ = Segment("a", 100, 20, False), Segment("a", 0, 20, True)

    def is_crowded(consumed: int) -> bool:
        return ring.is_crowded([*done, waiting, open_], {"a": 20 - consumed}, {"a": 20}, groups=1)

    assert not is_crowded(0), "nothing would become free"
    assert [is_crowded(consumed) for consumed in (4, 5, 6)] == [False, False, True]


def test_what_groups_are_charged_grows_with_the_largest_that_was_seen() -> None:
    ring = quota(1000)
    assert (ring.num_tickets(0), ring.num_tickets(350), ring.num_tickets(1200)) == (10, 6, -2)
    ring.saw(10)
    assert ring.charge == 1034, "with the records around it"
    ring.saw(5)
    assert ring.charge == 1034
    assert quota(1000).least(300, groups=3) == 600 and quota(1000).least(300, groups=0) == 400


def test_open_segments_are_a_small_part_of_the_quota() -> None:
    assert segment_bytes(BufferConfig(segment_mb=2.0), 4) == 2 * MIB
    assert segment_bytes(BufferConfig(segment_mb=2.0, max_mb=64.0), 4) == MIB, "four of them are a sixteenth"
    assert segment_bytes(BufferConfig(segment_mb=0.5, max_mb=64.0), 4) == MIB // 2


def test_what_a_group_takes_at_most_is_what_the_format_takes() -> None:
    """A group of episodes as long as they may be, with all that is written around it."""
    assert derived.TOKEN_BYTES == TOKEN_BYTES == sum(np.dtype(dtype).itemsize for dtype in COLUMNS.values())
    config = load([QUICKSTART], ["rollout.group_size=5", "model.max_tokens=300"])
    assert isinstance(config, Config)
    made = TrajectoryGroup(
        position=10**12,
        prompt_id="x" * 1000,
        trajectories=tuple(trajectory(300, 10**9, index) for index in range(5)),
    )
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), num_slots=1, groups_per_step=1, max_staleness=0, max_bytes=1 << 20)
        ticket = world.writers[0].try_reserve(10**12)
        assert ticket is not None
        world.writers[0].seal(ticket, made)
        world.writers[0].close()
        measured = world.disk()
    assert len(encode_group(made)[1]) < measured <= derived.largest_group_bytes(config)


def test_fault_39_a_writer_says_what_it_lacks_and_how_much_is_held(tmp_path: Path) -> None:
    """Room for two groups as large as they may be, of which one is on its way; then the share is used up instead."""
    most = 2 * GROUP_BYTES + 1024 + GROUP_BYTES // 2
    world = World(tmp_path, num_slots=1, groups_per_step=3, max_staleness=0, max_bytes=most)
    writer = world.writers[0]
    assert writer.lacks() == ("a free ticket", "")
    tickets = [writer.try_reserve(0), writer.try_reserve(1)]
    assert writer.try_reserve(2) is None
    what, how = writer.lacks()
    assert what == f"room in the ring, of buffer.max_mb = {most / MIB:g} MiB"
    assert how == f"{2 * GROUP_BYTES / MIB:.3g} MiB are held or on their way"
    for ticket in tickets:
        assert ticket is not None
        one = trajectory(1, 0)
        writer.seal(ticket, TrajectoryGroup(position=ticket.position, prompt_id="p", trajectories=(one,)))
    writer.flush()
    assert world.reader.claim(3, world.version) is None
    assert writer.try_reserve(2) is not None, "they took far less"
    assert writer.try_reserve(3) is None
    assert writer.lacks() == ("a free ticket", "")
    world.close()


def test_room_is_given_again_once_a_file_is_gone_not_when_its_writer_is_told_to_delete_it(tmp_path: Path) -> None:
    """Room for one group that is kept and one that may come; the first goes after the second checkpoint."""
    group_bytes = MOST_TOKENS * TOKEN_BYTES + 400
    world = World(
        tmp_path,
        num_slots=1,
        groups_per_step=1,
        max_staleness=0,
        max_bytes=1024 + group_bytes + GROUP_BYTES + group_bytes // 4,
    )
    writer = world.writers[0]
    for position in range(2):
        ticket = writer.try_reserve(position)
        assert ticket is not None
        one = trajectory(MOST_TOKENS, position)
        writer.seal(ticket, TrajectoryGroup(position=position, prompt_id="p", trajectories=(one,)))
        writer.flush()
        assert world.train() is None and world.step == position + 1
        world.save()
        world.settle()
    assert writer.try_reserve(2) is None
    mine = writer._mine()
    assert mine is not None and mine.reclaim == 1, "it is told"
    world.reader.poll()
    assert writer.try_reserve(2) is None
    writer._chain.reclaim(mine.reclaim)
    world.reader.poll()
    assert writer.try_reserve(2) is not None
    world.close()


def trajectory(num_tokens: int, version: int, episode: int = 0) -> Trajectory:
    return Trajectory(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=np.ones(num_tokens, np.bool_),
        logprobs=np.zeros(num_tokens, np.float32),
        versions=np.full(num_tokens, version, np.int32),
        reward=1 / 3,
        stop=StopReason.LENGTH,
        episode=episode,
    )


class World:
    """A run on real files, act by act. ``step`` is the newest version, ``durable`` the checkpoints that are."""

    def __init__(
        self,
        root: Path,
        *,
        num_slots: int,
        groups_per_step: int,
        max_staleness: int,
        max_bytes: int,
        fixed: bool = False,
        late: bool = False,
        seed: int = 0,
    ) -> None:
        self.run, self.random = RunDir.create(root / "run"), random.Random(seed)
        self.num_slots, self.groups, self.max_bytes, self.late = num_slots, groups_per_step, max_bytes, late
        self.config = BufferConfig(max_staleness=max_staleness, commit_s=1e6, max_mb=max_bytes / MIB, min_free_mb=0.0)
        order = FixedOrder(groups_per_step=groups_per_step, max_staleness=max_staleness) if fixed else None
        self.shape: dict[str, Any] = {
            "num_slots": num_slots,
            "config": self.config,
            "capacity": (max_staleness + 1) * groups_per_step,
            "order": order,
            "poll_s": 0.0,
        }
        self.step, self.durable = 0, list[tuple[WeightVersion, dict[str, Any]]]()
        self.consumed, self.num_checkpoints, self.was_short = set[int](), 0, False
        self.writers: list[RingWriter] = []
        self.begin()

    def begin(self) -> None:
        """An attempt, from the newest checkpoint that is durable."""
        parent, state = self.durable[-1] if self.durable else (None, None)
        self.epoch, self.step = claim_epoch(self.run, {}), parent.step if parent else 0
        self.begun, self.pending = state, None
        self.committed = -1
        self.reader = RingReader(
            self.run,
            self.epoch,
            **self.shape,
            state=state,
            parent=parent,
            discover_s=0.0,
            quota=Quota(
                max_bytes=self.max_bytes,
                group_bytes=GROUP_BYTES,
                capacity=self.shape["capacity"],
                num_writers=self.num_slots,
                groups_per_step=self.groups,
            ),
        )
        self.reader.write_start(self.version, "data", {})
        self.reader.release(self.version)
        self.open = [dict[int, Ticket]() for _ in range(self.num_slots)]
        self.next, self.again = list(range(self.num_slots)), [deque[int]() for _ in range(self.num_slots)]
        self.writers = [self.new_writer(slot) for slot in range(self.num_slots)]

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.epoch, self.step)

    def new_writer(self, slot: int) -> RingWriter:
        writer = RingWriter(self.run, self.epoch, slot=slot, **self.shape, fence_s=0.0)
        writer._commits.stop()  # what its thread does, ``work`` does by turns
        self.reader.poll()
        return writer

    def disk(self) -> int:
        """Bytes in the ring, as anybody sees them."""
        return sum(path.stat().st_size for path in self.run.ring.glob("chains/*/*.seg"))

    def kill(self, slot: int) -> None:
        """A worker dies with what it has in flight; another takes its place."""
        self.let_go(slot)
        self.next[slot] = slot
        self.again[slot].clear()
        self.writers[slot] = self.new_writer(slot)

    def let_go(self, slot: int) -> None:
        self.writers[slot]._chain.close()
        self.open[slot].clear()

    def crash(self) -> None:
        """Everybody dies; what is no checkpoint yet is none."""
        for slot in range(self.num_slots):
            self.let_go(slot)
        self.begin()

    def close(self) -> None:
        for slot in range(self.num_slots):
            self.let_go(slot)

    # What workers do

    def position(self, slot: int) -> int:
        self.again[slot].extend(self.writers[slot].reissues())
        issued = self.writers[slot].issued()
        assert issued is not None
        while self.again[slot]:
            return self.again[slot].popleft()
        while self.next[slot] in issued:
            self.next[slot] += self.num_slots
        self.next[slot] += self.num_slots
        return self.next[slot] - self.num_slots

    def work(self, slot: int) -> None:
        """Delete what may go, at once or late; begin all that may begin, end some of it."""
        writer = self.writers[slot]
        assert writer.version == self.version  # reads CONTROL
        mine = writer._mine()
        assert mine is not None
        if not self.late or self.random.random() < 0.5:
            writer._chain.reclaim(mine.reclaim)
        self.was_short |= mine.short
        while True:
            position = self.position(slot)
            if (ticket := writer.try_reserve(position)) is None:
                self.again[slot].appendleft(position)
                break
            self.open[slot][ticket.number] = ticket
        for number in self.random.sample(sorted(self.open[slot]), self.random.randint(0, len(self.open[slot]))):
            self.end(slot, self.open[slot].pop(number))
        writer.flush()

    def end(self, slot: int, ticket: Ticket) -> None:
        if self.random.random() < 0.2:
            self.writers[slot].drop(ticket, Drop.FILTERED)
            return
        one = trajectory(self.random.choice((1, MOST_TOKENS // 4, MOST_TOKENS)), ticket.version.step)
        position = ticket.position
        self.writers[slot].seal(
            ticket, TrajectoryGroup(position=position, prompt_id=str(position), trajectories=(one,))
        )

    # What the trainer does, in the order of its loop

    def save(self) -> None:
        """Begin a checkpoint; the one before is durable first."""
        self.settle()
        self.begun = self.reader.state_dict()
        self.pending, self.committed = (self.version, self.begun), self.step
        self.num_checkpoints += 1

    def settle(self) -> None:
        if self.pending is not None:
            self.durable.append(self.pending)
            self.reader.covered(self.pending[1])
            self.pending = None

    def train(self) -> Shortage | None:
        """One look at the ring: perhaps a checkpoint, perhaps a step; why the run is to end, or None."""
        if self.random.random() < 0.3:
            self.settle()
        if self.committed != self.step and self.reader.is_crowded(self.begun):
            self.save()
        refs = self.reader.claim(self.groups, self.version)
        if refs is None:
            return self.starve()
        after = WeightVersion(self.epoch, self.step + 1)
        for _ in range(1000):
            if self.reader.may_publish(after):
                break
            self.act()
            if self.pending is None and not self.reader.may_publish(after) and (problem := self.reader.shortage()):
                return problem
            self.settle()
        else:
            raise AssertionError(f"no newer weights: {self.reader.waiting_for()}")
        self.step += 1
        self.reader.release(self.version)
        return None

    def starve(self) -> Shortage | None:
        problem = self.reader.shortage()
        if problem and self.committed != self.step:
            self.save()
            self.settle()
            return None
        return problem if self.pending is None else None

    def act(self) -> None:
        """Every worker once, in any order."""
        for slot in self.random.sample(range(self.num_slots), self.num_slots):
            self.work(slot)
            assert self.disk() <= self.max_bytes, "more than the quota"


def shapes(**changes: Any) -> Any:
    return st.fixed_dictionaries(
        {
            "num_slots": st.integers(1, 3),
            "groups_per_step": st.integers(3, 5),
            "max_staleness": st.integers(0, 2),
            "seed": st.integers(0, 10**6),
            **changes,
        }
    )


def go_through(world: World, steps: int, *, deaths: float = 0.0) -> Shortage | None:
    """Until the run is done, or may not go on; why."""
    for _ in range(1000):
        if world.step >= steps:
            return None
        world.act()
        if (problem := world.train()) is not None:
            return problem
        assert world.disk() <= world.max_bytes, "more than the quota"
        if world.random.random() < deaths:
            world.random.choice([world.crash, lambda: world.kill(0)])()
    raise AssertionError(f"the run stands still at step {world.step}: {world.reader.waiting_for()}")


@settings(max_examples=25, deadline=None)
@given(shapes(fixed=st.booleans(), late=st.booleans(), max_bytes=st.integers(20_000, 200_000)), st.booleans())
def test_fault_39_40_any_quota_is_kept_and_stands_in_the_way_only_where_it_says_so(
    shape: dict[str, Any], deaths: bool
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        world = World(Path(directory), **shape)
        problem = go_through(world, 12, deaths=0.1 if deaths else 0.0)
        if problem is not None:
            told = re.search(r"MiB ([\d.e-]+) are held \(.*\), (\d+) groups are missing, ", problem.text)
            assert told is not None, problem
            assert not any(world.open), "something could still come"
            assert float(told[1]) * MIB * 1.01 + GROUP_BYTES + 1024 * world.num_slots > world.max_bytes, problem
            assert problem.least_mb * MIB > world.max_bytes, problem
        world.close()


@settings(max_examples=15, deadline=None)
@given(shapes(fixed=st.booleans()))
def test_with_as_much_as_the_schema_names_nothing_ever_waits_for_room(shape: dict[str, Any]) -> None:
    num_groups = (2 * shape["max_staleness"] + 5) * shape["groups_per_step"]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        world = World(Path(directory), **shape, max_bytes=num_groups * GROUP_BYTES)
        assert go_through(world, 40) is None
        assert not world.was_short, "a worker waited for room"
        assert world.num_checkpoints >= 3, "the quota was never in the way of anything"
        world.close()
