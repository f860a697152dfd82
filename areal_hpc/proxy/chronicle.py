"""What became of sessions, kept in files for the page and for people: one JSON line each, the newest few thousand.

    sessions/00000003-rollout-0-0-000001.jsonl      of attempt 3, of rollout-0's first process: a part of some megabytes

A part that is full is followed by the next, and a worker's oldest parts are deleted, so a run of a month stays bounded.
A line is one write, so readers see whole lines, and at most one torn one at the end of a part: after a write that did
not fit comes another part. Losing a line loses nothing but the sight of it: what is trained goes through the ring.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.dialogue.text import IncrementalText
from areal_hpc.dialogue.transcript import Turn
from areal_hpc.fs import make_private_directory
from areal_hpc.privacy import open_private
from areal_hpc.proxy.sessions import Session
from areal_hpc.types import NOT_SAMPLED
from areal_hpc.waits import FILE_SYSTEM, waiting

log = logging.getLogger(__name__)

PART_BYTES = 4 << 20
PARTS = 8
"""A worker's parts that are kept."""
PART_NAME = re.compile(r"\d{8}-([a-z]+-\d+)-\d+-\d{6}\.jsonl")
Spelled = Callable[[Sequence[int]], str]
Note = Callable[[Session, Mapping[str, Any]], None]
"""Takes a session that has ended and what became of it: ``outcome``, ``reason``, ``group``."""


def summary_of(session: Session, said: Mapping[str, Any], discount: float) -> dict[str, Any]:
    """A session in a line of a table; its ``worth`` is the mean reward of its trajectories, null where it makes none.

    Args:
        said: what became of it, as JSON data.
    """
    turns = session.transcript.turns
    is_rewarded = (session.final is not None or session.rewards) and not session.broken
    worths = [trajectory.reward for trajectory in session.trajectories(discount)] if is_rewarded else []
    sampled = [turn.completion.versions[turn.completion.versions != NOT_SAMPLED] for turn in turns]
    versions = [int(bound) for some in sampled if some.size for bound in (some.min(), some.max())]
    rewards = {str(number): reward for number, reward in session.rewards.items()}
    return {
        "id": session.id,
        "began": session.began,
        "turns": len(turns),
        "tokens": session.num_sampled,
        "versions": [min(versions), max(versions)] if versions else [],
        "final": session.final,
        "rewards": rewards,
        "worth": sum(worths) / len(worths) if worths else None,
        "broken": session.broken,
        "drifts": dict(session.transcript.drifts),
        **said,
    }


def turns_of(session: Session, spelled: Spelled, discount: float) -> list[dict[str, Any]]:
    """The turns of a session, with what was new to the model in each, and the answer token by token."""
    turns = session.transcript.turns
    worth = session.transcript.credits(final=session.final, rewards=session.rewards, discount=discount)
    return [_told(number, turns, spelled, worth.get(number)) for number in range(len(turns))]


def _told(number: int, turns: Sequence[Turn], spelled: Spelled, worth: float | None) -> dict[str, Any]:
    turn = turns[number]
    parent = turn.place.parent
    known = 0 if parent is None else len(turns[parent].messages)
    tokens = turn.completion
    return {
        "call": turn.call,
        "parent": parent,
        "drift": turn.place.drift,
        "new": [_message(one) for one in turn.place.messages[known:]],
        "tokens": pieces(tokens.token_ids.tolist(), spelled),
        "logprobs": [round(logprob, 4) for logprob in tokens.logprobs.tolist()],
        "versions": tokens.versions.tolist(),
        "stop": tokens.stop,
        "worth": worth,
    }


def _message(one: Mapping[str, Any]) -> dict[str, str]:
    calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in one.get("tool_calls", ())]
    return {"role": one["role"], "content": "\n".join(filter(None, [one["content"], *calls]))}


def pieces(token_ids: Sequence[int], spelled: Spelled) -> list[str]:
    """The text that each token adds; together they are the whole. What is no whole character yet comes with its end."""
    growing, shown, found = IncrementalText(spelled), 0, []
    for token in token_ids:
        whole = growing.extend([token])
        found.append(whole[shown:])
        shown = len(whole)
    if found:
        found[-1] += growing.whole[shown:]
    return found


