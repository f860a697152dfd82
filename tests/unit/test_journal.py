"""The step journal: what is read is what was noted, and never what was damaged."""

from __future__ import annotations

import os
from pathlib import Path

import google_crc32c
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from areal_hpc.errors import RunDirError
from areal_hpc.journal import Entry, Journal, Kind, Trained, entries, up_to_checkpoint
from areal_hpc.run_dir import RunDir
from areal_hpc.types import Drop, Dropped, GroupRef, WeightVersion


def ref(position: int, prompt_id: str = "", step: int = 0) -> GroupRef:
    return GroupRef(
        chain=f"chain-{position % 2}",
        segment=0,
        offset=0,
        seq=position,
        ticket=position + 100,
        position=position,
        prompt_id=prompt_id or f"d/{position}",
        version=WeightVersion(1, step),
        rewards=(),
        lengths=(),
        generated=(),
        truncated=(),
        episodes=(),
    )


def trained(position: int, prompt_id: str = "", step: int = 0) -> Trained:
    of = ref(position, prompt_id, step)
    return Trained(chain=of.chain, ticket=of.ticket, position=position, prompt_id=of.prompt_id, version=of.version)


def dropped(position: int, reason: Drop = Drop.FILTERED, *, consumed: bool = True) -> Dropped:
    return Dropped(chain="c", ticket=position, position=position, reason=reason, consumed=consumed)


def step(number: int, *positions: int, lost: tuple[Dropped, ...] = ()) -> Entry:
    return Entry(kind=Kind.STEP, step=number, trained=tuple(map(trained, positions)), dropped=lost)


def mark(number: int, *lost: Dropped) -> Entry:
    return Entry(kind=Kind.CHECKPOINT, step=number, trained=(), dropped=lost)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def test_what_is_noted_is_read(run: RunDir) -> None:
    journal = Journal(run, 2)
    journal.step(5, [ref(8), ref(3)], [dropped(1), dropped(2, Drop.ABANDONED, consumed=False)])
    journal.step(6, [], [])
    journal.checkpoint(6, [dropped(9, Drop.FAILED)])
    lost = (dropped(1), dropped(2, Drop.ABANDONED, consumed=False))
    assert entries(run, 2) == [step(5, 8, 3, lost=lost), step(6), mark(6, dropped(9, Drop.FAILED))]
    assert entries(run, 1) == []
    assert run.journal.joinpath("e00000002.log").stat().st_mode & 0o077 == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(ids=st.lists(st.text(min_size=1), max_size=4))
def test_any_prompt_id_survives(ids: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    run = RunDir.create(tmp_path_factory.mktemp("any") / "run")
    Journal(run, 1).step(1, [ref(p, prompt_id) for p, prompt_id in enumerate(ids)], [])
    (entry,) = entries(run, 1)
    assert [one.prompt_id for one in entry.trained] == ids


def test_the_checksum_is_crc32c_of_all_lines_so_far(run: RunDir) -> None:
    journal = Journal(run, 1)
    journal.step(1, [ref(0)], [])
    lines = run.journal.joinpath("e00000001.log").read_bytes().splitlines()
    texts = [line[9:] for line in lines]
    assert [int(line[:8], 16) for line in lines] == [
        google_crc32c.value(b"".join(texts[: number + 1])) for number in range(2)
    ]


def test_a_line_that_is_torn_changed_or_missing_ends_what_is_believed(run: RunDir) -> None:
    journal = Journal(run, 1)
    for number in range(1, 4):
        journal.step(number, [ref(number)], [])
    path = run.journal / "e00000001.log"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for size in range(len(lines[0]), len(whole)):  # torn anywhere
        path.write_bytes(whole[:size])
        kept = whole[:size].count(b"\n") - 1
        assert [entry.step for entry in entries(run, 1)] == list(range(1, kept + 1)), size
    path.write_bytes(whole.replace(b'"d/2"', b'"d/7"'))
    assert [entry.step for entry in entries(run, 1)] == [1]
    path.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    assert [entry.step for entry in entries(run, 1)] == [1]
    path.write_bytes(b"".join([*lines[:2], lines[3], lines[2]]))
    assert [entry.step for entry in entries(run, 1)] == [1]


def test_a_second_trainer_of_the_same_attempt_is_refused(run: RunDir) -> None:
    Journal(run, 1)
    with pytest.raises(RunDirError, match=r"e00000001\.log exists; stop the other trainer"):
        Journal(run, 1)


def test_a_journal_of_another_format_is_refused(run: RunDir) -> None:
    text = b'{"format": 99}'
    run.journal.joinpath("e00000001.log").write_bytes(b"%08x %s\n" % (google_crc32c.value(text), text))
    with pytest.raises(RunDirError, match="read it with the version of areal-hpc that wrote it"):
        entries(run, 1)


def test_a_mark_is_durable_when_it_returns(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, synced = Journal(run, 1), list[int]()
    size = run.journal.joinpath("e00000001.log").stat
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(size().st_size))
    journal.step(1, [ref(0)], [])
    assert synced == []
    journal.checkpoint(1, [])
    assert synced == [size().st_size]


def test_what_a_checkpoint_covers_ends_at_its_last_mark() -> None:
    lines = [step(1, 0), mark(1), step(2, 1), mark(2, dropped(7)), step(3, 2)]
    assert up_to_checkpoint(lines, 1) == lines[:2]
    assert up_to_checkpoint(lines, 2) == lines[:4]
    assert up_to_checkpoint(lines, 3) is None
