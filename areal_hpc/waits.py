"""What this process waits for and how far it has come, named so that others can be told.

    with waiting("a batch of 16 groups", "rollout-0", "rollout-1", limit_s=1800):     in any thread or task
        ...
    advance("steps trained")

    published()         a heartbeat tells it from a thread of its own, also of a thread that is stuck in a collective,
                        in the kernel, or in C code that let go of the interpreter

A wait has a party: processes of the run by name, of which any one may bring what is waited for; or something else (the
file system, a reward process, whoever asks). With no party it is work of one's own that may take long and moves no
counter, such as loading a model. The time limit is told, not enforced: whoever waits does that. Where there is none,
the wait may last as long as somebody in the run gets on, and ``limits.stall_s`` ends it when nobody does; a file call
that keeps its process from achieving anything is ended by that whatever the others do.

Entering and leaving costs about a microsecond. No lock: each wait adds and takes away its own entry of one dict.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

LEADER = "trainer-0"
"""Publishes weights, frees tickets, commits."""
FILE_SYSTEM = "the file system"
REWARD_PROCESS = "a reward process"
AGENT = "an agent"
ANYBODY = "whoever asks"
"""What a process waits for that is idle."""


class _Open:
    """One wait, from its begin to its end."""

    __slots__ = ("about", "limit_s", "parties", "since", "what")

    def __init__(self, what: str, parties: tuple[str, ...], limit_s: float | None, about: str) -> None:
        self.what, self.parties, self.limit_s, self.about = what, parties, limit_s, about

    def __enter__(self) -> Self:
        self.since = time.monotonic()
        _open[id(self)] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del _open[id(self)]


_open: dict[int, _Open] = {}
_moved: dict[str, tuple[int, float]] = {}


def waiting(what: str, *parties: str, limit_s: float | None, about: str = "") -> _Open:
    """A context that names a wait, once.

    Args:
        what: is waited for. Waits alike in this, their parties and their limit are told as one, with their number.
        parties: names such as "generator-3"; none for work of one's own.
        limit_s: seconds after which the caller gives up by itself.
        about: what tells this wait from others of its kind, such as a request's id.
    """
    return _Open(what, parties, limit_s, about)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Open waits of one kind in one process."""

    what: str
    parties: tuple[str, ...] = ()
    seconds: float
    """How long the oldest of them has lasted."""
    limit_s: float | None = None
    count: int = 1
    about: str = ""
    """What tells the oldest of them from others of its kind."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Wait:
        return cls(**{**record, "parties": tuple(record["parties"])})

    def is_overdue(self) -> bool:
        return self.limit_s is not None and self.seconds > self.limit_s


def open_waits() -> list[Wait]:
    """Everything that this process waits for now, longest first."""
    now = time.monotonic()
    kinds: dict[tuple[Any, ...], list[_Open]] = {}
    for one in _open.copy().values():
        kinds.setdefault((one.what, one.parties, one.limit_s), []).append(one)
    waits = []
    for (what, parties, limit_s), alike in kinds.items():
        oldest = min(alike, key=lambda one: one.since)
        waits.append(
            Wait(
                what=what,
                parties=parties,
                seconds=now - oldest.since,
                limit_s=limit_s,
                count=len(alike),
                about=oldest.about,
            )
        )
    return sorted(waits, key=lambda wait: -wait.seconds)


def advance(what: str, by: int = 1) -> None:
    """Say that something was achieved. One thread counts one thing."""
    _moved[what] = (_moved.get(what, (0, 0.0))[0] + by, time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved:
    """What ``advance`` was told under one name."""

    count: int
    seconds: float
    """Since the last time."""


def achieved() -> dict[str, Achieved]:
    """What this process has achieved since it began, by name."""
    now = time.monotonic()
    return {what: Achieved(count=count, seconds=now - when) for what, (count, when) in _moved.copy().items()}


def published() -> dict[str, Any]:
    """All of it as JSON data: ``waits`` and ``achieved``."""
    return {
        "waits": [asdict(wait) for wait in open_waits()],
        "achieved": {what: asdict(one) for what, one in achieved().items()},
    }
