"""What is written of a chain and when it is durable, also on a disk that is slow, full, or refuses."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chain_files import LARGE, kinds_in, new_chain, put, segments, tickets

from areal_hpc.buffer.chain import BUFFER_BYTES, COMMIT_BYTES, ChainName, GroupCommit
from areal_hpc.buffer.records import RecordType
from areal_hpc.buffer.scan import ChainReader
from areal_hpc.errors import RunDirError


@pytest.fixture
def chains(tmp_path: Path) -> Path:
    return tmp_path


def test_names_are_their_text_and_never_come_back() -> None:
    name = ChainName.new(3, 2, 1)
    assert ChainName.parse(str(name)) == name
    assert str(name).startswith("00003.00000002.000001.")
    assert ChainName.new(3, 2, 1) != name
    assert ChainName.parse("00003.00000002.000001") is None
    assert ChainName.parse("../x") is None


def test_the_order_in_which_things_reach_the_disk(chains: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step makes the one before it durable first; a power cut between any two leaves a log that can be read."""
    log: list[str] = []
    pwrite, fdatasync, fsync, open_ = os.pwrite, os.fdatasync, os.fsync, os.open

    def logged(what: str) -> None:
        log.append(what)

    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: (logged(RecordType(bytes(data)[5]).name), pwrite(fd, data, at))[1]
    )
    monkeypatch.setattr(os, "fdatasync", lambda fd: (logged("sync file"), fdatasync(fd))[1])
    monkeypatch.setattr(os, "fsync", lambda fd: (logged("sync directory"), fsync(fd))[1])
    monkeypatch.setattr(
        os,
        "open",
        lambda path, flags, *mode: (logged("create") if flags & os.O_CREAT else None, open_(path, flags, *mode))[1],
    )
    chain = new_chain(chains, segment_bytes=1)
    assert log == ["sync directory", "create", "sync directory"]  # the chain's name, then its first segment
    log.clear()
    put(chain, 0, 1)
    data, commit, seal = ["DATA", "sync file"], ["COMMIT", "sync file"], ["SEAL", "sync file"]
    assert log == [*data, *commit, "create", "sync directory", *seal]
    log.clear()
    chain.end()
    assert log == seal


