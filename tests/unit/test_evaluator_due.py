"""Which evaluation is due, and that the evaluator ends when the last one has its result."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from areal_hpc.config.schema import EvaluationConfig
from areal_hpc.roles import evaluator
from areal_hpc.roles.evaluator import due


@pytest.mark.parametrize(
    ("version", "every", "at_start", "done", "expected"),
    [
        (0, 5, True, set(), 0),
        (0, 5, False, set(), None),
        (0, 5, True, {0}, None),
        (4, 5, True, {0}, None),
        (5, 5, True, {0}, 5),
        (7, 5, True, {0}, 5),
        (7, 5, True, {0, 5}, None),
        (19, 5, True, {0}, 15),  # the newest stands for those that were missed
        (22, 5, True, {0, 15}, 22),  # the last step is due whatever every_steps says
        (22, 5, True, {0, 20}, 22),
        (22, 5, True, {22}, None),
        (22, 100, False, set(), 22),
        (30, 5, True, {0, 25}, None),  # total_steps was lowered below what is evaluated
        (30, 5, True, {0, 20}, 22),
    ],
)
def test_due(version: int, every: int, at_start: bool, done: set[int], expected: int | None) -> None:
    config = EvaluationConfig(every_steps=every, at_start=at_start)
    assert due(version, config, 22, done) == expected


class Parts:
    """The engines' version, one after the other, and what was evaluated before."""

    def __init__(self, versions: list[int | None], done: set[int]) -> None:
        self.versions, self.done = versions, done

    def newest_version(self) -> int | None:
        return self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]

    def evaluated(self) -> set[int]:
        return set(self.done)


@dataclasses.dataclass
class Trainer:
    total_steps: int


@dataclasses.dataclass
class Settings:
    evaluation: EvaluationConfig
    trainer: Trainer


@dataclasses.dataclass
class Process:
    config: Settings


@pytest.mark.parametrize(
    ("versions", "done", "expected"),
    [
        ([None, 0, 1, 2, 3, 4, 5, 6], set(), [0, 2, 4, 6]),
        ([0, 3, 6], set(), [0, 2, 6]),
        ([6], {0, 2, 4}, [6]),  # C20: the run ended between its last step and its last evaluation
        ([6], {0, 6}, []),
        ([9], {0, 8}, []),  # total_steps was lowered after step 8: nothing is due, and nothing is waited for
    ],
)
def test_C20_the_evaluator_makes_up_what_is_due_and_ends(
    versions: list[int | None], done: set[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = []

    async def evaluate(_process: Any, _parts: Any, step: int) -> None:
        evaluated.append(step)

    monkeypatch.setattr(evaluator, "_evaluate", evaluate)
    monkeypatch.setattr(evaluator, "POLL_S", 0.0)
    process: Any = Process(Settings(EvaluationConfig(every_steps=2), Trainer(6)))
    parts: Any = Parts(versions, done)
    asyncio.run(asyncio.wait_for(evaluator._evaluate_all(process, parts), timeout=10))
    assert evaluated == expected
