"""A chain: everything one writer process writes in its life, as an append-only log in segment files.

    ring/chains/<slot>.<epoch>.<incarnation>.<random>/00000000.seg 00000001.seg ...

One process writes a chain, ever, at offsets it chooses itself (appending through the kernel is not atomic between
clients of a network file system). A restarted process begins a new chain, and the random part makes sure that no name
comes back: readers remember by name what they have seen. Records wait in memory, in the form that they get on disk,
until a *commit* makes a batch of them durable:

    data -> fdatasync -> COMMIT -> fdatasync          a reader trusts what lies before a COMMIT, so it may skip bodies
    create next -> fsync directory -> SEAL names it   a reader never asks for a name that is not there

Where more records wait already, a COMMIT goes out in front of them, by the same write and sync: a backlog costs one of
each a batch. A write that fails is tried again with the same bytes at the same offset: part of it may be on disk, and a
reader may have seen all of it.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from areal_hpc.buffer.records import RecordType, checksum, frame, parts
from areal_hpc.errors import RunDirError, WaitTimeout
from areal_hpc.fs import fsync_directory, make_private_directory
from areal_hpc.patience import PASSING, naming
from areal_hpc.privacy import open_private
from areal_hpc.waits import FILE_SYSTEM, waiting

COMMIT_BYTES = 4 << 20
BUFFER_BYTES = 2 * COMMIT_BYTES
"""What a batch is collected in. A batch is open below COMMIT_BYTES, so a record of as many fits."""
NUM_SPARE = 2
"""Buffers kept for the batches to come, while others are filled and written: the page faults of fresh memory cost more
than all else in a commit."""
WRITE_BYTES = 1 << 20
"""At most so many in a call. A larger one may get pages of 2 MiB, and a virtual machine whose host takes these back
as soon as they are free gets each of their 512 parts by a fault, which takes ten times as long as to write it."""
OWED_BYTES = len(frame(RecordType.COMMIT, 0, 0, {}))
"""Room at the start of a buffer, for the COMMIT of the batch before."""
STOP_S = 60.0


class ChainName(NamedTuple):
    """Who wrote a chain. Its text is the directory's name; within a slot it sorts by age."""

    slot: int
    epoch: int
    incarnation: int
    random: str

    def __str__(self) -> str:
        return f"{self.slot:05d}.{self.epoch:08d}.{self.incarnation:06d}.{self.random}"

    @classmethod
    def new(cls, slot: int, epoch: int, incarnation: int) -> ChainName:
        return cls(slot, epoch, incarnation, secrets.token_hex(4))

    @classmethod
    def parse(cls, text: str) -> ChainName | None:
        """The name that ``text`` is, or None where it is none of ours."""
        match = re.fullmatch(r"(\d{5})\.(\d{8})\.(\d{6})\.([0-9a-f]{8})", text)
        return cls(int(match[1]), int(match[2]), int(match[3]), match[4]) if match else None

    @property
    def owner(self) -> int:
        return checksum(str(self).encode())


def segment_name(number: int) -> str:
    return f"{number:08d}.seg"


class _Batch:
    """Records that become durable together, as they are on disk; nothing changes them once the batch is closed.

    A body is summed and copied when it is handed over, while the processor's caches still hold it.
    """

    __slots__ = ("buffer", "commit", "newest_ticket", "next_seq", "since", "size")

    def __init__(self, buffer: memoryview) -> None:
        self.buffer, self.size = buffer, OWED_BYTES
        self.since = time.monotonic()
        self.newest_ticket = self.next_seq = -1
        self.commit = b""
        """Its COMMIT record, to be written once the batch is durable; empty while the batch is open."""

    def add(self, record: Sequence[bytes], ticket: int) -> None:
        end = self.size + sum(map(len, record))
        if end > len(self.buffer):
            grown = _buffer(end)
            grown[: self.size] = self.buffer[: self.size]
            self.buffer = grown
        for part in record:
            self.buffer[self.size : self.size + len(part)] = part
            self.size += len(part)
        self.newest_ticket = max(self.newest_ticket, ticket)

    def close(self, seq: int, owner: int) -> None:
        self.commit, self.next_seq = frame(RecordType.COMMIT, seq, owner, {}), seq + 1

    def data(self, owed: bytes) -> memoryview:
        """Its bytes, behind those of the COMMIT of the batch before where that is still owed."""
        start = OWED_BYTES - len(owed)
        self.buffer[start:OWED_BYTES] = owed
        return self.buffer[start : self.size]


def _buffer(size: int) -> memoryview:
    """Memory that costs nothing before it is used; a bytearray would be filled with zeros."""
    return np.empty(size, np.uint8).data


@dataclass(slots=True)
class _Segment:
    number: int
    newest_ticket: int = -1
    """The highest ticket that any record in it speaks of."""


