"""The product with one safety step taken out, by patching; the product itself has no switches.

Each mutant is a context manager. A test then shows that the crash points of a run, or one scenario made for the step,
end in a Violation or an error with it, and do not without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from areal_hpc import checkpoint, fs
from areal_hpc.buffer import chain, ledger, reader, records, scan
from areal_hpc.buffer.chain import ChainName, ChainWriter, segment_name
from areal_hpc.buffer.records import RecordType
from areal_hpc.buffer.scan import ChainReader, Found
from areal_hpc.checkpoint import commit, files
from areal_hpc.roles.wiring import carried
from areal_hpc.roles.wiring.evaluations import Agenda
from areal_hpc.run_dir import RunDir
from areal_hpc.types import GroupRef, TrajectoryGroup

Mutant = Callable[[], Any]


def _replaced(*replacements: tuple[Any, str, Any]) -> Mutant:
    @contextmanager
    def mutant() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, value in replacements:
                stack.enter_context(patch.object(owner, name, value))
            yield

    return mutant


def _write_batch_without_sync(self: ChainWriter, batch: Any) -> None:
    """Data and COMMIT in one go, one sync at the end."""
    self._put(bytes(batch.data(self._owed)) + batch.commit)
    self._owed, self._next_seq = b"", batch.next_seq
    self._segment.newest_ticket = max(self._segment.newest_ticket, batch.newest_ticket)


def _put_without_sync(self: ChainWriter, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(self._file.fd, memoryview(data)[written:], self._file.offset + written)
    self._file.offset += len(data)


_poll = ChainReader.poll


def _poll_trusting_every_record(self: ChainReader, *, last: bool = False) -> list[Found]:
    """Records count from the moment that their head is there, with no COMMIT behind them."""
    found = _poll(self, last=last)
    found += self._batch
    self._batch.clear()
    while not self.ended and self._segment is not None:
        path = self.directory / segment_name(self._segment)
        if not path.exists():
            break
        content = path.read_bytes()
        header = records.parse_header(content[self._offset :], self.name.owner)
        if header is None or self._seq not in (header.seq, None):
            break
        meta = records.parse_meta(header, content, self._offset)
        if meta is None or header.type is RecordType.SEAL:
            break
        if header.type is not RecordType.COMMIT:
            found.append(Found(self._segment, self._offset, header, meta))
        self._offset += header.record_bytes
        self._seq = header.seq + 1
    for record in found:
        newest = self.newest_tickets.get(record.segment, -1)
        self.newest_tickets[record.segment] = max(newest, record.meta["ticket"])
    return found


def _nothing(*_: Any) -> None:
    pass


def _same_name(cls: type[ChainName], slot: int, epoch: int, incarnation: int) -> ChainName:
    return cls(slot, 1, 0, "00000000")


_init = ChainWriter.__init__


def _init_on_the_old_chain(self: ChainWriter, chains: Path, name: ChainName, segment_bytes: int) -> None:
    """A restarted writer goes on in the file that its predecessor left, behind whatever is there."""
    old = [found for text in os.listdir(chains) if (found := ChainName.parse(text)) and found.slot == name.slot]
    if not old:
        _init(self, chains, name, segment_bytes)
        return
    tail = ChainReader(chains, max(old))
    tail.poll()
    number, seq = tail._segment, tail._seq
    assert number is not None and seq is not None
    _init(self, chains, max(old), segment_bytes)
    fd = os.open(tail.directory / segment_name(number), os.O_WRONLY)
    self._file = chain._File(fd, number, os.fstat(fd).st_size)
    self._seq = self._next_seq = seq


_write = checkpoint.write


def _write_with_the_fence_first(*args: Any, still_leader: Callable[[], None], **options: Any) -> Path:
    still_leader()
    return _write(*args, **options)


def _write_in_place(
    run: RunDir, version: Any, save: Callable[[Path], None], state: Mapping[str, Any], **_: Any
) -> Path:
    """Everything durable and the manifest last, but under the final name from the beginning."""
    path = run.checkpoints / f"step-{version.step:08d}.e{version.epoch:08d}"
    fs.make_private_directory(path)
    save(path)
    fs.publish_json(path / "state.json", state)
    files.write_manifest(path, version, {})
    return path


def _covered_by_what_was_trained(self: reader.RingReader, state: Mapping[str, Any]) -> None:
    """What the loop has trained may go, whether or not a checkpoint holds it."""


_release = reader.RingReader.release


def _release_and_reclaim(self: reader.RingReader, version: Any) -> None:
    self._ledger.release()
    self._reclaim = {name: int(numbers.low) for name, numbers in self._ledger.finished.items()}
    _release(self, version)


_sealed = ledger.Ledger.sealed


class _Forgetful(set[int]):
    def __contains__(self, _: object) -> bool:
        return False


def _sealed_without_dedupe(self: ledger.Ledger, ref: Any, newest: Any) -> None:
    consumed, held = self.consumed, self._held
    self.consumed, self._held = _Forgetful(), _Forgetful(held)  # type: ignore[assignment]
    try:
        _sealed(self, ref, newest)
    finally:
        self.consumed, self._held = consumed, set(self._held)


def _publish_in_place(path: Path, data: bytes, *, durable: bool = True) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(fd, data)
    os.fsync(fd)
    os.close(fd)
    fs.fsync_directory(path.parent)


def _write_undurably(fd: int, path: Path, data: bytes, *, durable: bool = True) -> None:
    with os.fdopen(fd, "wb") as file:
        file.write(data)


def _constant_checksum(_: bytes) -> int:
    return 0


def _group_unchecked(fd: int, ref: GroupRef) -> TrajectoryGroup:
    """A fetch that believes whatever lies where the record's head said that the body does."""
    told = records.Body(*ref.handle)
    return records.decode_group(ref, os.pread(fd, told.num_bytes, told.offset))


