"""Seats of an attempt for engines that join it: who sits where, told by the names in one directory.

    attempts/N/seats/
      7.3          the fourth process that is generator-7 has taken the seat; the file says who that is
      7.3.up       it answers requests
      7.3.left     it does not any more, or has been given up; the next one on this seat is 7.4

Each name is made once and by nobody else, so of many that join at the same moment each gets a seat of its own. A seat
is used again, which keeps the files of a run whose satellites come and go for weeks as few as there have been engines
at once. Whoever looks lists the directory: one call, and no name is asked for that may not be there yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.fs import create_exclusive, names_in, read_if_listed
from areal_hpc.run_dir import AttemptDir

NAME = re.compile(r"(\d+)\.(\d+)(?:\.(up|left))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One process's time on a seat."""

    attempt: AttemptDir
    index: int
    """Index of the generator that sits there."""
    incarnation: int

    @property
    def name(self) -> str:
        return f"generator-{self.index}"

    def come_up(self) -> None:
        """Say that this engine answers requests."""
        self._mark("up")

    def leave(self) -> None:
        """Say that it does not any more; once is enough, more do no harm."""
        self._mark("left")

    def is_held(self) -> bool:
        """Whether nobody has given this process up."""
        return newest(self.attempt).get(self.index) == self

    def holder(self) -> Mapping[str, Any]:
        """Who has taken the seat, by its own words."""
        return read_if_listed(_directory(self.attempt) / f"{self.index}.{self.incarnation}") or {}

    def _mark(self, what: str) -> None:
        create_exclusive(_directory(self.attempt) / f"{self.index}.{self.incarnation}.{what}", b"{}")


def take(attempt: AttemptDir, first: int, holder: Mapping[str, Any], besides: Collection[int] = ()) -> Seat:
    """A seat that nobody has: the lowest that was left, else a new one.

    Args:
        first: the lowest of all.
        besides: seats that may be free, and are not wanted.
    """
    content = json.dumps(dict(holder)).encode()
    while True:
        names = _Names.listed(attempt)
        free = sorted(names.last.keys() - names.held() - set(besides))
        index = free[0] if free else max([first - 1, *names.last]) + 1
        seat = Seat(attempt=attempt, index=index, incarnation=names.last[index] + 1 if free else 0)
        if create_exclusive(_directory(attempt) / f"{seat.index}.{seat.incarnation}", content):
            _clear(seat)
            return seat


def newest(attempt: AttemptDir) -> dict[int, Seat]:
    """The seats that are taken, by index, whether their engines are up or not."""
    names = _Names.listed(attempt)
    return {index: names.seat(attempt, index) for index in names.held()}


def present(attempt: AttemptDir) -> dict[int, Seat]:
    """The seats whose engines answer requests, by index."""
    names = _Names.listed(attempt)
    return {index: names.seat(attempt, index) for index in names.held() if names.is_marked(index, "up")}


def last(attempt: AttemptDir) -> list[Seat]:
    """Who sits on each seat that there is, or sat there last."""
    names = _Names.listed(attempt)
    return [names.seat(attempt, index) for index in sorted(names.last)]


def vacant(attempt: AttemptDir) -> set[str]:
    """Names of the engines whose seats were left, and taken by nobody since."""
    names = _Names.listed(attempt)
    return {f"generator-{index}" for index in names.last.keys() - names.held()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """What one listing tells."""

    last: Mapping[int, int]
    """Seat to its last incarnation."""
    marks: frozenset[tuple[int, int, str]]

    @classmethod
    def listed(cls, attempt: AttemptDir) -> _Names:
        found = _parsed(attempt)
        last: dict[int, int] = {}
        for index, incarnation, _ in found:
            last[index] = max(incarnation, last.get(index, 0))
        return cls(last=last, marks=frozenset(found))

    def is_marked(self, index: int, what: str) -> bool:
        return (index, self.last[index], what) in self.marks

    def held(self) -> set[int]:
        return {index for index in self.last if not self.is_marked(index, "left")}

    def seat(self, attempt: AttemptDir, index: int) -> Seat:
        return Seat(attempt=attempt, index=index, incarnation=self.last[index])


def _directory(attempt: AttemptDir) -> Path:
    return attempt.root / "seats"


def _parsed(attempt: AttemptDir) -> list[tuple[int, int, str]]:
    directory = _directory(attempt)
    names = names_in(directory) if directory.is_dir() else []  # an older version's attempt has none
    matches = (NAME.fullmatch(name) for name in names)
    return [(int(match[1]), int(match[2]), match[3] or "") for match in matches if match]


def _clear(seat: Seat) -> None:
    """Remove what tells of those who had the seat before; a later name says as much."""
    for index, incarnation, mark in _parsed(seat.attempt):
        if index == seat.index and incarnation < seat.incarnation:
            name = f"{index}.{incarnation}" + (f".{mark}" if mark else "")
            (_directory(seat.attempt) / name).unlink(missing_ok=True)
