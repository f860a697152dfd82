"""Which checkpoints stay: the rules as a pure function, and nothing goes before something newer has proved whole."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.checkpoint import Keep, newest, prune, retention, write
from areal_hpc.checkpoint.retention import beside_the_newest
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion

ONE = {1: None}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def v(step: int, epoch: int = 1) -> WeightVersion:
    return WeightVersion(epoch=epoch, step=step)


def make(run: RunDir, step: int, epoch: int = 1) -> Path:
    return write(run, v(step, epoch), lambda directory: (directory / "model.bin").write_bytes(b"weights") and None, {})


def names(run: RunDir) -> list[str]:
    return sorted(os.listdir(run.checkpoints))


def steps(run: RunDir) -> list[int]:
    return [int(name[5:13]) for name in names(run)]


def test_prune_keeps_the_newest(run: RunDir) -> None:
    for step in (10, 20, 30, 40):
        make(run, step)
    prune(run, ONE, Keep(newest=2))
    assert names(run) == ["step-00000030.e00000001", "step-00000040.e00000001"]


def test_C12_the_only_good_one_is_never_deleted(run: RunDir) -> None:
    good = make(run, 10)
    for step in (20, 30):
        (make(run, step) / "model.bin").unlink()
    prune(run, ONE, Keep(newest=1))
    assert len(names(run)) == 3
    found = newest(run, {1: None})
    assert found is not None
    assert found.path == good
    make(run, 40)
    prune(run, ONE, Keep(newest=1))
    assert names(run) == ["step-00000040.e00000001"]


@pytest.mark.parametrize("code", [errno.ENOTEMPTY, errno.EBUSY])
def test_B8_a_file_that_cannot_go_yet_never_ends_the_run(
    run: RunDir, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(run, 10), make(run, 20)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
        prune(run, ONE, Keep(newest=1))
    assert os.strerror(code) in caplog.text
    assert [name for name in names(run) if name.startswith("step-")] == ["step-00000020.e00000001"]
    assert len(names(run)) == 2  # its remains lie in the trash
    prune(run, ONE, Keep(newest=1))
    assert names(run) == ["step-00000020.e00000001"]


# What stays however old it is


@pytest.mark.parametrize(
    ("every", "scores", "expected"),
    [
        (0, {}, []),
        (30, {}, [30, 60]),
        (10, {}, [10, 20, 30, 40, 50, 60]),
        (7, {}, []),
        (0, {20: 0.5, 40: 0.25}, [20]),
        (0, {20: 0.5, 40: 0.5}, [40]),  # C23: of equals, the newest
        (0, {25: 0.9, 40: 0.5}, [40]),  # C14: step 25 was evaluated and has no checkpoint
        (0, {20: -1.0, 40: -2.0}, [20]),
        (50, {20: 0.5}, [20, 50]),
    ],
)
def test_C14_C23_every_nth_and_the_best_stay(every: int, scores: dict[int, float], expected: list[int]) -> None:
    versions = [v(step) for step in range(10, 70, 10)]
    kept = beside_the_newest(versions, Keep(newest=1, every=every, scores=scores))
    assert sorted(version.step for version in kept) == expected


def test_every_nth_stays_and_the_rest_goes(run: RunDir) -> None:
    for step in range(1, 8):
        make(run, step)
        prune(run, ONE, Keep(newest=2, every=3))
    assert steps(run) == [3, 6, 7]


def test_a_pinned_checkpoint_stays_until_the_pin_is_taken_out(run: RunDir) -> None:
    pin = make(run, 1) / "PINNED"
    pin.touch()
    make(run, 2), make(run, 3)
    prune(run, ONE, Keep(newest=1))
    assert steps(run) == [1, 3]
    found = newest(run, {1: 1})
    assert found is not None and found.version == v(1), "a pin is no damage"
    pin.unlink()
    prune(run, ONE, Keep(newest=1))
    assert steps(run) == [3]


def test_what_was_taken_back_counts_for_nothing_and_goes(run: RunDir) -> None:
    """Attempt 2 went back to step 10: what attempt 1 made after it may not push out step 10."""
    for step in (10, 20, 30):
        make(run, step)
    lineage = {1: 10, 2: None}
    make(run, 15, epoch=2)
    prune(run, lineage, Keep(newest=2, every=30))
    assert names(run)[:2] == ["step-00000010.e00000001", "step-00000015.e00000002"]
    make(run, 25, epoch=2)
    prune(run, lineage, Keep(newest=2, every=30))
    assert names(run) == ["step-00000015.e00000002", "step-00000025.e00000002"]


def test_what_has_been_verified_before_is_not_read_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = retention.verify
    monkeypatch.setattr(retention, "verify", lambda path: read.append(path.name) or real(path))
    verified: list[Path] = []
    for step in (1, 2, 3):
        newest_path = make(run, step)
        verified = prune(run, ONE, Keep(newest=2), verified)
        assert verified[0] == newest_path
    assert [int(name[5:13]) for name in read] == [1, 2, 3]


@settings(max_examples=25)
@given(
    made=st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=8, unique_by=lambda one: one[0]),
    keep=st.integers(1, 4),
    every=st.integers(0, 5),
)
def test_C12_what_goes_always_has_enough_good_ones_after_it(
    tmp_path_factory: pytest.TempPathFactory, made: list[tuple[int, bool]], keep: int, every: int
) -> None:
    """For any checkpoints, good and damaged: the ``keep`` newest good ones stay, and nothing newer than them goes."""
    run = RunDir.create(tmp_path_factory.mktemp("runs") / "run")
    for step, good in made:
        path = make(run, step)
        if not good:
            (path / "model.bin").unlink()
    prune(run, ONE, Keep(newest=keep, every=every))
    good = sorted((step for step, is_good in made if is_good), reverse=True)
    edge = good[keep - 1] if len(good) >= keep else 0
    expected = {step for step, _ in made if step >= edge or (every and step % every == 0)}
    assert set(steps(run)) == expected
