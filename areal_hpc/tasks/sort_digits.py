"""The quickstart task: sort four digits and put them into a box.

    Sort 5 2 8 1        ->        \\boxed{1 2 5 8}

There are 10,000 prompts, every sequence of four digits; 256 of them are held out for evaluation, always the same ones
whatever the seed, so that two runs are comparable. Standard library only: the reward runs in small worker processes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, overload

from areal_hpc.errors import DataError

if TYPE_CHECKING:
    from areal_hpc.types import Prompt

NUM_DIGITS = 4
NUM_HELD_OUT = 256
HOLD_OUT_SEED = 1234
BOX = re.compile(r"\\boxed\{([^{}]*)\}")
DIGITS = re.compile(r"[0-9 ]+")

Row = Mapping[str, str]


class SortDigits(Sequence[Row]):
    """The rows of one split, ``{"prompt", "answer", "id"}`` each, in an order drawn by ``seed``.

    Raises:
        DataError: ``split`` is neither "train" nor "eval".
    """

    def __init__(self, split: str = "train", seed: int = 0) -> None:
        numbers = list(range(10**NUM_DIGITS))
        random.Random(HOLD_OUT_SEED).shuffle(numbers)
        splits = {"train": numbers[NUM_HELD_OUT:], "eval": numbers[:NUM_HELD_OUT]}
        if split not in splits:
            raise DataError(f"split {split!r} of the task SortDigits does not exist; use 'train' or 'eval'")
        self._numbers = splits[split]
        random.Random(seed).shuffle(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [_row(number) for number in self._numbers[index]]
        return _row(self._numbers[index])


class GivenAnswers(SortDigits):
    """The same rows with answers to learn from: ``response``, or the pair ``chosen`` and ``rejected``.

    ``response`` and ``chosen`` are right and in a box. Of three rejected answers one has the digits in their old order,
    one in falling order, and one is right without a box. A row of equal digits has only the last kind.
    """

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [_with_answers(row) for row in super().__getitem__(index)]
        return _with_answers(super().__getitem__(index))


def _with_answers(row: Row) -> Row:
    prompt, answer = row["prompt"], row["answer"]
    old, falling = prompt.removeprefix("Sort "), answer[::-1]
    wrong = [text for text in (old, falling) if text != answer]
    kinds = [*(f"\\boxed{{{text}}}" for text in wrong), answer]
    right = f"\\boxed{{{answer}}}"
    rejected = kinds[sum(map(int, old.split())) % len(kinds)]
    return {**row, "response": right, "chosen": right, "rejected": rejected}


def _row(number: int) -> Row:
    digits = f"{number:0{NUM_DIGITS}d}"
    return {"prompt": f"Sort {' '.join(digits)}", "answer": " ".join(sorted(digits)), "id": f"sort-{digits}"}


def reward(text: str, answer: str, prompt: Prompt | None = None) -> float:
    """1.0 if the last box of ``text`` holds the digits of ``answer`` in its order and nothing else, otherwise 0.0."""
    boxes = BOX.findall(text)
    right = bool(boxes) and DIGITS.fullmatch(boxes[-1]) is not None and boxes[-1].split() == answer.split()
    return float(right)
