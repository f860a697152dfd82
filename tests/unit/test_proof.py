"""The proof: it holds for a history that is right, and every way to be wrong is found and named."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from areal_hpc.buffer.memory import MemoryRing
from areal_hpc.journal import Entry, Kind, Trained
from areal_hpc.report.proof import Attempt, Breach, Evidence, RingState, prove
from areal_hpc.types import Drop, Dropped, GroupRef, TrajectoryGroup, WeightVersion
from areal_hpc.watermark import Watermark

ROWS = 6


def trained(position: int, step: int, prompt: str = "") -> Trained:
    """By a ticket of the newest weights there were."""
    return Trained(
        chain="a",
        ticket=position,
        position=position,
        prompt_id=prompt or f"d/{position % ROWS}",
        version=WeightVersion(1, step - 1),
    )


def drop(position: int, reason: Drop = Drop.FILTERED, *, consumed: bool = True) -> Dropped:
    return Dropped(chain="a", ticket=position, position=position, reason=reason, consumed=consumed)


def step(number: int, *positions: int, dropped: Sequence[Dropped] = ()) -> Entry:
    groups = tuple(trained(position, number) for position in positions)
    return Entry(kind=Kind.STEP, step=number, trained=groups, dropped=tuple(dropped))


def mark(number: int, *dropped: Dropped) -> Entry:
    return Entry(kind=Kind.CHECKPOINT, step=number, trained=(), dropped=dropped)


FIRST = [step(1, 0, 1), step(2, 3, 2), mark(2), step(3, 4, 6), step(4, 8, 5), mark(4, drop(9))]
"""Attempt 1. The checkpoint of step 4 was lost, so attempt 2 went on from step 2."""
SECOND = [
    step(3, 4, 6, dropped=[drop(8, Drop.ABANDONED, consumed=False)]),
    step(4, 8, 7, dropped=[drop(5), drop(4, Drop.FAILED, consumed=False)]),
    mark(4, drop(10, Drop.FAILED)),
    step(5, 9, 11),
]
THIRD = [step(3, 4, 5), step(4, 6, 7)]
"""An attempt that began from step 2 as well and was killed before its first checkpoint."""


def evidence() -> Evidence:
    """A right history: steps 1 and 2 of attempt 1, 3 and 4 of attempt 3; step 5 is in no checkpoint yet."""
    return Evidence(
        attempts=[
            Attempt(epoch=1, last_step=2, journal=FIRST),
            Attempt(epoch=3, last_step=None, journal=SECOND),
        ],
        others={2: THIRD},
        checkpoints={
            WeightVersion(1, 2): Watermark(4),
            WeightVersion(3, 4): Watermark(9, [10]),
        },
        unreadable=[],
        num_rows=ROWS,
        max_staleness=1,
        ring=RingState(
            sealed={("a", 8): (8, "d/2"), ("b", 1): (12, "d/0")},
            reserved=frozenset({9, 12, 13, 15}),
            reissues=frozenset({14}),
            num_writers=2,
        ),
    )


def test_a_right_history_is_proven_and_told() -> None:
    proof = prove(evidence())
    assert proof.violations == ()
    assert proof.proven
    assert (proof.checkpoint, proof.steps, proof.trained) == (WeightVersion(3, 4), 4, 8)
    assert proof.consumed_by_drop == {Drop.FILTERED: 1, Drop.FAILED: 1}
    assert proof.issued_again == {Drop.ABANDONED: 1}
    assert proof.dropped_again == 1
    assert proof.finished_epochs == 1
    assert proof.steps_taken_back == 2 + 2
    assert proof.steps_since == 1
    assert (proof.open_sealed, proof.open_begun, proof.open_reissued) == (1, 2, 1)
    assert proof.confirmed == 1


def with_second(base: Evidence, journal: Sequence[Entry]) -> Evidence:
    return replace(base, attempts=[base.attempts[0], replace(base.attempts[1], journal=journal)])


def with_newest(base: Evidence, consumed: Watermark) -> Evidence:
    return replace(base, checkpoints={**base.checkpoints, WeightVersion(3, 4): consumed})


def with_ring(base: Evidence, **changes: object) -> Evidence:
    return replace(base, ring=replace(base.ring, **changes))


WRONG: dict[str, tuple[Callable[[Evidence], Evidence], Breach, str]] = {
    "trained twice, in two attempts": (
        lambda e: with_second(e, [SECOND[0], step(4, 8, 1, dropped=[drop(5), drop(7)]), *SECOND[2:]]),
        Breach.TWICE,
        "position 1 was consumed 2 times: prompt 'd/1' trained at step 1 of attempt 1; "
        "prompt 'd/1' trained at step 4 of attempt 3",
    ),
    "trained and dropped for good": (
        lambda e: with_second(e, [*SECOND[:2], mark(4, drop(10, Drop.FAILED), drop(3)), SECOND[3]]),
        Breach.TWICE,
        "position 3 was consumed 2 times: prompt 'd/3' trained at step 2 of attempt 1; dropped as filtered by step 4",
    ),
    "counted, and never trained": (
        lambda e: with_newest(e, Watermark(9, [10, 11])),
        Breach.LOST,
        "the checkpoint of step 4 of attempt 3 counts position 11 as consumed, but no step was trained on it",
    ),
    "trained, and not counted": (
        lambda e: with_newest(e, Watermark(8, [10])),
        Breach.TWICE,
        "the checkpoint of step 4 of attempt 3 does not count position 8 as consumed, so it would be trained again",
    ),
    "an older checkpoint is wrong": (
        lambda e: replace(e, checkpoints={**e.checkpoints, WeightVersion(1, 2): Watermark(5)}),
        Breach.LOST,
        "the checkpoint of step 2 of attempt 1 counts position 4 as consumed",
    ),
    "a step is missing": (
        lambda e: with_ring(with_newest(with_second(e, SECOND[1:]), Watermark(4, [5, 7, 8, 10])), reserved=frozenset()),
        Breach.HISTORY,
        "step 3 is in no journal of the surviving history",
    ),
    "a step was made twice": (
        lambda e: with_second(e, [step(2), *SECOND]),
        Breach.HISTORY,
        "step 2 was made 2 times, by attempts 1, 3",
    ),
    "no mark of the checkpoint": (
        lambda e: replace(with_second(e, [*SECOND[:2], SECOND[3]]), checkpoints={WeightVersion(3, 4): Watermark(4)}),
        Breach.HISTORY,
        "the journal of attempt 3 has no mark of the checkpoint of step 4",
    ),
    "two positions are one prompt": (
        lambda e: with_second(
            e, [replace(SECOND[0], trained=(trained(4, 3, "d/1"), SECOND[0].trained[1])), *SECOND[1:]]
        ),
        Breach.TWICE,
        "prompt 'd/1' was trained more than once in data epoch 0: positions [1, 4]",
    ),
    "too old": (
        lambda e: with_second(
            e,
            [
                SECOND[0],
                replace(
                    SECOND[1],
                    trained=(replace(SECOND[1].trained[0], version=WeightVersion(1, 1)), SECOND[1].trained[1]),
                ),
                *SECOND[2:],
            ],
        ),
        Breach.STALE,
        "position 8 was trained at step 4 of attempt 3 with a ticket of version 1: 2 versions behind, at most 1",
    ),
    "the ring holds something else": (
        lambda e: with_ring(e, sealed={("a", 8): (9, "d/3")}),
        Breach.HISTORY,
        "step 4 of attempt 3 was trained on (position, prompt) (8, 'd/2'), but ticket 8 of chain a holds (9, 'd/3')",
    ),
    "every checkpoint is damaged": (
        lambda e: replace(e, checkpoints={}, unreadable=["step-00000004.e00000003 is damaged; use another"]),
        Breach.HISTORY,
        "step-00000004.e00000003 is damaged; use another",
    ),
    "the checkpoints are gone": (
        lambda e: replace(e, checkpoints={}),
        Breach.HISTORY,
        "the run went on from the checkpoint of step 2 of attempt 1, and no checkpoint is there that can be read",
    ),
    "passed over": (
        lambda e: with_ring(e, reserved=frozenset({9, 12, 15})),
        Breach.LOST,
        "position 13 was passed over: it is not consumed, and not in the ring any more",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_way_to_be_wrong_is_found_and_named(name: str) -> None:
    spoil, breach, text = WRONG[name]
    proof = prove(spoil(evidence()))
    assert not proof.proven
    others = {violation.breach for violation in proof.violations} - {breach}
    assert breach is Breach.HISTORY or not others  # an account that is missing makes others look wrong
    assert any(text in violation.text for violation in proof.violations), proof.violations


def test_what_no_checkpoint_covers_proves_and_breaks_nothing() -> None:
    nothing = replace(
        evidence(), checkpoints={}, num_rows=None, attempts=[Attempt(epoch=1, last_step=None, journal=[])]
    )
    proof = prove(replace(nothing, ring=RingState()))
    assert proof.proven
    assert (proof.checkpoint, proof.steps, proof.finished_epochs) == (None, 0, 0)
    begun = replace(nothing, ring=RingState(), attempts=[Attempt(epoch=1, last_step=None, journal=[step(1, 0, 1)])])
    assert prove(begun).steps_since == 1


def test_a_newest_checkpoint_that_was_damaged_leaves_the_one_before_to_be_proven() -> None:
    """The newest attempt went on from step 4, whose checkpoint nobody can read any more."""
    base = evidence()
    attempts = [base.attempts[0], replace(base.attempts[1], last_step=4), Attempt(epoch=4, last_step=None, journal=[])]
    proof = prove(
        replace(base, attempts=attempts, checkpoints={WeightVersion(1, 2): Watermark(4)}, ring=RingState(num_writers=2))
    )
    assert proof.proven, proof.violations
    assert (proof.checkpoint, proof.steps) == (WeightVersion(1, 2), 2)


# Any history that the ring makes


class Lives:
    """A trainer and a worker on the ring in memory, killed and continued at random; journals as the trainer's."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.journals: dict[int, list[Entry]] = {}
        self.parents: dict[int, WeightVersion | None] = {}
        self.checkpoints: dict[WeightVersion, dict[str, object]] = {}
        self.newest: WeightVersion | None = None
        self.ring: MemoryRing | None = None

    def live(self, num_steps: int) -> None:
        """One attempt of so many steps, with a checkpoint after every second one."""
        state = self.checkpoints[self.newest] if self.newest else None
        ring = self.ring = MemoryRing(4, 1, before=self.ring, state=state, parent=self.newest)
        self.parents[ring.epoch] = self.newest
        journal = self.journals[ring.epoch] = []
        version = WeightVersion(ring.epoch, self.newest.step if self.newest else 0)
        writer = ring.writer(0)
        ring.reader.release(version)
        stream = (position for position in range(10_000) if position not in ring.done)
        again: list[int] = []
        for _ in range(num_steps):
            while (refs := ring.reader.claim(2, version)) is None:
                again += writer.reissues()
                position = again.pop(0) if again else next(stream)
                ticket = writer.try_reserve(position)
                if ticket is None:
                    again.insert(0, position)
                elif self.random.random() < 0.3:
                    writer.drop(ticket, self.random.choice([Drop.FILTERED, Drop.FAILED]))
                else:
                    group = TrajectoryGroup(position=position, prompt_id=f"d/{position % ROWS}", trajectories=())
                    writer.seal(ticket, group)
            refs = self.without_damaged(ring, refs)
            version = WeightVersion(ring.epoch, version.step + 1)
            journal.append(noted(version.step, refs, ring.reader.take_dropped()))
            ring.reader.release(version)
            if version.step % 2 == 0:
                journal.append(mark(version.step, *ring.reader.take_dropped()))
                self.checkpoints[version], self.newest = ring.reader.state_dict(), version

    def without_damaged(self, ring: MemoryRing, refs: list[GroupRef]) -> list[GroupRef]:
        if self.random.random() < 0.2:
            ring.reader.discard(refs[0], Drop.CORRUPT)
            return refs[1:]
        return refs

    def evidence(self) -> Evidence:
        path, last = dict[int, int | None](), None
        epoch = max(self.journals)
        while epoch:
            path[epoch] = last
            parent = self.parents[epoch]
            epoch, last = (parent.epoch, parent.step) if parent else (0, None)
        return Evidence(
            attempts=[Attempt(epoch=e, last_step=path[e], journal=self.journals[e]) for e in sorted(path)],
            others={e: journal for e, journal in self.journals.items() if e not in path},
            checkpoints={
                version: Watermark.from_state(state["consumed"])  # type: ignore[arg-type]
                for version, state in self.checkpoints.items()
                if version.epoch in path and version.step <= (path[version.epoch] or version.step)
            },
            unreadable=[],
            num_rows=ROWS,
            max_staleness=1,
            ring=RingState(),
        )


