"""Records: the numbers of a run, one JSON line each, in one file for each process.

    role process                                    launcher, report, status
    ------------                                    ------------------------
    recorder = Recorder(attempt.records(role, i))   reader = RecordReader(attempt.telemetry)
    with recorder.span("train"): ...                for record in reader.poll(): ...
    recorder.record("step", {"step": 7, ...})

A file has one owner and only grows, and every record is one write, so a reader sees whole lines and at most one torn
line at the end. Nothing here keeps history: a run of a month needs the memory of its last record.
"""

from __future__ import annotations

import json
import logging
import math
import numbers
import os
import time
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from areal_hpc.privacy import open_private
from areal_hpc.waits import FILE_SYSTEM, waiting

log = logging.getLogger(__name__)

Value = float | int | str | None
"""None stands for a number that is not one: NaN or infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one process said at one moment. ``time`` is in seconds since 1970, by the clock of its own host."""

    time: float
    role: str
    index: int
    epoch: int
    kind: str
    values: Mapping[str, Value]

    def number(self, key: str) -> float | None:
        """The value of ``key`` where it is a finite number; None for anything else and for nothing."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return float(value)


ENVELOPE: Mapping[str, type | tuple[type, ...]] = {
    "time": (int, float),
    "role": str,
    "index": int,
    "epoch": int,
    "kind": str,
}


def to_line(record: Record) -> bytes:
    """One line of JSON in ASCII, newline included."""
    assert not record.values.keys() & ENVELOPE.keys(), f"a {record.kind} record uses a name of the envelope"
    envelope = {name: getattr(record, name) for name in ENVELOPE}
    values = {key: _plain(value) for key, value in record.values.items()}
    return json.dumps({**envelope, **values}, separators=(",", ":")).encode() + b"\n"


def from_line(line: bytes) -> Record | None:
    """The record in ``line``; None where it holds none (a line torn by a kill, with another appended to it)."""
    try:
        values = json.loads(line)
        envelope = {name: values.pop(name) for name in ENVELOPE}
    except (ValueError, AttributeError, KeyError, TypeError):
        return None
    fits = all(isinstance(envelope[name], kind) for name, kind in ENVELOPE.items())
    return Record(**envelope, values=values) if fits else None


def _plain(value: Any) -> Value:
    """numpy scalars become Python numbers, numbers that are not finite None, anything else its text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    return str(value)


class Recorder:
    """Writes the records of one process; for one thread of it.

    Recording never ends a run: a full disk costs the records that did not fit, and the log says so once. A process
    that is started again in the same attempt goes on in the same file.
    """

    def __init__(self, path: Path, *, role: str, index: int, epoch: int) -> None:
        self._identity: dict[str, Any] = {"role": role, "index": index, "epoch": epoch}
        self._path = path
        self._fd = open_private(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._torn = os.fstat(self._fd).st_size > 0  # the owner before may have been killed within a line
        self._failing = False
        self._spans: dict[str, float] = {}

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Write one record; the seconds of spans since the last record join it as ``seconds_<name>``."""
        spans, self._spans = self._spans, {}
        record = Record(time=time.time(), kind=kind, values={**spans, **values}, **self._identity)
        self._append(to_line(record))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time spent inside to the next record, also where the inside raises."""
        start = time.monotonic()
        try:
            yield
        finally:
            key = f"seconds_{name}"
            self._spans[key] = self._spans.get(key, 0.0) + time.monotonic() - start

    def _append(self, line: bytes) -> None:
        data = b"\n" + line if self._torn else line
        try:
            with waiting(f"writing {self._path}", FILE_SYSTEM, limit_s=None):
                problem = "" if os.write(self._fd, data) == len(data) else "a record was written in part"
        except OSError as error:
            problem = str(error)
        if problem and not self._failing:
            log.warning("%s: %s; records are lost until that is mended", self._path, problem)
        self._torn = self._failing = bool(problem)

    def close(self) -> None:
        os.close(self._fd)


class RecordReader:
    """Reads the records of one attempt as they come: every file of ``directory``, or those of ``roles`` only.

    Files are opened anew at each poll, which is what makes growth visible on a network file system, and read line by
    line from where the last poll ended. ``num_damaged`` counts whole lines that hold no record. With ``last_bytes``
    only the end of each file is read: enough to tell how a run of a month stands.
    """

    def __init__(self, directory: Path, roles: Collection[str] = (), last_bytes: int | None = None) -> None:
        self._directory = directory
        self._roles = frozenset(roles)
        self._last_bytes = last_bytes
        self._offsets: dict[str, int] = {}
        self._last = ""  # file of the last poll that did not open all
        self.num_damaged = 0

    def poll(self, most: int | None = None) -> Iterator[Record]:
        """The records written since the last poll, in order within each file; stops before a torn last line.

        Args:
            most: files that are opened at most, in turn; None is all of them. Every open is a request to the server
                that all jobs share, and a run may have a file for each of a thousand processes.
        """
        with waiting(f"listing {self._directory}", FILE_SYSTEM, limit_s=None):
            names = sorted(filter(self._is_told, os.listdir(self._directory))) if self._directory.is_dir() else []
        if most is not None and len(names) > most:
            following = bisect_right(names, self._last)
            names = [*names[following:], *names[:following]][:most]
            self._last = names[-1]
        for name in names:
            yield from self._tail(name)

    def _is_told(self, name: str) -> bool:
        return name.endswith(".jsonl") and (not self._roles or name.rpartition("-")[0] in self._roles)

    def _tail(self, name: str) -> Iterator[Record]:
        with self._opened(name) as file:
            if name not in self._offsets:
                self._offsets[name] = self._beginning(file)
            file.seek(self._offsets[name])
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offsets[name] += len(line)
                if (record := from_line(line)) is not None:
                    yield record
                elif line.strip():
                    self.num_damaged += 1

    def _opened(self, name: str) -> BinaryIO:
        with waiting(f"reading {self._directory / name}", FILE_SYSTEM, limit_s=None):
            return (self._directory / name).open("rb")  # in binary, lines end at b"\n" and nowhere else

    def _beginning(self, file: BinaryIO) -> int:
        """Where to start in a file seen for the first time: at a line's start."""
        size = file.seek(0, os.SEEK_END)
        if self._last_bytes is None or size <= self._last_bytes:
            return 0
        file.seek(size - self._last_bytes)
        file.readline()
        return file.tell()
