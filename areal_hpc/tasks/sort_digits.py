"""The quickstart task: sort four digits and put them into a box.

    Sort 5 2 8 1        ->        \\boxed{1 2 5 8}

There are 10,000 prompts, every sequence of four digits; 256 of them are held out for evaluation, always the same ones
whatever the seed, so that two runs are comparable. Standard library only: the reward runs in small worker processes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from areal_hpc.tasks.rows import MadeRows, Row

if TYPE_CHECKING:
    from areal_hpc.types import Prompt

NUM_DIGITS = 4
BOX = re.compile(r"\\boxed\{([^{}]*)\}")
DIGITS = re.compile(r"[0-9 ]+")


class SortDigits(MadeRows[int]):
    """The rows of one split, ``{"prompt", "answer", "id"}`` each, in an order drawn by ``seed``.

    Raises:
        DataError: ``split`` is neither "train" nor "eval".
    """

    def __init__(self, split: str = "train", seed: int = 0) -> None:
        super().__init__(range(10**NUM_DIGITS), split, seed)

    def row(self, item: int) -> Row:
        digits = f"{item:0{NUM_DIGITS}d}"
        return {"prompt": f"Sort {' '.join(digits)}", "answer": " ".join(sorted(digits)), "id": f"sort-{digits}"}


class GivenAnswers(SortDigits):
    """The same rows with answers to learn from: ``response``, or the pair ``chosen`` and ``rejected``.

    ``response`` and ``chosen`` are right and in a box. Of three rejected answers one has the digits in their old order,
    one in falling order, and one is right without a box. A row of equal digits has only the last kind.
    """

    def row(self, item: int) -> Row:
        return _with_answers(super().row(item))


def _with_answers(row: Row) -> Row:
    prompt, answer = row["prompt"], row["answer"]
    old, falling = prompt.removeprefix("Sort "), answer[::-1]
    wrong = [text for text in (old, falling) if text != answer]
    kinds = [*(f"\\boxed{{{text}}}" for text in wrong), answer]
    right = f"\\boxed{{{answer}}}"
    rejected = kinds[sum(map(int, old.split())) % len(kinds)]
    return {**row, "response": right, "chosen": right, "rejected": rejected}


def reward(text: str, answer: str, prompt: Prompt | None = None) -> float:
    """1.0 if the last box of ``text`` holds the digits of ``answer`` in its order and nothing else, otherwise 0.0."""
    boxes = BOX.findall(text)
    right = bool(boxes) and DIGITS.fullmatch(boxes[-1]) is not None and boxes[-1].split() == answer.split()
    return float(right)