class Scribe:
    """Writes one worker's sessions down; a full disk costs what did not fit, and the log says so once.

    Args:
        name: attempt, worker and incarnation, as in ``00000003-rollout-0-0``.
    """

    def __init__(self, directory: Path, name: str, *, part_bytes: int = PART_BYTES, parts: int = PARTS) -> None:
        self._directory, self._name = make_private_directory(directory), name
        self._part_bytes, self._parts = part_bytes, parts
        self._number, self._fd, self._failing = 0, -1, False

    def write(self, session: Mapping[str, Any]) -> None:
        line = json.dumps(session).encode() + b"\n"
        try:
            with waiting(f"writing {self._directory}", FILE_SYSTEM, limit_s=None):
                if self._fd < 0 or os.fstat(self._fd).st_size >= self._part_bytes:
                    self._next_part()
                self._append(line)
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("%s: %s; sessions are not written down until that is mended", self._directory, error)
            self._failing = True

    def _append(self, line: bytes) -> None:
        if (written := os.write(self._fd, line)) < len(line):
            self.close()  # nothing may follow a torn line
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were written")

    def _next_part(self) -> None:
        self.close()
        self._number += 1
        path = self._directory / f"{self._name}-{self._number:06d}.jsonl"
        self._fd = open_private(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        mine = [name for name in sorted(os.listdir(self._directory)) if _worker_of(name) == _worker_of(path.name)]
        for name in mine[: -self._parts]:
            (self._directory / name).unlink(missing_ok=True)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _worker_of(name: str) -> str | None:
    match = PART_NAME.fullmatch(name)
    return None if match is None else match[1]


@dataclass(slots=True)
class Chronicle:
    """Reads what scribes have written, as it grows: ``poll``, then ``summaries`` and ``session``."""

    directory: Path
    _ends: dict[str, int] = field(default_factory=dict)
    """How far each part has been read."""
    _index: dict[str, tuple[dict[str, Any], str, int, int]] = field(default_factory=dict)
    """Session -> its summary, its part, and where in it it lies."""

    def poll(self) -> None:
        """Take in what is new, and forget what was deleted."""
        names = sorted(filter(_worker_of, os.listdir(self.directory))) if self.directory.is_dir() else []
        for name in self._ends.keys() - set(names):
            del self._ends[name]
            self._index = {id_: entry for id_, entry in self._index.items() if entry[1] != name}
        for name in names:
            try:
                for start, line in self._lines(name):
                    if (summary := _summary_in(line)) is not None:
                        self._index[summary["id"]] = (summary, name, start, len(line))
            except FileNotFoundError:  # its scribe has deleted it since; the next poll forgets it
                continue

    def _lines(self, name: str) -> Iterator[tuple[int, bytes]]:
        """New whole lines of a part, each with its place."""
        start = self._ends.get(name, 0)
        with (self.directory / name).open("rb") as file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                yield start, line
                start += len(line)
        self._ends[name] = start

    def summaries(self) -> list[dict[str, Any]]:
        """One for each session, in the order in which they began."""
        return sorted((entry[0] for entry in self._index.values()), key=lambda summary: float(summary["began"]))

    def session(self, session_id: str) -> dict[str, Any] | None:
        """``summary`` and ``turns`` of a session; None where nothing is written of it (any more)."""
        if (entry := self._index.get(session_id)) is None:
            return None
        _, name, start, length = entry
        try:
            with (self.directory / name).open("rb") as file:
                file.seek(start)
                found: dict[str, Any] = json.loads(file.read(length))
        except FileNotFoundError:  # its scribe has deleted it since the last poll
            return None
        return found


def _summary_in(line: bytes) -> dict[str, Any] | None:
    """None where a line was torn by a full disk or a kill."""
    try:
        summary: dict[str, Any] = json.loads(line)["summary"]
    except (ValueError, KeyError, TypeError):
        return None
    return summary
