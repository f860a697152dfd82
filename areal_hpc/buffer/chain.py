"""A chain: everything one writer process writes in its life, as an append-only log in segment files.

    ring/chains/<slot>.<epoch>.<incarnation>.<random>/00000000.seg 00000001.seg ...

One process writes a chain, ever, at offsets it chooses itself (appending through the kernel is not atomic between
clients of a network file system). A restarted process begins a new chain, and the random part makes sure that no name
comes back: readers remember by name what they have seen. Records wait in memory until a *commit* makes a batch durable:

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from areal_hpc.buffer.records import RecordType, checksum, frame, parts
from areal_hpc.errors import RunDirError, WaitTimeout
from areal_hpc.fs import fsync_directory, make_private_directory
from areal_hpc.patience import PASSING, naming
from areal_hpc.privacy import open_private
from areal_hpc.waits import FILE_SYSTEM, waiting

COMMIT_BYTES = 4 << 20
BUFFER_BYTES = 2 * COMMIT_BYTES
"""Memory that a chain keeps for its batches: the page faults of fresh memory cost more than all else in a commit."""
STOP_S = 60.0


class ChainName(NamedTuple):
    """Who wrote a chain. As text the directory's name; order by value is order of age within a slot."""

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


class _Pending(NamedTuple):
    type: RecordType
    ticket: int
    meta: Mapping[str, Any]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Batch:
    """Records that become durable together; never changed once they may be on disk."""

    data: memoryview
    """Begins with the COMMIT of the batch before, where that is still owed."""
    commit: bytes
    """What they are owed once they are durable."""
    newest_ticket: int


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
        self.wake = threading.Condition()  # guards the three fields below; notified when there is something to do
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        self._pending_since = 0.0
        self._io = threading.Lock()  # guards everything below: one commit at a time
        self._segment_bytes = segment_bytes
        self._seq = 0
        self._batch: _Batch | None = None
        self._owed = b""  # the COMMIT of what is durable from ``offset`` back
        self._buffer = bytearray(BUFFER_BYTES)  # holds the data of ``_batch``; pages that no batch needs cost nothing
        self._next: _File | None = None
        self._sealed: list[_Segment] = []
        self._segment = _Segment(0)
        self._file = self._create_segment(0)

    def append(self, type_: RecordType, ticket: int, meta: Mapping[str, Any], body: bytes = b"") -> None:
        """Hand over a record that speaks of ``ticket``; durable after the next commit."""
        with self.wake:
            was_due = self._pending_bytes >= COMMIT_BYTES
            if not self._pending:
                self._pending_since = time.monotonic()
            self._pending.append(_Pending(type_, ticket, {"ticket": ticket, **meta}, body))
            self._pending_bytes += len(body)
            if len(self._pending) == 1 or (self._pending_bytes >= COMMIT_BYTES and not was_due):
                self.wake.notify_all()  # nobody is woken for a record that changes nothing about when to commit

    def due_in(self, commit_s: float) -> float | None:
        """Seconds until a commit should begin, or None while there is nothing to commit. Call it holding ``wake``."""
        if not self._pending:
            return None
        if self._pending_bytes >= COMMIT_BYTES:
            return 0.0
        return max(0.0, self._pending_since + commit_s - time.monotonic())

    def commit(self) -> None:
        """Make everything appended so far durable and visible.

        Raises:
            OSError: it is not; call again, nothing is lost.
        """
        with self._io:
            self._finish_seal()
            while batch := self._batch or self._take_pending():
                self._batch = batch
                self._write_batch(batch)
                self._batch = None
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

    def _take_pending(self) -> _Batch | None:
        """The oldest records, up to COMMIT_BYTES: readers get on with a batch while the next one is written."""
        with self.wake:
            taken = self._oldest()
            pending, self._pending = self._pending[:taken], self._pending[taken:]
            self._pending_bytes -= sum(len(p.body) for p in pending)
        if not pending:
            return None
        owner = self.name.owner
        frames = [part for i, p in enumerate(pending) for part in parts(p.type, self._seq + i, owner, p.meta, p.body)]
        self._seq += len(pending)
        commit = frame(RecordType.COMMIT, self._seq, owner, {})
        self._seq += 1
        return _Batch(self._joined([self._owed, *frames]), commit, max(p.ticket for p in pending))

    def _joined(self, frames: list[bytes]) -> memoryview:
        if sum(map(len, frames)) > BUFFER_BYTES:
            return memoryview(b"".join(frames))
        size = 0
        for part in frames:
            self._buffer[size : size + len(part)] = part
            size += len(part)
        return memoryview(self._buffer)[:size]

    def _oldest(self) -> int:
        """How many of the oldest records reach COMMIT_BYTES; all of them where they do not."""
        size = 0
        for number, pending in enumerate(self._pending, start=1):
            size += len(pending.body)
            if size >= COMMIT_BYTES:
                return number
        return len(self._pending)

    def _write_batch(self, batch: _Batch) -> None:
        self._put(batch.data)
        self._owed = batch.commit
        self._segment.newest_ticket = max(self._segment.newest_ticket, batch.newest_ticket)

    def _pay(self) -> None:
        """Write the COMMIT that is owed by itself, since no more records wait for the same write."""
        if self._owed:
            self._put(self._owed)
            self._owed = b""

    def _put(self, data: bytes | memoryview) -> None:
        """Write ``data`` behind what is durable; it is so, too, on return."""
        written = 0
        with waiting(f"writing {self.directory}", FILE_SYSTEM, limit_s=None), naming(self._path()):
            while written < len(data):
                written += os.pwrite(self._file.fd, memoryview(data)[written:], self._file.offset + written)
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
        seal = frame(RecordType.SEAL, self._seq, self.name.owner, {"next": following})
        self._seq += 1
        return seal

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
        """
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
