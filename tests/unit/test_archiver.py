"""Archiving in the background: what is durable when, what a failure does, and what a loop hands over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from archived import assert_equal, group, step_with, trajectory

from areal_hpc.buffer import archive
from areal_hpc.buffer.archive import read_step
from areal_hpc.buffer.archiver import MAX_BEHIND, Archiver
from areal_hpc.buffer.scan import one_by_one
from areal_hpc.errors import CorruptRecord, WaitTimeout
from areal_hpc.run_dir import RunDir
from areal_hpc.types import ArchivedStep, GroupRef, TrajectoryGroup, WeightVersion


class Ring:
    """Steps of one group each, and a gate before every read."""

    def __init__(self) -> None:
        self.steps = {n: self._step(n) for n in range(1, 20)}
        self.gate = threading.Event()
        self.gate.set()
        self.damaged: set[int] = set()

    def _step(self, number: int) -> ArchivedStep:
        damaged = [1] if number == 2 else []
        groups = [group(10 * number + row, trajectory([1], [(number, number - 1)])) for row in range(2)]
        return step_with(WeightVersion(1, number), groups, damaged=damaged)

    def read(self, ref: GroupRef) -> TrajectoryGroup:
        assert self.gate.wait(10)
        if ref.segment in self.damaged:
            raise CorruptRecord(f"position {ref.position} is damaged")
        return self.steps[ref.segment].groups[ref.offset]


@pytest.fixture
def ring() -> Ring:
    return Ring()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


@pytest.fixture
def archiver(run: RunDir, ring: Ring) -> Iterator[Archiver]:
    made = Archiver(run, 1, every_steps=3, fetch=one_by_one(ring.read), timeout_s=10)
    yield made
    ring.gate.set()
    made.close()


def files(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.archive.iterdir())


def test_files_end_every_so_many_steps_and_at_each_checkpoint(run: RunDir, ring: Ring, archiver: Archiver) -> None:
    for number in range(1, 6):
        archiver.add(ring.steps[number].step)
    archiver.seal()()
    assert files(run) == ["steps-00000001-00000003.e00000001.h5", "steps-00000004-00000005.e00000001.h5"]
    archiver.seal()()  # a checkpoint without a step since the last one
    archiver.add(ring.steps[6].step)
    archiver.seal()()
    assert files(run)[2:] == ["steps-00000006-00000006.e00000001.h5"]
    assert_equal(read_step(run.archive / files(run)[0], 2), ring.steps[2])  # one of whose groups was damaged


def test_a_checkpoint_waits_for_what_it_covers_and_the_loop_does_not(
    run: RunDir, ring: Ring, archiver: Archiver
) -> None:
    ring.gate.clear()
    archiver.add(ring.steps[1].step)
    durable = archiver.seal()
    archiver.add(ring.steps[2].step)
    assert files(run) == []
    ring.gate.set()
    durable()
    assert files(run) == ["steps-00000001-00000001.e00000001.h5"]


def test_a_thread_that_does_not_catch_up_is_waited_for_and_named(run: RunDir, ring: Ring) -> None:
    archiver = Archiver(run, 1, every_steps=3, fetch=one_by_one(ring.read), timeout_s=0.05)
    ring.gate.clear()
    for number in range(1, MAX_BEHIND + 1):
        archiver.add(ring.steps[number].step)
    with pytest.raises(WaitTimeout, match=r"archive in .*archive\.every_steps=0"):
        archiver.add(ring.steps[MAX_BEHIND + 1].step)
    with pytest.raises(WaitTimeout, match=f"{MAX_BEHIND + 1} jobs are not done"):
        archiver.seal()()
    ring.gate.set()
    archiver.close()


def test_a_group_that_cannot_be_read_any_more_is_an_error_at_the_next_step(
    run: RunDir, ring: Ring, archiver: Archiver
) -> None:
    ring.damaged = {1}
    archiver.add(ring.steps[1].step)
    archiver._thread.submit(int).result(10)
    with pytest.raises(CorruptRecord, match="position 10"):
        archiver.add(ring.steps[2].step)
    assert files(run) == []


def test_a_full_disk_is_an_error_before_the_checkpoint_exists(
    run: RunDir, ring: Ring, archiver: Archiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive, "publish", full)
    archiver.add(ring.steps[1].step)
    with pytest.raises(OSError, match="No space left"):
        archiver.seal()()
    assert files(run) == []


def test_what_a_killed_attempt_left_unfinished_is_removed_by_the_next(run: RunDir, ring: Ring) -> None:
    run.archive.mkdir()
    left = run.archive / ".steps-00000001-00000002.e00000001.h5.77.0a1b2c3d.tmp"
    own = run.archive / ".steps-00000001-00000002.e00000002.h5.78.0a1b2c3d.tmp"
    sealed = run.archive / "steps-00000001-00000002.e00000001.h5"
    for path in (left, own, sealed):
        path.touch()
    Archiver(run, 2, every_steps=1, fetch=one_by_one(ring.read), timeout_s=1).close()
    assert files(run) == [own.name, sealed.name]
