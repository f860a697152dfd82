"""Checkpoints that make room: when one is worth it, where the disk or the ring's quota is short."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commits_world import World

from areal_hpc import mount
from areal_hpc.buffer.account import Shortage
from areal_hpc.checkpoint import verify
from areal_hpc.errors import ConfigError
from areal_hpc.roles import commits
from areal_hpc.roles.commits import Commits
from areal_hpc.training.ranks import Ranks


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with closing(World(tmp_path / "run")) as made:
        yield made


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Free space by the test's word, asked for each time."""
    told = SimpleNamespace(free=0)
    monkeypatch.setattr(commits, "SPACE_LOOK_S", 0.0)
    monkeypatch.setattr(mount, "_free", lambda _: (told.free, None))
    return told


def test_fault_40_a_checkpoint_is_worth_it_where_space_is_short_and_it_finds_room_itself(
    world: World, space: SimpleNamespace
) -> None:
    short = 255 << 20  # less than buffer.min_free_mb, and far more than a checkpoint here
    space.free = short
    assert not world.commits.would_make_room(), "there is none before it, so nothing would be deleted"
    world.commits.begin(1, weights=0)
    world.commits.settle(wait=True)
    assert world.commits.would_make_room()
    space.free = 257 << 20
    assert not world.commits.would_make_room(), "workers go on"
    taken = sum(path.stat().st_size for path in world.path(1).iterdir() if path.name != "MANIFEST.json")
    for free, expected in ((taken + commits.SPARE, False), (taken + commits.SPARE + 1, True)):
        space.free = free
        assert world.commits.would_make_room() is expected
    later: Any = SimpleNamespace(reader=world.reader, ring=world.reader)
    again = Commits(
        process=world.process,
        ranks=Ranks(),
        backend=world.backend,
        side=later,
        newest=verify(world.path(1)),
    )
    assert again.would_make_room(), "the attempt goes on from one"


def test_a_run_that_is_short_before_its_first_checkpoint_gets_one_before_its_next_step(
    world: World, space: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes two until the ring may delete anything, and no step comes between them once all wait."""
    size = 1 << 20
    monkeypatch.setattr(commits, "first_checkpoint_bytes", lambda config: size if config is world.config else 0)
    for free, expected in ((size + commits.SPARE, False), (size + commits.SPARE + 1, True), (257 << 20, False)):
        space.free = free
        assert world.commits.is_crowded() is expected
        assert not world.commits.would_make_room(), "nothing would be deleted after it"
    world.commits.begin(1, weights=0)
    space.free = 255 << 20
    assert not world.commits.is_crowded(), "the second comes where workers wait"
    world.commits.settle(wait=True)
    assert world.commits.would_make_room()


def test_fault_40_a_quota_asks_for_checkpoints_against_the_newest_that_was_begun(
    world: World, space: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    space.free = 1 << 40
    assert not world.commits.is_crowded()
    world.train(1)
    world.backend.disk.clear()
    world.commits.begin(1, weights=0)
    world.reader.crowded = True
    with caplog.at_level(logging.INFO):
        assert world.commits.is_crowded()
    assert "a checkpoint now, so that the ring, at 3 MiB, stays within buffer.max_mb" in caplog.text
    assert world.reader.asked == [None, {"consumed": {"low": 2, "above": []}}], "not the newest that is durable"
    assert not world.commits.would_make_room()
    world.reader.problem = Shortage("somebody holds it", 7.5)
    assert world.commits.would_make_room()
    world.commits.require_room()  # one is under way, and may help
    world.backend.disk.set()
    world.commits.settle(wait=True)
    with pytest.raises(
        ConfigError, match=r"^buffer\.max_mb: quota too small: somebody .* 7\.5 at least, and go on with --resume$"
    ):
        world.commits.require_room()
    world.reader.problem = None
    world.commits.require_room()


def test_free_space_is_looked_at_rarely(world: World, space: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    world.commits.begin(1, weights=0)
    world.commits.settle(wait=True)
    monkeypatch.setattr(commits, "SPACE_LOOK_S", 1e6)
    space.free = 255 << 20
    assert [world.commits.would_make_room() for _ in range(3)] == [True, False, False]
