"""What only the ring on disk has: files that are deleted, damaged, stale, or left by somebody else."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_hpc.buffer import control, scan
from areal_hpc.buffer.control import Control, NewestWeights, publish_control, read_control
from areal_hpc.buffer.epochs import claim_epoch, read_start, sweep
from areal_hpc.buffer.reader import RingReader
from areal_hpc.buffer.scan import GroupFetcher, intact
from areal_hpc.buffer.writer import RingWriter
from areal_hpc.config.schema import BufferConfig
from areal_hpc.errors import CorruptRecord, Fenced, RunDirError
from areal_hpc.run_dir import RunDir
from areal_hpc.types import Drop, GroupRef, StopReason, Trajectory, TrajectoryGroup, WeightVersion

CONFIG = BufferConfig(max_staleness=1, segment_mb=0.0001, commit_s=1e6)
CAPACITY = 4


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


@pytest.fixture
def reader(run: RunDir) -> RingReader:
    return new_reader(run)


@pytest.fixture
def writer(run: RunDir, reader: RingReader) -> RingWriter:
    return new_writer(run, reader)


def new_reader(run: RunDir, **resume: Any) -> RingReader:
    epoch = claim_epoch(run, {})
    reader = RingReader(run, epoch, num_slots=1, config=CONFIG, capacity=CAPACITY, poll_s=0, discover_s=0, **resume)
    step = resume["parent"].step if resume else 0
    reader.write_start(WeightVersion(epoch, step), "data", {})
    reader.release(WeightVersion(epoch, step))
    return reader


def new_writer(run: RunDir, reader: RingReader, **changes: Any) -> RingWriter:
    epoch, config = reader._epoch, replace(CONFIG, **changes)
    writer = RingWriter(run, epoch, slot=0, num_slots=1, config=config, capacity=CAPACITY, poll_s=0, fence_s=0)
    reader.claim(1000, WeightVersion(epoch, 0))
    return writer


def produce(writer: RingWriter, *positions: int) -> None:
    for position in positions:
        ticket = writer.try_reserve(position)
        assert ticket is not None
        one = Trajectory(
            token_ids=np.arange(50, dtype=np.int32),
            loss_mask=np.ones(50, np.bool_),
            logprobs=np.zeros(50, np.float32),
            versions=np.full(50, ticket.version.step, np.int32),
            reward=1.0,
            stop=StopReason.STOP,
        )
        writer.seal(ticket, TrajectoryGroup(position=position, prompt_id=str(position), trajectories=(one,)))
        writer.flush()


def train(reader: RingReader, step: int, num_groups: int = 1) -> list[GroupRef]:
    refs = reader.claim(num_groups, WeightVersion(reader._epoch, step))
    assert refs is not None
    reader.release(WeightVersion(reader._epoch, step + 1))
    return refs


def reclaim(writer: RingWriter) -> None:
    """What the commit thread does once a call has read CONTROL."""
    writer.reissues()
    mine = writer._mine()
    assert mine is not None
    writer._chain.reclaim(mine.reclaim)


def segments(run: RunDir) -> list[str]:
    return sorted(str(path.relative_to(run.ring / "chains")) for path in run.ring.glob("chains/*/*.seg"))


def test_a_segment_goes_when_two_checkpoints_hold_what_it_holds(
    run: RunDir, writer: RingWriter, reader: RingReader
) -> None:
    """A segment for each group here: after checkpoint k the group of step k lies there, that of k - 1 no more."""
    for step, left in enumerate((["0", "1"], ["1", "2"], ["2", "3"])):
        produce(writer, step)
        train(reader, step)
        reader.covered(reader.state_dict())
        reclaim(writer)
        assert [name[-5] for name in segments(run)] == left


def test_the_last_but_one_checkpoint_finds_everything(run: RunDir, reader: RingReader) -> None:
    """The newest checkpoint turns out to be damaged: the run goes on from the one before, and its groups are there."""
    writer = new_writer(run, reader)
    states = []
    produce(writer, 0, 1, 2, 3)
    for step in range(3):
        states.append((reader.state_dict(), WeightVersion(reader._epoch, step)))
        reader.covered(states[-1][0])
        reclaim(writer)
        if step < 2:
            train(reader, step)
    state, parent = states[1]
    again = new_reader(run, state=state, parent=parent)
    assert [ref.position for ref in again.claim(3, WeightVersion(again._epoch, 1))] == [1, 2, 3]
    start = read_start(run, again._epoch)
    assert start is not None and list(start.consumed) == [0, 1, 2, 3]


def test_ended_chains_are_deleted_by_the_reader(run: RunDir, reader: RingReader) -> None:
    writer = new_writer(run, reader)
    produce(writer, 0)
    writer.close()
    train(reader, 0)
    chain = run.ring / "chains" / writer.chain
    reader.covered(reader.state_dict())
    assert segments(run)
    (chain / ".nfs0001").touch()  # somebody on this host still reads a deleted file
    reader.covered(reader.state_dict())
    assert segments(run) == [] and chain.is_dir()
    (chain / ".nfs0001").unlink()
    reader.covered(reader.state_dict())
    assert not chain.exists()
    assert reader.state_dict()["finished"] == {}
    assert reader.state_dict()["consumed"]["low"] == 1


def test_chains_in_which_nothing_was_reserved_do_not_pile_up(run: RunDir, reader: RingReader) -> None:
    for _ in range(5):
        new_writer(run, reader)
    reader.claim(1, WeightVersion(reader._epoch, 0))
    reader.release(WeightVersion(reader._epoch, 0))
    assert len(list((run.ring / "chains").iterdir())) == 1


def damage(run: RunDir, ref: GroupRef) -> None:
    path = run.ring / "chains" / ref.chain / f"{ref.segment:08d}.seg"
    stored = bytearray(path.read_bytes())
    stored[stored.index(np.arange(50, dtype="<i4").tobytes(), ref.offset)] ^= 1
    path.write_bytes(bytes(stored))


def test_damaged_bytes_are_named_and_their_prompt_runs_again(
    run: RunDir, reader: RingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "RETRY_PAUSES_S", (0.0,) * 3)
    writer = new_writer(run, reader)
    produce(writer, 0, 1)
    bad, good = reader.claim(2, WeightVersion(reader._epoch, 0))
    damage(run, bad)
    with pytest.raises(CorruptRecord, match=rf"chain {bad.chain}, segment 0, record {bad.seq} .*position 0"):
        GroupFetcher(run).read(bad)
    assert reader.read(good).position == 1
    reader.discard(bad, Drop.CORRUPT)
    reader.release(WeightVersion(reader._epoch, 1))
    assert writer.reissues() == [0]


def test_a_batch_opens_each_segment_once_and_names_what_is_damaged(
    run: RunDir, reader: RingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of one segment, out of order, and one of another chain between them."""
    monkeypatch.setattr(scan, "RETRY_PAUSES_S", (0.0,))
    writer = new_writer(run, reader, segment_mb=1.0)
    produce(writer, 0, 1, 2)
    writer.close()
    writer = new_writer(run, reader, segment_mb=1.0)
    produce(writer, 3)
    refs = reader.claim(4, WeightVersion(reader._epoch, 0))
    assert [ref.position for ref in refs] == [0, 1, 2, 3] and len({ref.segment for ref in refs[:3]}) == 1
    damage(run, refs[1])
    opened, real = [], os.open
    monkeypatch.setattr(
        os, "open", lambda path, *args, **options: (opened.append(path), real(path, *args, **options))[1]
    )
    first, other, damaged, last = GroupFetcher(run).read_all([refs[2], refs[3], refs[1], refs[0]])
    assert [group.position for group in (first, other, last)] == [2, 3, 0]
    assert isinstance(damaged, CorruptRecord) and "position 1" in str(damaged)
    assert len(opened) == 2 + 2, "two segments, and twice more for the damaged one"
    with pytest.raises(CorruptRecord, match="position 1"):
        intact([first, damaged])


