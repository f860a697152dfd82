"""Who owns a run, and which weights its attempts share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_hpc import fs
from areal_hpc.buffer.epochs import (
    ROOT,
    StartRecord,
    branch,
    check_fence,
    claim_epoch,
    claimed_by,
    lineage,
    load_lineage,
    newest_epoch,
    read_start,
    sweep,
    write_start,
)
from areal_hpc.errors import CorruptDocument, Fenced, RunDirError
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion
from areal_hpc.watermark import Watermark


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def test_epochs_count_up_and_fence_the_ones_before(run: RunDir) -> None:
    assert newest_epoch(run) == 0
    assert claim_epoch(run, {"job": 1}) == 1
    check_fence(run, 1)
    assert claim_epoch(run, {"job": 2}) == 2
    check_fence(run, 2)
    with pytest.raises(Fenced, match=r"attempt 1 .* was replaced by attempt 2"):
        check_fence(run, 1)


def test_of_many_claims_at_once_each_gets_its_own(run: RunDir) -> None:
    with ThreadPoolExecutor(8) as pool:
        epochs = list(pool.map(lambda job: claim_epoch(run, {"job": job}), range(24)))
    assert sorted(epochs) == list(range(1, 25))
    assert newest_epoch(run) == 24


def test_a_start_record_is_written_once(run: RunDir) -> None:
    record = StartRecord(
        parent=WeightVersion(1, 20),
        version=WeightVersion(2, 20),
        consumed=Watermark(5, [7]),
        fingerprint="abc",
        carried={"evaluations": {"through": 20, "owed": [20]}},
    )
    assert read_start(run, 2) is None
    claim_epoch(run, {})
    assert read_start(run, 2) is None
    write_start(run, 2, record)
    assert read_start(run, 2) == record
    assert newest_epoch(run) == 1  # a start record is not a claim
    with pytest.raises(RunDirError, match="stop the other trainer"):
        write_start(run, 2, record)


def test_B10_a_start_that_is_known_is_read_though_an_old_listing_lacks_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of a network file system may be shown a listing of a minute ago; of attempts that lead here it is known
    that they have begun."""
    for parent in (None, WeightVersion(1, 10), None, WeightVersion(2, 20)):
        epoch = claim_epoch(run, {})
        if epoch != 3:  # which died before it began
            version = WeightVersion(epoch, 0 if parent is None else parent.step)
            write_start(run, epoch, StartRecord(parent=parent, version=version, consumed=Watermark(), fingerprint="f"))
    monkeypatch.setattr(fs, "names_in", lambda directory: [])
    assert read_start(run, 4) is None
    start = read_start(run, 4, known=True)
    assert start is not None and start.parent == WeightVersion(2, 20)
    survives = lineage(run, 4, start.parent)
    steps = {
        (epoch, step) for epoch in (1, 2, 3, 4) for step in (0, 10, 11, 20, 21) if survives(WeightVersion(epoch, step))
    }
    assert steps == {(1, 0), (1, 10), *((2, step) for step in (0, 10, 11, 20)), *((4, s) for s in (0, 10, 11, 20, 21))}
    assert read_start(run, 3, known=True) is None, "somebody has deleted it"


def test_a_branch_shares_what_came_before_it_left() -> None:
    """1 ran to step 30; 2 went on from (1, 20) and 3 from (1, 10), so 2 is beside our path; 4 goes on from (3, 15)."""
    parents = {1: ROOT, 2: WeightVersion(1, 20), 3: WeightVersion(1, 10), 4: WeightVersion(3, 15)}
    ours = branch(4, parents)
    shared = {(epoch, step) for epoch in range(6) for step in range(40) if ours(WeightVersion(epoch, step))}
    expected = {(1, step) for step in range(11)} | {(3, step) for step in range(16)} | {(4, step) for step in range(40)}
    # Epoch 2 began at step 20, which we do not have; it never served steps up to 10 under its own name.
    assert {(e, s) for e, s in shared if e not in (0, 2)} == expected
    assert (2, 20) not in shared


def test_an_attempt_that_made_no_checkpoint_shares_what_it_began_with() -> None:
    parents = {1: ROOT, 2: WeightVersion(1, 20), 3: WeightVersion(1, 20)}
    ours = branch(3, parents)
    assert ours(WeightVersion(2, 20))
    assert not ours(WeightVersion(2, 21))


def test_fresh_starts_share_the_model_that_they_load() -> None:
    ours = branch(2, {1: ROOT, 2: ROOT})
    assert ours(WeightVersion(1, 0))
    assert not ours(WeightVersion(1, 1))


def test_the_lineage_is_read_from_the_start_records(run: RunDir) -> None:
    for _ in range(3):
        claim_epoch(run, {})
    first = StartRecord(parent=None, version=WeightVersion(1, 0), consumed=Watermark(), fingerprint="")
    write_start(run, 1, first)
    ours = lineage(run, 3, WeightVersion(1, 4))  # attempt 2 died before it began
    assert ours(WeightVersion(1, 4))
    assert not ours(WeightVersion(1, 5))
    assert not ours(WeightVersion(2, 0))
    with pytest.raises(RunDirError, match="attempt 2 left no start record"):
        lineage(run, 3, WeightVersion(2, 4))


def test_checkpoints_without_a_start_record_are_refused_with_what_to_restore(run: RunDir) -> None:
    """The ring was deleted to save space: without its records a checkpoint is of no history."""
    assert load_lineage(run, 3) == {}
    (run.checkpoints / "step-00000004.e00000001").mkdir()
    with pytest.raises(RunDirError, match=r"epochs holds no start record, .*; restore ring/ from a copy, or set"):
        load_lineage(run, 3)


@pytest.mark.parametrize("known", [False, True])
def test_a_damaged_start_record_is_not_to_be_removed(run: RunDir, known: bool) -> None:
    path = run.ring / "epochs" / "e00000002.start.json"
    path.parent.mkdir()
    path.write_text('{"parent": [1, 4], "vers')
    with pytest.raises(CorruptDocument, match=rf"{path} is damaged, .* attempt 2 are found; restore it from a copy$"):
        read_start(run, 2, known=known)


def test_what_killed_processes_were_publishing_is_swept_and_what_others_publish_is_not(run: RunDir) -> None:
    assert claim_epoch(run, {}) == 1 and claim_epoch(run, {}) == 2
    gone = [run.root / ".config.yaml.17.0123abcd.tmp", run.ring / ".CONTROL.json.17.0123abcd.tmp"]
    gone += [run.ring / "epochs" / ".e00000001.start.json.17.0123abcd.tmp"]
    gone += [run.evaluations / ".step-00000010.json.17.0123abcd.tmp"]
    stays = [run.ring / "epochs" / f".e0000000{epoch}.17.0123abcd.tmp" for epoch in (2, 3)]
    stays += [run.root / ".bashrc", run.root / "notes.tmp"]
    for path in (*gone, *stays):
        path.write_bytes(b"")
    sweep(run, 2)
    assert [path for path in gone if path.exists()] == []
    assert [path for path in stays if not path.exists()] == []


def test_a_claim_that_says_nothing_is_an_error_that_says_what_to_do(run: RunDir) -> None:
    """Without hard links a kill can come between the claim and its words; the start record of such is none."""
    epoch = claim_epoch(run, {})
    (run.ring / "epochs" / "e00000001").write_bytes(b"")
    (run.ring / "epochs" / "e00000001.start.json").write_bytes(b"")
    with pytest.raises(RunDirError, match=r"e00000001 does not say who made it; add --takeover"):
        claimed_by(run, epoch)
    assert read_start(run, epoch) is None
