"""Reading chains: what a tail follows, and how one group is fetched.

Made for close-to-open consistency: a file is opened on every poll, since that is what revalidates cached attributes
and pages; between polls is remembered how far the tail was read, and the records that no COMMIT has followed yet: a
writer never puts other bytes in a record's place. Bytes that are not a valid record with the expected sequence number
mean "not yet": a hole of zeros, a torn write, a tail that is not visible here so far.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from areal_hpc.buffer.chain import ChainName, segment_name
from areal_hpc.buffer.quota import Segment
from areal_hpc.buffer.records import (
    HEADER_BYTES,
    Body,
    Header,
    RecordType,
    checksum,
    decode_group,
    group_ref,
    parse_header,
    parse_meta,
)
from areal_hpc.errors import CorruptRecord
from areal_hpc.fs import names_in
from areal_hpc.patience import RETRY_PAUSES_S, naming, retried
from areal_hpc.protocols import Fetch
from areal_hpc.run_dir import RunDir
from areal_hpc.types import GroupRef, TrajectoryGroup
from areal_hpc.waits import FILE_SYSTEM, waiting

T = TypeVar("T")
WINDOW_BYTES = 1 << 13


class Found(NamedTuple):
    """One committed record and where it lies; nobody has looked at its body."""

    segment: int
    offset: int
    header: Header
    meta: dict[str, Any]

    @property
    def type(self) -> RecordType:
        return self.header.type

    def ref(self, chain: str) -> GroupRef:
        """The reference to the group that it holds, of a DATA record."""
        body = Body.of(self.header, self.meta, self.offset)
        return group_ref(chain, self.meta, segment=self.segment, offset=self.offset, seq=self.header.seq, handle=body)


def reading(path: Path, read: Callable[[int], T]) -> T | None:
    """What ``read`` makes of a fresh descriptor, or None where the file is not there (yet, or any more).

    A stale handle or an I/O error is tried again a few times; ``read`` may run again.
    """
    try:
        return retried(lambda: _read(path, read))
    except FileNotFoundError:
        return None


def _read(path: Path, read: Callable[[int], T]) -> T:
    with waiting(f"reading {path}", FILE_SYSTEM, limit_s=None), naming(path):
        fd = os.open(path, os.O_RDONLY)
        try:
            return read(fd)
        finally:
            os.close(fd)


class _Window:
    """What of a file was read last, by reads of at least WINDOW_BYTES."""

    def __init__(self, fd: int) -> None:
        self._fd, self._base, self._data = fd, 0, b""

    def show(self, offset: int, size: int) -> tuple[bytes, int]:
        """Bytes, and where in them those at ``offset`` begin; ``size`` of them, or as many as the file has."""
        start = offset - self._base
        if start < 0 or start + size > len(self._data):
            self._base, self._data, start = offset, os.pread(self._fd, max(size, WINDOW_BYTES), offset), 0
        return self._data, start


class ChainReader:
    """Follows one chain. ``poll`` gives the records committed since the last one, each exactly once."""

    def __init__(self, chains: Path, name: ChainName) -> None:
        self.name = name
        self.directory = chains / str(name)
        self.ended = False  # the writer has said that nothing follows
        self.newest_tickets: dict[int, int] = {}  # segment -> the highest ticket that any record in it speaks of
        self.sizes: dict[int, int] = {}  # segment -> its bytes as it was looked at last, also what is not committed
        self._owner = name.owner
        self._segment: int | None = None
        self._offset = 0  # in the segment: what has been read
        self._seq: int | None = 0
        self._batch: list[Found] = []  # what no COMMIT has followed yet

    def poll(self, *, last: bool = False) -> list[Found]:
        """New committed records. ``last``: the writer is gone, so a missing segment is jumped over.

        Nothing is lost by the jump: positions that lay in the gap are in no consumed set, so they are issued again.
        """
        found: list[Found] = []
        if self._segment is None and not self._begin(self._listed(-1)):
            return found
        while not self.ended:
            following = self._poll_segment(found)
            if following is None and not (last and self._begin(self._listed(self._segment))):
                return found
            self._begin(following)
        return found

    def segments(self, *, live: bool) -> list[Segment]:
        """What is there, in order; the last one is open while the writer is ``live``."""
        newest = accumulate((ticket for _, ticket in sorted(self.newest_tickets.items())), max)
        return [
            Segment(str(self.name), self.sizes[number], ticket, live and number == self._segment)
            for number, ticket in zip(sorted(self.newest_tickets), newest, strict=True)
        ]

    def forget(self, segment: int) -> None:
        """It is deleted."""
        del self.newest_tickets[segment], self.sizes[segment]

    def forget_deleted(self, low: int) -> None:
        """Of the segments that speak only of tickets below ``low`` forget those that the writer has deleted."""
        for number, ticket in sorted(self.newest_tickets.items()):
            if ticket >= low or number == self._segment:
                return
            if reading(self.directory / segment_name(number), lambda fd: True):
                return
            self.forget(number)

    def _listed(self, after: int | None) -> int | None:
        """The lowest segment above ``after`` that the directory lists."""
        assert after is not None
        try:
            names = names_in(self.directory)
        except FileNotFoundError:
            return None
        numbers = (int(name[:8]) for name in names if re.fullmatch(r"\d{8}\.seg", name))
        return min((number for number in numbers if number > after), default=None)

    def _begin(self, segment: int | None) -> bool:
        """Go on at the start of ``segment``, whatever its first sequence number is."""
        if segment is None:
            return False
        self._segment, self._offset = segment, 0
        self._seq = None
        self._batch.clear()
        return True

    def _poll_segment(self, found: list[Found]) -> int | None:
        """Read on in the current segment; the number of the next one once this one is sealed."""
        assert self._segment is not None
        return reading(self.directory / segment_name(self._segment), lambda fd: self._scan(fd, found))

    def _scan(self, fd: int, found: list[Found]) -> int | None:
        assert self._segment is not None
        window, size = _Window(fd), os.fstat(fd).st_size
        self.newest_tickets.setdefault(self._segment, -1)
        self.sizes[self._segment] = size
        while True:
            data, at = window.show(self._offset, HEADER_BYTES)
            header = parse_header(data, self._owner, at)
            if header is None or self._seq not in (header.seq, None):
                return None
            if (end := self._offset + header.record_bytes) > size:
                return None
            data, at = window.show(self._offset, header.head_bytes)
            if (meta := parse_meta(header, data, at)) is None:
                return None
            if header.type is RecordType.SEAL:  # read again if the file cannot be closed
                assert not self._batch, f"{self.name}: a SEAL behind records that are not committed"
                return self._sealed(meta["next"])
            record = Found(self._segment, self._offset, header, meta)
            self._offset, self._seq = end, header.seq + 1
            if header.type is RecordType.COMMIT:
                self._accept(found)
            else:
                self._batch.append(record)

    def _accept(self, found: list[Found]) -> None:
        assert self._segment is not None
        newest = max((record.meta["ticket"] for record in self._batch), default=-1)
        self.newest_tickets[self._segment] = max(self.newest_tickets[self._segment], newest)
        found.extend(self._batch)
        self._batch.clear()

    def _sealed(self, following: str | None) -> int | None:
        self.ended = following is None
        return None if following is None else int(following[:8])


class GroupFetcher:
    """Reads the groups that a plan names; any rank of the trainer may have one."""

    def __init__(self, run: RunDir, *, sleep: Callable[[float], object] = time.sleep) -> None:
        self._chains = run.ring / "chains"
        self._sleep = sleep

    def read(self, ref: GroupRef) -> TrajectoryGroup:
        """The group at ``ref``. Bytes that fail their checksum are read again through a fresh open: a network file
        system may have shown old pages.

        Raises:
            CorruptRecord: they fail every time; names chain, segment and sequence number.
        """
        for pause_s in (0.0, *RETRY_PAUSES_S):
            if pause_s:
                self._sleep(pause_s)
            if (group := self._read_once([ref])[0]) is not None:
                return group
        where = f"chain {ref.chain}, segment {ref.segment}, record {ref.seq} (offset {ref.offset})"
        raise CorruptRecord(f"{where} fails its checksum; position {ref.position} must be run again")

    def read_all(self, refs: Sequence[GroupRef]) -> list[TrajectoryGroup | CorruptRecord]:
        """The groups at ``refs``, in their order, or why one cannot be had. Each segment is opened once: opening and
        closing are requests to the metadata server that all jobs share, reading is not."""
        segments: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for index, ref in enumerate(refs):
            segments[ref.chain, ref.segment].append(index)
        found: dict[int, TrajectoryGroup | None] = {}
        for indices in segments.values():
            found.update(zip(indices, self._read_once([refs[index] for index in indices]), strict=True))
        return [found[index] or _or_damage(self.read, ref) for index, ref in enumerate(refs)]

    def _read_once(self, refs: Sequence[GroupRef]) -> Sequence[TrajectoryGroup | None]:
        """The groups at ``refs``, all in one segment, as one open shows them."""
        path = self._chains / refs[0].chain / segment_name(refs[0].segment)
        groups = reading(path, lambda fd: [_group_at(fd, ref) for ref in refs])
        return [None] * len(refs) if groups is None else groups


def intact(fetched: Iterable[TrajectoryGroup | CorruptRecord]) -> list[TrajectoryGroup]:
    """The groups, for a caller who cannot do without any of them.

    Raises:
        CorruptRecord: one of them is damaged.
    """
    groups: list[TrajectoryGroup] = []
    for each in fetched:
        if isinstance(each, CorruptRecord):
            raise each
        groups.append(each)
    return groups


def one_by_one(read: Callable[[GroupRef], TrajectoryGroup]) -> Fetch:
    """``read_all`` of a reader that has no better way than ``read``."""
    return lambda refs: [_or_damage(read, ref) for ref in refs]


def _or_damage(read: Callable[[GroupRef], TrajectoryGroup], ref: GroupRef) -> TrajectoryGroup | CorruptRecord:
    try:
        return read(ref)
    except CorruptRecord as error:
        return error


def _group_at(fd: int, ref: GroupRef) -> TrajectoryGroup | None:
    """None where the bytes are not those that the record's head spoke of when it was verified."""
    told = Body(*ref.handle)
    body = os.pread(fd, told.num_bytes, told.offset)
    if len(body) != told.num_bytes or checksum(body) != told.checksum:
        return None
    return decode_group(ref, body)