def test_old_pages_are_read_again(run: RunDir, reader: RingReader, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = new_writer(run, reader)
    produce(writer, 0)
    (ref,) = reader.claim(1, WeightVersion(reader._epoch, 0))
    pread, stale, pauses = os.pread, [2], []

    def old_pages(fd: int, size: int, offset: int) -> bytes:
        stale[0] -= 1
        return bytes(size) if stale[0] >= 0 else pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", old_pages)
    assert GroupFetcher(run, sleep=pauses.append).read(ref).position == 0
    assert pauses == [0.02, 0.08]


def test_a_control_file_of_an_older_attempt_is_not_believed(run: RunDir, reader: RingReader) -> None:
    epoch = claim_epoch(run, {})
    writer = RingWriter(run, epoch, slot=0, num_slots=1, config=CONFIG, capacity=CAPACITY, poll_s=0, fence_s=0)
    assert read_control(run, known=True).epoch == epoch - 1
    assert writer.try_reserve(0) is None
    assert writer.version == WeightVersion(epoch, -1)
    with pytest.raises(Fenced):
        reader.release(WeightVersion(epoch - 1, 1))
    writer.close()


def test_whoever_asks_for_the_newest_weights_reads_no_more_often_than_a_writer(
    run: RunDir, reader: RingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch, now, reads = reader._epoch, [0.0], list[Path]()
    newest = NewestWeights(run, epoch, 0.2, clock=lambda: now[0])
    publish_control(run, Control(epoch=epoch, version=WeightVersion(epoch, 7), slots=()))
    real = control.read_json
    monkeypatch.setattr(control, "read_json", lambda path: (reads.append(path), real(path))[1])
    assert [newest() for _ in range(50)] == [7] * 50
    publish_control(run, Control(epoch=epoch, version=WeightVersion(epoch, 8), slots=()))
    now[0] = 0.19
    assert newest() == 7 and len(reads) == 1
    now[0] = 0.21
    assert newest() == 8 and len(reads) == 2


def test_the_weights_of_an_older_attempt_are_not_this_ones_newest(run: RunDir, reader: RingReader) -> None:
    epoch = reader._epoch
    publish_control(run, Control(epoch=epoch, version=WeightVersion(epoch, 7), slots=()))
    assert NewestWeights(run, epoch + 1, 0.2)() is None
    assert NewestWeights(run, epoch, 0.2)() == 7


def test_a_writer_stops_when_control_names_a_newer_attempt(run: RunDir, reader: RingReader) -> None:
    epoch = reader._epoch
    writer = RingWriter(run, epoch, slot=0, num_slots=1, config=CONFIG, capacity=CAPACITY, poll_s=0, fence_s=1e6)
    writer.reissues()
    publish_control(run, Control(epoch=epoch + 1, version=WeightVersion(epoch + 1, 0), slots=()))
    for _ in range(2):
        with pytest.raises(Fenced, match=f"replaced by {epoch + 1}"):
            writer.try_reserve(0)


@pytest.mark.parametrize("error", [errno.ESTALE, errno.ENOENT, errno.EACCES])
def test_a_stale_control_file_is_asked_for_again(
    run: RunDir, reader: RingReader, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fails(_: Path) -> bytes:
        raise OSError(error, os.strerror(error))

    assert read_control(run, known=True) is not None
    monkeypatch.setattr(Path, "read_bytes", fails)
    if error == errno.EACCES:
        with pytest.raises(OSError, match="Permission denied"):
            read_control(run, known=True)
    else:
        assert read_control(run, known=True) is None


def test_no_ticket_is_given_while_the_disk_is_full(
    run: RunDir, writer: RingWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert writer.try_reserve(0) is not None
    monkeypatch.setattr(type(writer._commits), "failing", property(lambda _: True))
    assert writer.try_reserve(1) is None


def test_files_are_private(run: RunDir, writer: RingWriter) -> None:
    produce(writer, 0)
    for path in run.ring.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_writer_reserves_nothing_before_its_predecessor_was_read_to_the_end(
    run: RunDir, reader: RingReader, writer: RingWriter
) -> None:
    produce(writer, 0, 1, 2)
    epoch = reader._epoch
    second = RingWriter(run, epoch, slot=0, num_slots=1, config=CONFIG, capacity=CAPACITY, poll_s=0, fence_s=0)
    assert second.try_reserve(3) is None
    assert second.issued() is None
    assert reader.claim(1000, WeightVersion(epoch, 0)) is None
    produce(second, 3)
    assert second.try_reserve(4) is None  # three of four slots are its predecessor's
    assert writer.try_reserve(4) is None  # which is not followed any more


def test_what_a_replaced_writer_adds_later_is_not_seen(run: RunDir, reader: RingReader) -> None:
    """A zombie: it was taken for dead, its prompt was given to another; the second group of it must not count."""
    zombie = new_writer(run, reader)
    ticket = zombie.try_reserve(0)
    assert ticket is not None
    zombie.flush()
    writer = new_writer(run, reader)
    assert writer.reissues() == [0]
    produce(writer, 0)
    one = Trajectory(
        token_ids=np.zeros(1, np.int32),
        loss_mask=np.ones(1, np.bool_),
        logprobs=np.zeros(1, np.float32),
        versions=np.zeros(1, np.int32),
        reward=0.0,
        stop=StopReason.STOP,
    )
    zombie.seal(ticket, TrajectoryGroup(position=0, prompt_id="0", trajectories=(one,)))
    zombie.flush()
    assert [ref.chain for ref in train(reader, 0)] == [writer.chain]
    state = reader.state_dict()
    again = new_reader(run, state=state, parent=WeightVersion(reader._epoch, 1))
    assert again.claim(1, WeightVersion(again._epoch, 1)) is None
    assert again.stats()["sealed"] == 0


def test_no_ticket_is_given_while_space_is_short_and_the_trainer_says_so(
    run: RunDir, reader: RingReader, writer: RingWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_mib = [100]
    block = 1 << 20
    monkeypatch.setattr(
        os, "statvfs", lambda _: os.statvfs_result((block, block, 1000, free_mib[0], free_mib[0], 0, 0, 0, 0, 255))
    )
    assert writer.lacks() == ("a free ticket", "")
    assert writer.try_reserve(0) is None
    short = f"{run.ring} has 100 MiB left, less than the 256 MiB of buffer.min_free_mb"
    assert f"no new prompt is begun, since {short}: free space there" in reader.waiting_for()
    assert writer.lacks() == ("space on the disk", short), "nothing is in flight, and nobody else would say why"
    free_mib[0] = 300
    assert writer.try_reserve(0) is not None
    assert writer.lacks() == ("a free ticket", "")
    assert "no new prompt" not in reader.waiting_for()


@pytest.mark.parametrize("half", [b"", b'{"epoch": 1, "ver'])
def test_a_document_that_is_half_visible_is_read_again_and_then_named(
    run: RunDir, reader: RingReader, monkeypatch: pytest.MonkeyPatch, half: bytes
) -> None:
    monkeypatch.setattr(control, "RETRY_PAUSES_S", (0.0,) * 3)
    path, whole = run.ring / "CONTROL.json", [half, half]
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: whole.pop() if whole else read_bytes(self))
    assert read_control(run, known=True) is not None
    path.write_bytes(half)
    with pytest.raises(RunDirError, match=r"CONTROL\.json is no JSON document.*; remove it, its owner writes it again"):
        read_control(run, known=True)


def test_control_that_cannot_be_published_waits_and_is_then_named(
    run: RunDir, reader: RingReader, writer: RingWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: the trainer goes on, writers learn of the new version once there is space; with no patience left,
    an error says what to do."""
    epoch = reader._epoch

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(control, "publish_json", full)
        reader.release(WeightVersion(epoch, 1))
        assert writer.version == WeightVersion(epoch, 0)
        publisher = control.ControlPublisher(run, patience_s=-1.0)
        with pytest.raises(RunDirError, match=r"could not be written for 0 s: No space left on device; free space"):
            publisher.publish(Control(epoch=epoch, version=WeightVersion(epoch, 1), slots=()))
    assert reader.claim(1, WeightVersion(epoch, 1)) is None
    assert writer.version == WeightVersion(epoch, 1)


def test_a_trainer_whose_successor_sweeps_its_file_away_is_fenced(
    run: RunDir, reader: RingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look at the fence and its rename."""
    real, epoch = os.replace, reader._epoch

    def swept(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", real)
        sweep(run, claim_epoch(run, {}))
        real(source, target)

    monkeypatch.setattr(os, "replace", swept)
    with pytest.raises(Fenced, match=f"attempt {epoch} of .* was replaced by attempt {epoch + 1}"):
        reader.release(WeightVersion(epoch, 1))
