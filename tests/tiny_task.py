"""Prompts and rewards for whole runs in tests; the model has random weights, so nothing can be learned here."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from areal_hpc.types import Prompt

Row = Mapping[str, Any]


class Numbers(Sequence[Row]):
    """1000 short prompts, ``{"prompt", "answer"}`` each; the answer is the row's number."""

    def __init__(self, split: str = "train", seed: int = 0) -> None:
        self._name = split

    def __len__(self) -> int:
        return 1000

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return {"prompt": f"{self._name} {index}", "answer": index, "id": f"{self._name}-{index}"}


class Deadly(Sequence[Row]):
    """The rows of a JSONL file; the first process that has read 120 of them dies of it and leaves the file ``after``.

    Whoever only looks at each of 80 rows lives.
    """

    def __init__(self, split: str, seed: int, path: str, after: str) -> None:
        self._rows: list[Row] = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        self._after, self._num_read = Path(after), 0

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        self._num_read += 1
        if self._num_read >= 120 and not self._after.exists():
            self._after.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self._rows[index]


def spread(text: str, answer: int, prompt: Prompt) -> float:
    """Between 1 and 2, by how many different letters the text has: two random answers rarely get the same."""
    return 1.0 + len(set(text)) / 256


def paced(text: str, answer: int, prompt: Prompt) -> float:
    """As ``spread``, but it takes its time."""
    time.sleep(0.13)
    return spread(text, answer, prompt)


def held(text: str, answer: int, prompt: Prompt) -> float:
    """As ``paced``, but not before whoever has put a file ``hold`` where the run was started takes it away."""
    while Path("hold").exists():
        time.sleep(0.05)
    return paced(text, answer, prompt)


def sometimes(text: str, answer: int, prompt: Prompt) -> float:
    """As ``spread``, but for every third prompt it sleeps for ever, and for the one after it raises."""
    if answer % 3 == 0:
        time.sleep(3600)
    if answer % 3 == 1:
        raise RuntimeError("this prompt has no reward")
    return spread(text, answer, prompt)


def uneven(text: str, answer: int, prompt: Prompt) -> float:
    """As ``spread``, but one prompt of seven raises, and one of five is worth the same whatever the text is."""
    if answer % 7 == 3:
        raise RuntimeError("this prompt has no reward")
    return 1.0 if answer % 5 == 2 else spread(text, answer, prompt)


def never(text: str, answer: int, prompt: Prompt) -> float:
    raise RuntimeError("no text has a reward")


def make_for_ever(path: Path, seed: int) -> None:
    """A model's maker that never comes to an end; says that it began by a file beside the model."""
    path.with_name("making").touch()
    time.sleep(3600)


def coarse(text: str, answer: int, prompt: Prompt) -> float:
    """0 or 1, so that small groups are often all alike; every seventh prompt has no reward."""
    if answer % 7 == 3:
        raise RuntimeError("this prompt has no reward")
    return float(len(set(text)) % 2)