def test_a_commit_goes_out_in_front_of_the_records_that_wait_and_alone_where_none_do(
    chains: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a crash may keep of each write, by the records that it holds; a sync lies between each two."""
    writes: list[list[str]] = []
    pwrite = os.pwrite

    def logged(fd: int, data: memoryview, at: int) -> int:
        writes.append(kinds_in(bytes(data)))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", logged)
    monkeypatch.setattr("areal_hpc.buffer.chain.COMMIT_BYTES", 150)  # room for a COMMIT, and two records
    chain = new_chain(chains)
    put(chain, 0, 1, 2, 3, 4)
    assert writes == [["DATA", "DATA"], ["COMMIT", "DATA", "DATA"], ["COMMIT", "DATA"], ["COMMIT"]]
    assert tickets(ChainReader(chains, chain.name)) == [0, 1, 2, 3, 4]


def test_no_call_writes_more_than_a_mebibyte_and_all_of_a_large_record_is_read_again(
    chains: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: (sizes.append(len(data)), pwrite(fd, data, at))[1])
    chain, body = new_chain(chains), os.urandom(5 << 19)
    chain.append(RecordType.DATA, 0, {}, body)
    chain.commit()
    assert sizes[:2] == [1 << 20, 1 << 20] and 1 << 19 < sizes[2] < 1 << 20
    segment = (chains / str(chain.name) / "00000000.seg").read_bytes()
    assert tickets(ChainReader(chains, chain.name)) == [0] and body in segment


def test_records_are_seen_once_and_only_after_their_commit(chains: Path) -> None:
    chain = new_chain(chains)
    reader = ChainReader(chains, chain.name)
    chain.append(RecordType.DATA, 0, {}, b"x")
    assert tickets(reader) == []
    chain.commit()
    assert tickets(reader) == [0]
    put(chain, 1, 2)
    assert tickets(reader) == [1, 2]
    assert tickets(reader) == []


class Disk:
    """os.pwrite and os.fdatasync that fail, or write short, when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error, self.calls, self.fail_from, self.short = 0, 0, 0, False
        self._pwrite, self._fdatasync = os.pwrite, os.fdatasync
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)

    def check(self) -> None:
        self.calls += 1
        if self.error and self.calls > self.fail_from:
            raise OSError(self.error, os.strerror(self.error))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self.check()
        return self._pwrite(fd, data[: max(1, len(data) // 2)] if self.short else data, offset)

    def fdatasync(self, fd: int) -> None:
        self.check()
        self._fdatasync(fd)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    yield Disk(monkeypatch)


@pytest.mark.parametrize("fail_from", range(6))
@pytest.mark.parametrize("segment_bytes", [1, LARGE])
def test_a_commit_that_fails_at_any_call_is_repeated_in_place(
    chains: Path, disk: Disk, fail_from: int, segment_bytes: int
) -> None:
    """ENOSPC at each write and sync in turn, with more records handed over before the next try."""
    chain = new_chain(chains, segment_bytes)
    reader = ChainReader(chains, chain.name)
    disk.error, disk.fail_from = errno.ENOSPC, fail_from
    fails = fail_from < (4 if segment_bytes == LARGE else 6)
    if fails:
        with pytest.raises(OSError, match="No space left"):
            put(chain, 0)
    else:
        put(chain, 0)
    seen = tickets(reader)
    disk.error = 0
    chain.append(RecordType.DATA, 1, {}, b"more")
    chain.commit()
    assert seen + tickets(reader) == [0, 1]


def test_a_segment_whose_name_could_not_be_made_durable_is_tried_again(
    chains: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = new_chain(chains, segment_bytes=1)

    def fails(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        put(chain, 0)
    put(chain, 1)
    chain.end()
    assert tickets(ChainReader(chains, chain.name)) == [0, 1]


def test_short_writes_are_completed(chains: Path, disk: Disk) -> None:
    disk.short = True
    chain = new_chain(chains)
    put(chain, 0, 1, size=1000)
    assert tickets(ChainReader(chains, chain.name)) == [0, 1]


def test_where_no_segment_can_be_created_the_old_one_grows(chains: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An inode quota: EDQUOT at create only."""
    chain = new_chain(chains, segment_bytes=1)

    def refuse(*_: object) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        put(chain, 0)
        put(chain, 1)
    assert segments(chain) == ["00000000.seg"]
    put(chain, 2)
    assert segments(chain) == ["00000000.seg", "00000001.seg"]
    assert tickets(ChainReader(chains, chain.name)) == [0, 1, 2]


def wait(what: Callable[[], bool]) -> None:
    """Until the commit thread has done ``what``; no clock of ours decides the outcome."""
    pause = threading.Event()
    for _ in range(1000):
        if what():
            return
        pause.wait(0.01)
    raise AssertionError("the commit thread did nothing for 10 s")


def test_the_thread_commits_by_time_and_by_bytes(chains: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = new_chain(chains)
    reader = ChainReader(chains, chain.name)
    seen: list[int] = []
    commits = GroupCommit(chain, commit_s=0.001, patience_s=60)
    chain.append(RecordType.DATA, 0, {})
    wait(lambda: bool(seen.extend(tickets(reader)) or seen))
    commits.stop()
    monkeypatch.setattr("areal_hpc.buffer.chain.COMMIT_BYTES", 250)  # reached by the second record
    commits = GroupCommit(chain, commit_s=1e6, patience_s=60)
    chain.append(RecordType.DATA, 1, {}, b"x" * 99)
    chain.append(RecordType.DATA, 2, {}, b"x")
    wait(lambda: bool(seen.extend(tickets(reader)) or len(seen) == 3))
    commits.stop()


def test_a_full_disk_is_waited_for_and_then_named(chains: Path, disk: Disk) -> None:
    chain = new_chain(chains)
    patient, disk.error = GroupCommit(chain, commit_s=0.001, patience_s=60), errno.ENOSPC
    chain.append(RecordType.DATA, 0, {})
    wait(lambda: patient.failing)
    patient.check()
    disk.error = 0
    wait(lambda: not patient.failing)
    assert tickets(ChainReader(chains, chain.name)) == [0]
    patient.stop()
    hasty, disk.error = GroupCommit(chain, commit_s=0.001, patience_s=0), errno.ENOSPC
    chain.append(RecordType.DATA, 1, {})
    wait(lambda: hasty.failing)
    with pytest.raises(RunDirError, match="No space left on device; free space or quota"):
        hasty.check()
    hasty.stop()


def test_a_read_only_disk_is_an_error_at_once(chains: Path, disk: Disk) -> None:
    chain = new_chain(chains)
    commits, disk.error = GroupCommit(chain, commit_s=0.001, patience_s=1e6), errno.EROFS
    chain.append(RecordType.DATA, 0, {})
    wait(lambda: commits.failing)
    with pytest.raises(RunDirError, match="Read-only file system"):
        commits.check()
    commits.stop()


def test_a_slow_sync_delays_what_is_durable_and_no_call(chains: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one commit hangs in the disk, records are handed over at once; one commit then takes all of them."""
    chain = new_chain(chains)
    reader = ChainReader(chains, chain.name)
    inside, let_go, syncs = threading.Event(), threading.Event(), []
    fdatasync = os.fdatasync

    def slow(fd: int) -> None:
        syncs.append(fd)
        inside.set()
        assert let_go.wait(30)
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    commits = GroupCommit(chain, commit_s=0.001, patience_s=60)
    chain.append(RecordType.DATA, 0, {})
    assert inside.wait(30)
    for ticket in range(1, 50):
        chain.append(RecordType.DATA, ticket, {})
    assert len(syncs) == 1
    commits.check()
    assert tickets(reader) == []
    let_go.set()
    seen: list[int] = []
    wait(lambda: bool(seen.extend(tickets(reader)) or len(seen) == 50))
    commits.stop()
    assert len(syncs) == 3  # the first record; its COMMIT with all the others; theirs


def test_an_error_that_only_close_reports_costs_nothing(chains: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EDQUOT at close(2), as NFS may: the segment is durable already, and the descriptor is closed."""
    chain = new_chain(chains, segment_bytes=1)
    close = os.close

    def fails(fd: int) -> None:
        close(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", fails)
        patch.setattr("areal_hpc.buffer.chain.fsync_directory", lambda _: None)  # it closes a descriptor, too
        with pytest.raises(OSError, match=r"Disk quota exceeded: '.*/00000000\.seg'"):
            put(chain, 0)
    put(chain, 1)
    chain.end()
    assert tickets(ChainReader(chains, chain.name)) == [0, 1]


def test_a_backlog_becomes_batches_that_each_are_durable_by_themselves(chains: Path) -> None:
    chain, half = new_chain(chains), COMMIT_BYTES // 2
    put(chain, 0, 1, 2, 3, 4, size=half)
    for ticket in range(5, 10):
        chain.append(RecordType.DATA, ticket, {}, bytes([ticket]) * half)
    syncs = 0

    def counted(fd: int, *, sync: Callable[[int], None] = os.fdatasync) -> None:
        nonlocal syncs
        syncs += 1
        sync(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", counted)
        chain.commit()
    assert syncs == 3 + 1  # 5 halves are 3 batches, and the last one's COMMIT has nothing to go with
    assert tickets(ChainReader(chains, chain.name)) == list(range(10))


def test_a_segment_ends_between_records_that_wait_already(chains: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers are given by then, so a SEAL takes none: the next segment goes on where the COMMIT stopped."""
    monkeypatch.setattr("areal_hpc.buffer.chain.COMMIT_BYTES", 150)  # room for a COMMIT, and two records
    chain = new_chain(chains, segment_bytes=1)
    put(chain, 0, 1, 2, 3, 4)
    chain.end()
    found = ChainReader(chains, chain.name).poll()
    assert [(record.segment, record.meta["ticket"], record.header.seq) for record in found] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 2, 3),
        (1, 3, 4),
        (2, 4, 6),
    ]


def test_a_record_larger_than_a_buffer_is_written_whole_and_its_memory_let_go(chains: Path) -> None:
    chain = new_chain(chains)
    chain.append(RecordType.DATA, 0, {}, b"small")
    put(chain, 1, size=BUFFER_BYTES + 1)
    put(chain, 2)
    (path,) = chain.directory.iterdir()
    assert [record.header.body_bytes for record in ChainReader(chains, chain.name).poll()] == [5, BUFFER_BYTES + 1, 10]
    assert path.read_bytes().count(b"\1" * (BUFFER_BYTES + 1)) == 1
    assert {len(buffer) for buffer in chain._spare} == {BUFFER_BYTES}


def test_buffers_of_a_backlog_are_not_kept(chains: Path) -> None:
    chain = new_chain(chains)
    for ticket in range(4):
        chain.append(RecordType.DATA, ticket, {}, bytes(COMMIT_BYTES))
    chain.commit()
    assert len(chain._spare) == 2
    assert tickets(ChainReader(chains, chain.name)) == [0, 1, 2, 3]


@pytest.mark.parametrize("failing", range(1, 5))
def test_a_batch_that_failed_is_written_again_with_the_same_bytes(chains: Path, failing: int) -> None:
    """Whichever sync fails, of any of three batches or of the last COMMIT."""
    chain, half = new_chain(chains), COMMIT_BYTES // 2
    for ticket in range(5):
        chain.append(RecordType.DATA, ticket, {}, bytes([ticket + 1]) * half)
    syncs = 0

    def broken(fd: int, *, sync: Callable[[int], None] = os.fdatasync) -> None:
        nonlocal syncs
        syncs += 1
        if syncs == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        with pytest.raises(OSError, match="Input/output"):
            chain.commit()
        chain.append(RecordType.DATA, 5, {}, b"later" * 100)
        chain.commit()
    found = ChainReader(chains, chain.name).poll()
    stored = b"".join((chain.directory / name).read_bytes() for name in segments(chain))
    assert [record.meta["ticket"] for record in found] == list(range(6))
    assert [stored.count(bytes([ticket + 1]) * half) for ticket in range(5)] == [1] * 5