class _Settled:
    """Whatever was asked for is taken for done."""

    def at(self, step: int, *_: Any) -> Agenda:
        return Agenda(through=step)


NO_DATA_SYNC = _replaced((ChainWriter, "_write_batch", _write_batch_without_sync))
NO_CHAIN_SYNC = _replaced((ChainWriter, "_put", _put_without_sync))
NO_COMMIT = _replaced((ChainReader, "poll", _poll_trusting_every_record))
NO_DIRECTORY_SYNC = _replaced(*((module, "fsync_directory", _nothing) for module in (fs, chain, commit, files)))
NO_FILE_SYNC_BEFORE_RENAME = _replaced((fs, "_write", _write_undurably))
PUBLISH_IN_PLACE = _replaced((fs, "publish", _publish_in_place))
CHECKPOINT_IN_PLACE = _replaced((checkpoint, "write", _write_in_place))
FENCE_BEFORE_THE_WRITE = _replaced((checkpoint, "write", _write_with_the_fence_first))
RECLAIM_WHAT_WAS_TRAINED = _replaced(
    (reader.RingReader, "covered", _covered_by_what_was_trained), (reader.RingReader, "release", _release_and_reclaim)
)
NO_DEDUPE = _replaced((ledger.Ledger, "sealed", _sealed_without_dedupe))
NO_CHECKSUM = _replaced(*((module, "checksum", _constant_checksum) for module in (records, chain, scan)))
NO_CHECKSUM_OF_BODIES = _replaced((scan, "_group_at", _group_unchecked))
CHAIN_NAMES_COME_BACK = _replaced((ChainName, "new", classmethod(_same_name)))
APPEND_TO_THE_OLD_CHAIN = _replaced((ChainWriter, "__init__", _init_on_the_old_chain))
COMMIT_WITHOUT_WHAT_IS_OWED = _replaced((carried, "agenda_of", lambda *_: _Settled()))
NO_SYNC_OF_RESULTS = _replaced((carried, "fsync_directory", _nothing))
