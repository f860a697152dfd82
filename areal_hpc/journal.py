"""The step journal: what each optimizer step was trained on and what was dropped, one append-only file an attempt.

    journal = Journal(run, epoch)                      the trainer's rank 0, once in an attempt
    journal.step(step, trained, dropped)               after each optimizer step
    journal.checkpoint(step, dropped)                  before the checkpoint of ``step`` is written; durable afterwards
    entries(run, epoch)                                whoever proves, replays or archives

    journal/e00000003.log   a line each: CRC-32C as 8 hexadecimal digits, a space, one JSON object
        {"format": 1, "epoch": 3}
        {"step": 12, "trained": [[chain, ticket, position, prompt id, [epoch, step of its ticket]], ...],
                     "dropped": [[chain, ticket, position, reason, consumed], ...]}
        {"checkpoint": 12, "dropped": [...]}

Every checksum goes on from the one of the line before, so a line that is missing, changed or out of place ends what is
believed, as a torn last line does. Of an attempt that a later one went on from, only the lines up to the mark of the
checkpoint between them belong to the run: what came after it was taken back (``up_to_checkpoint``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c

from areal_hpc.errors import RunDirError
from areal_hpc.fs import fsync_directory, make_private_directory
from areal_hpc.privacy import open_private
from areal_hpc.run_dir import RunDir
from areal_hpc.types import Drop, Dropped, GroupRef, WeightVersion
from areal_hpc.waits import FILE_SYSTEM, waiting

FORMAT = 1
CHECKSUM_DIGITS = 8


class Kind(StrEnum):
    """What a line of the journal says."""

    STEP = "step"
    """An optimizer step was done with these groups."""
    CHECKPOINT = "checkpoint"
    """Everything so far is in the checkpoint of this step, should that become whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A group that a step was trained on."""

    chain: str
    ticket: int
    position: int
    prompt_id: str
    version: WeightVersion  # of its ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line. ``dropped``: what ended without training since the line before it."""

    kind: Kind
    step: int
    trained: tuple[Trained, ...]  # in the order in which they were claimed; empty for a checkpoint
    dropped: tuple[Dropped, ...]


class Journal:
    """The one writer of an attempt's journal.

    Raises:
        RunDirError: this attempt has a journal already: two trainers believe that they own it.
    """

    def __init__(self, run: RunDir, epoch: int) -> None:
        self._path = _path(run, epoch)
        make_private_directory(run.journal)
        self._crc = 0
        try:
            fd = open_private(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise RunDirError(f"{self._path} exists; stop the other trainer and start the run again") from None
        self._file: BinaryIO = os.fdopen(fd, "wb")
        self._append({"format": FORMAT, "epoch": epoch})
        fsync_directory(run.journal)

    def step(self, step: int, trained: Sequence[GroupRef], dropped: Sequence[Dropped]) -> None:
        """Note an optimizer step; other processes see it, and a power cut may still take it.

        Raises:
            OSError: the file system refused; the attempt cannot go on, since its proof would have a hole.
        """
        groups = [[ref.chain, ref.ticket, ref.position, ref.prompt_id, ref.version] for ref in trained]
        self._append({Kind.STEP: step, "trained": groups, "dropped": _plain(dropped)})

    def checkpoint(self, step: int, dropped: Sequence[Dropped]) -> None:
        """Make all that was noted durable, with a mark that says where the checkpoint of ``step`` stands.

        Raises:
            OSError: the file system refused; the checkpoint must not be written.
        """
        self._append({Kind.CHECKPOINT: step, "dropped": _plain(dropped)})
        with waiting(f"writing {self._path}", FILE_SYSTEM, limit_s=None):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _append(self, value: Mapping[str, Any]) -> None:
        text = json.dumps(value, separators=(",", ":")).encode()
        self._crc = google_crc32c.extend(self._crc, text)
        with waiting(f"writing {self._path}", FILE_SYSTEM, limit_s=None):
            self._file.write(b"%08x %s\n" % (self._crc, text))
            self._file.flush()


def _path(run: RunDir, epoch: int) -> Path:
    return run.journal / f"e{epoch:08d}.log"


def _plain(dropped: Sequence[Dropped]) -> list[list[Any]]:
    return [[one.chain, one.ticket, one.position, one.reason, one.consumed] for one in dropped]


def entries(run: RunDir, epoch: int) -> list[Entry]:
    """The journal of attempt ``epoch`` as far as it is whole; empty where the attempt kept none.

    Raises:
        RunDirError: it has a format that this version does not read.
    """
    path, found, crc = _path(run, epoch), list[Entry](), 0
    if not path.is_file():
        return found
    with path.open("rb") as file:
        for number, line in enumerate(file):
            told, text = line[:CHECKSUM_DIGITS], line[CHECKSUM_DIGITS + 1 : -1]
            crc = google_crc32c.extend(crc, text)
            if told != b"%08x" % crc or not line.endswith(b"\n"):
                break
            value = json.loads(text)
            if number:
                found.append(_entry(value))
            elif value != {"format": FORMAT, "epoch": epoch}:
                raise RunDirError(f"{path} begins with {value}; read it with the version of areal-hpc that wrote it")
    return found


def _entry(value: Mapping[str, Any]) -> Entry:
    kind = Kind.STEP if Kind.STEP in value else Kind.CHECKPOINT
    return Entry(
        kind=kind,
        step=value[kind],
        trained=tuple(
            Trained(chain=chain, ticket=ticket, position=position, prompt_id=prompt_id, version=WeightVersion(*version))
            for chain, ticket, position, prompt_id, version in value.get("trained", ())
        ),
        dropped=tuple(
            Dropped(chain=chain, ticket=ticket, position=position, reason=Drop(reason), consumed=consumed)
            for chain, ticket, position, reason, consumed in value["dropped"]
        ),
    )


def up_to_checkpoint(all_entries: Sequence[Entry], step: int) -> list[Entry] | None:
    """The entries that the checkpoint of ``step`` covers, in order; None where the journal has no mark of it."""
    marks = [index for index, entry in enumerate(all_entries) if (entry.kind, entry.step) == (Kind.CHECKPOINT, step)]
    return list(all_entries[: marks[-1] + 1]) if marks else None