def noted(number: int, refs: Sequence[GroupRef], dropped: Sequence[Dropped]) -> Entry:
    groups = tuple(
        Trained(chain=r.chain, ticket=r.ticket, position=r.position, prompt_id=r.prompt_id, version=r.version)
        for r in refs
    )
    return Entry(kind=Kind.STEP, step=number, trained=groups, dropped=tuple(dropped))


@given(seed=st.integers(0, 10**6), lives=st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_any_history_of_kills_is_proven_and_one_changed_position_breaks_it(seed: int, lives: list[int]) -> None:
    run = Lives(seed)
    for num_steps in lives:
        run.live(num_steps)
    found = run.evidence()
    proof = prove(found)
    assert proof.proven, proof.violations
    assert proof.steps == (run.newest.step if run.newest else 0)
    covered = [
        (attempt.epoch, index)
        for attempt in found.attempts
        for index, entry in enumerate(attempt.journal)
        if entry.trained and run.newest and (last := attempt.last_step or run.newest.step) and entry.step <= last
        if attempt.epoch <= run.newest.epoch
    ]
    if covered:
        epoch, index = run.random.choice(covered)
        journal = run.journals[epoch]
        journal[index] = replace(journal[index], trained=journal[index].trained[1:])
        assert {violation.breach for violation in prove(run.evidence()).violations} == {Breach.LOST}
