"""What a reader sees of a chain: cut, holed, out of order, rolled over, reclaimed, and served by a stale handle."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
from chain_files import kinds_in, new_chain, put, segments, tickets
from hypothesis import given, settings

from areal_hpc import patience
from areal_hpc.buffer.records import RecordType, frame
from areal_hpc.buffer.scan import ChainReader


@pytest.fixture
def chains(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RETRY_PAUSES_S", (0.0,) * 3)


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=12), cut=st.floats(0, 1), zeros=st.booleans())
def test_a_cut_log_shows_whole_commits_only(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], cut: float, zeros: bool
) -> None:
    """The file cut anywhere, as a crash or a page that has not arrived would; or with zeros from there on."""
    chains = tmp_path_factory.mktemp("chains")
    chain = new_chain(chains)
    ends, per_commit = [], []
    for start in range(0, len(sizes), 2):
        batch = range(start, min(start + 2, len(sizes)))
        for ticket in batch:
            chain.append(RecordType.DATA, ticket, {}, b"x" * sizes[ticket])
        chain.commit()
        ends.append((chain.directory / "00000000.seg").stat().st_size)
        per_commit.append(list(batch))
    path = chain.directory / "00000000.seg"
    whole = path.read_bytes()
    length = int(cut * len(whole))
    path.write_bytes(whole[:length] + (bytes(len(whole) - length) if zeros else b""))
    reader = ChainReader(chains, chain.name)
    padding = 7 if zeros else 0  # zeros in the place of the COMMIT's padding are the COMMIT itself
    whole_commits = [batch for batch, end in zip(per_commit, ends, strict=True) if end - padding <= length]
    assert tickets(reader) == [ticket for batch in whole_commits for ticket in batch]
    path.write_bytes(whole)
    reader_after = ChainReader(chains, chain.name)
    assert tickets(reader_after) == list(range(len(sizes)))
    chain.close()


def test_a_tail_without_a_commit_is_read_once_however_often_it_is_polled(
    chains: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = new_chain(chains)
    put(chain, 0, 1, 2, size=1 << 14)
    path = chain.directory / "00000000.seg"
    whole = path.read_bytes()
    last = len(whole) - 48  # the COMMIT: 40 bytes, an empty map, and padding
    assert kinds_in(whole[last:]) == ["COMMIT"]
    path.write_bytes(whole[:last])
    reader, reads, pread = ChainReader(chains, chain.name), list[int](), os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: reads.append(offset) or pread(fd, size, offset))
    assert tickets(reader) == []
    assert min(reads) == 0
    for _ in range(3):
        reads.clear()
        assert tickets(reader) == []
        assert reads == [last]
    path.write_bytes(whole)
    assert tickets(reader) == [0, 1, 2]
    assert sum(reader.sizes.values()) == len(whole)


def test_a_hole_of_zeros_is_waited_for(chains: Path) -> None:
    """Pages may arrive out of order: the end of a commit before its beginning."""
    chain = new_chain(chains)
    put(chain, 0)
    put(chain, 1)
    path = chain.directory / "00000000.seg"
    whole = path.read_bytes()
    half = len(whole) // 2
    reader = ChainReader(chains, chain.name)
    path.write_bytes(bytes(half) + whole[half:])
    assert tickets(reader) == []
    path.write_bytes(whole)
    assert tickets(reader) == [0, 1]


def test_a_record_out_of_sequence_is_not_read(chains: Path) -> None:
    chain = new_chain(chains)
    put(chain, 0)
    with (chain.directory / "00000000.seg").open("ab") as file:
        file.write(frame(RecordType.DATA, 9, chain.name.owner, {"ticket": 1}))
        file.write(frame(RecordType.COMMIT, 10, chain.name.owner, {}))
    assert tickets(ChainReader(chains, chain.name)) == [0]


def test_segments_roll_and_a_seal_names_one_that_exists(chains: Path) -> None:
    chain = new_chain(chains, segment_bytes=300)  # two commits
    reader = ChainReader(chains, chain.name)
    seen = []
    for ticket in range(6):
        put(chain, ticket, size=100)
        seen += tickets(reader)
    assert seen == list(range(6))
    assert len(segments(chain)) == 4
    chain.end()
    assert tickets(reader) == [] and reader.ended


def test_bodies_larger_than_the_window_are_skipped(chains: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = new_chain(chains)
    put(chain, 0, 1, size=1 << 20)
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: read.append(size) or pread(fd, size, offset))
    assert tickets(ChainReader(chains, chain.name)) == [0, 1]
    assert sum(read) < 1 << 19


def test_reclaim_deletes_whole_finished_segments_from_the_front(chains: Path) -> None:
    chain = new_chain(chains, segment_bytes=200)
    put(chain, 0, 1, size=100)
    put(chain, 2, 3, size=100)
    put(chain, 1, 4, size=100)
    assert len(segments(chain)) == 4
    chain.reclaim(1)
    assert len(segments(chain)) == 4
    chain.reclaim(4)
    assert segments(chain) == ["00000002.seg", "00000003.seg"]
    chain.reclaim(5)
    assert segments(chain) == ["00000003.seg"]


def test_a_reader_of_an_old_chain_begins_where_it_was_reclaimed_to_and_jumps_a_gap(chains: Path) -> None:
    chain = new_chain(chains, segment_bytes=100)
    for ticket in range(5):
        put(chain, ticket, size=100)
    chain.reclaim(1)
    (chain.directory / "00000002.seg").unlink()
    assert tickets(ChainReader(chains, chain.name)) == [1]
    assert tickets(ChainReader(chains, chain.name), last=True) == [1, 3, 4]


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO])
def test_a_stale_handle_is_opened_again(chains: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    chain = new_chain(chains)
    put(chain, 0)
    pread, failures = os.pread, [2]

    def failing(fd: int, size: int, offset: int) -> bytes:
        if failures[0]:
            failures[0] -= 1
            raise OSError(error, os.strerror(error))
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", failing)
    reader = ChainReader(chains, chain.name)
    assert tickets(reader) == [0]
    failures[0] = 99
    with pytest.raises(OSError, match=os.strerror(error)):
        reader.poll()


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("ends", [False, True])
def test_a_seal_is_read_again_where_its_file_could_not_be_closed(
    chains: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    chain = new_chain(chains, segment_bytes=100)
    put(chain, 0, size=100)
    put(chain, 1)
    if ends:
        chain.end()
    close, failures = os.close, [1]

    def failing(fd: int) -> None:
        close(fd)
        if failures[0]:
            failures[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", failing)
    reader = ChainReader(chains, chain.name)
    assert (tickets(reader), reader.ended) == ([0, 1], ends)
    assert failures == [0]