@dataclass(slots=True)
class _File:
    fd: int
    number: int
    offset: int = 0
    seal: bytes = b""
    """The SEAL being written, once the next segment exists."""


class ChainWriter:
    """Appends records; ``commit`` makes them durable. ``append`` may be called while another thread commits."""

    def __init__(self, chains: Path, name: ChainName, segment_bytes: int) -> None:
        self.name = name
        self.directory = make_private_directory(chains / str(name))
        self._owner = name.owner
        self.wake = threading.Condition()  # guards the three fields below; notified when there is something to do
        self._batches: deque[_Batch] = deque()  # all but the last one are closed
        self._seq = 0  # of the next record
        self._spare: list[memoryview] = []  # buffers that no batch needs
        self._io = threading.Lock()  # guards everything below: one commit at a time
        self._segment_bytes = segment_bytes
        self._batch: _Batch | None = None  # on its way to disk
        self._owed = b""  # the COMMIT of what is durable from ``offset`` back
        self._next_seq = 0  # behind what is durable, with what is owed
        self._next: _File | None = None
        self._sealed: list[_Segment] = []
        self._segment = _Segment(0)
        self._file = self._create_segment(0)

    def append(self, type_: RecordType, ticket: int, meta: Mapping[str, Any], body: bytes = b"") -> None:
        """Hand over a record that speaks of ``ticket``; durable after the next commit."""
        with self.wake:
            is_first = not self._batches
            batch = self._open_batch()
            batch.add(parts(type_, self._seq, self._owner, {"ticket": ticket, **meta}, body), ticket)
            self._seq += 1
            is_full = batch.size >= COMMIT_BYTES
            if is_full:
                self._close(batch)
            if is_first or is_full:
                self.wake.notify_all()  # nobody is woken for a record that changes nothing about when to commit

    def due_in(self, commit_s: float) -> float | None:
        """Seconds until a commit should begin, or None while there is nothing to commit. Call it holding ``wake``."""
        if not self._batches:
            return None
        if (oldest := self._batches[0]).commit:
            return 0.0
        return max(0.0, oldest.since + commit_s - time.monotonic())

    def _open_batch(self) -> _Batch:
        if not self._batches or self._batches[-1].commit:
            self._batches.append(_Batch(self._spare.pop() if self._spare else _buffer(BUFFER_BYTES)))
        return self._batches[-1]

    def _close(self, batch: _Batch) -> None:
        batch.close(self._seq, self._owner)
        self._seq += 1

    def commit(self) -> None:
        """Make everything appended so far durable and visible.

        Raises:
            OSError: it is not; call again, nothing is lost.
        """
        with self._io:
            self._finish_seal()
            while batch := self._batch or self._take():
                self._batch = batch
                self._write_batch(batch)
                self._batch = None
                self._keep(batch.buffer)
                if self._file.offset >= self._segment_bytes:
                    self._pay()
                    self._roll()
            self._pay()

    def reclaim(self, finished: int) -> None:
        """Delete the oldest sealed segments that speak only of tickets below ``finished``."""
        with self._io:
            while self._sealed and self._sealed[0].newest_ticket < finished:
                (self.directory / segment_name(self._sealed[0].number)).unlink(missing_ok=True)
                self._sealed.pop(0)

    def end(self) -> None:
        """Commit what is left and write the end of the chain.

        Raises:
            OSError: the file system refused; what was committed before stays valid.
        """
        try:
            self.commit()
            with self._io:
                self._put(self._seal(None))
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the files, as a killed process would: what is not committed is lost. Twice is once."""
        with self._io:
            for file in (self._file, self._next):
                if file is not None and file.fd >= 0:
                    fd, file.fd = file.fd, -1
                    with naming(self.directory / segment_name(file.number)):
                        os.close(fd)

    def _take(self) -> _Batch | None:
        """The oldest batch, closed: readers get on with it while the next one is written."""
        with self.wake:
            if not self._batches:
                return None
            if not (batch := self._batches.popleft()).commit:
                self._close(batch)
            return batch

    def _keep(self, buffer: memoryview) -> None:
        """Take a buffer back that no disk needs any more; one that a large record or a backlog asked for goes."""
        with self.wake:
            if len(buffer) == BUFFER_BYTES and len(self._spare) < NUM_SPARE:
                self._spare.append(buffer)

    def _write_batch(self, batch: _Batch) -> None:
        self._put(batch.data(self._owed))
        self._owed, self._next_seq = batch.commit, batch.next_seq
        self._segment.newest_ticket = max(self._segment.newest_ticket, batch.newest_ticket)

    def _pay(self) -> None:
        """Write the COMMIT that is owed by itself, since no more records wait for the same write."""
        if self._owed:
            self._put(self._owed)
            self._owed = b""

    def _put(self, data: bytes | memoryview) -> None:
        """Append ``data`` to the segment, behind what is durable; on return it is durable as well."""
        written = 0
        with waiting(f"writing {self.directory}", FILE_SYSTEM, limit_s=None), naming(self._path()):
            while written < len(data):
                part = memoryview(data)[written : written + WRITE_BYTES]
                written += os.pwrite(self._file.fd, part, self._file.offset + written)
            os.fdatasync(self._file.fd)
        self._file.offset += len(data)

    def _path(self) -> Path:
        return self.directory / segment_name(self._file.number)

    def _roll(self) -> None:
        """Begin the next segment. Where none can be created this one simply grows; the next commit tries again."""
        try:
            self._next = self._create_segment(self._file.number + 1)
        except OSError as error:
            if error.errno not in PASSING:
                raise
            return
        self._file.seal = self._seal(segment_name(self._next.number))
        self._finish_seal()

    def _seal(self, following: str | None) -> bytes:
        """The SEAL record. It takes no sequence number, since records that wait already have the next ones."""
        return frame(RecordType.SEAL, self._next_seq, self._owner, {"next": following})

    def _finish_seal(self) -> None:
        if self._next is None:
            return
        self._put(self._file.seal)
        done, path = self._file.fd, self._path()
        self._sealed.append(self._segment)
        self._file, self._next = self._next, None
        self._segment = _Segment(self._file.number)
        with naming(path):
            os.close(done)  # last: it is closed even where close(2) reports an error, and all of it is durable already

    def _create_segment(self, number: int) -> _File:
        path = self.directory / segment_name(number)
        fd = open_private(path, os.O_WRONLY | os.O_CREAT)  # it is there when an earlier try failed below
        try:
            fsync_directory(self.directory)
        except OSError:
            os.close(fd)
            raise
        return _File(fd, number)


class GroupCommit:
    """The thread that commits a chain, by bytes or by time, and deletes what is no longer needed.

    A commit that fails is repeated each ``commit_s``; meanwhile ``failing`` is true and writers should reserve nothing.
    """

    def __init__(self, chain: ChainWriter, commit_s: float, patience_s: float) -> None:
        self._chain, self._commit_s, self._patience_s = chain, commit_s, patience_s
        self._stopping = False
        self._finished = 0
        self._error: OSError | None = None
        self._failing_since = 0.0
        self._thread = threading.Thread(target=self._run, name=f"commit {chain.name}", daemon=True)
        self._thread.start()

    @property
    def failing(self) -> bool:
        return self._error is not None

    def check(self) -> None:
        """Check that commits succeed, or have failed for a short time only.

        Raises:
            RunDirError: the chain has not been writable for ``patience_s``, or never will be.
        """
        assert self._stopping or self._thread.is_alive(), f"the thread that commits {self._chain.name} has died"
        error = self._error
        if error is None:
            return
        lasted_s = time.monotonic() - self._failing_since
        if error.errno not in PASSING or lasted_s > self._patience_s:
            raise RunDirError(
                f"{self._chain.directory} could not be written for {lasted_s:.0f} s: {error.strerror}; "
                "free space or quota, or mount it writable, then start the run again"
            ) from error

    def reclaim(self, finished: int) -> None:
        """Delete segments that speak only of tickets below ``finished``, soon."""
        with self._chain.wake:
            self._finished = finished
            self._chain.wake.notify_all()

    def stop(self) -> None:
        """End the thread; what it has not committed is left to the caller.

        Raises:
            WaitTimeout: the file system has not answered for STOP_S.
        """
        with self._chain.wake:
            self._stopping = True
            self._chain.wake.notify_all()
        with waiting(f"writing {self._chain.directory}", FILE_SYSTEM, limit_s=STOP_S):
            self._thread.join(STOP_S)
        if self._thread.is_alive():
            raise WaitTimeout(f"waited {STOP_S:g} s for the file system to write {self._chain.directory}")

    def _run(self) -> None:
        reclaimed = 0
        while self._wait(reclaimed):
            try:
                self._chain.commit()
                finished = self._finished
                if finished > reclaimed:
                    self._chain.reclaim(finished)
                    reclaimed = finished
            except OSError as error:
                if self._error is None:
                    self._failing_since = time.monotonic()
                self._error = error
            else:
                self._error = None

    def _wait(self, reclaimed: int) -> bool:
        """Sleep until there is something to do; False when it is time to end."""
        with self._chain.wake:
            if self._error is not None:
                self._chain.wake.wait_for(lambda: self._stopping, self._commit_s)
                return not self._stopping
            while not self._stopping and self._finished <= reclaimed:
                due_s = self._chain.due_in(self._commit_s)
                if due_s == 0.0:
                    break
                self._chain.wake.wait(due_s)
            return not self._stopping
