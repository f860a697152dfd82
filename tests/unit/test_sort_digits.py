"""The quickstart task: its splits and its reward."""

from __future__ import annotations

import subprocess
import sys

import pytest

from areal_hpc.errors import DataError
from areal_hpc.tasks.sort_digits import SortDigits, reward


def test_splits_are_disjoint_and_together_every_prompt() -> None:
    train, held_out = SortDigits("train", 1), SortDigits("eval", 1)
    assert (len(train), len(held_out)) == (10_000 - 256, 256)
    prompts = [row["prompt"] for row in train] + [row["prompt"] for row in held_out]
    assert len(set(prompts)) == 10_000
    assert {row["id"] for row in train}.isdisjoint(row["id"] for row in held_out)


def test_the_seed_orders_a_split_and_never_moves_a_row_to_another() -> None:
    for split in ("train", "eval"):
        one, again, other = SortDigits(split, 1), SortDigits(split, 1), SortDigits(split, 2)
        assert list(one) == list(again) != list(other)
        assert {row["id"] for row in one} == {row["id"] for row in other}


def test_rows_hold_their_sorted_digits() -> None:
    rows = {row["prompt"]: row for row in [*SortDigits("train"), *SortDigits("eval")]}
    assert rows["Sort 5 2 8 1"] == {"prompt": "Sort 5 2 8 1", "answer": "1 2 5 8", "id": "sort-5281"}
    assert rows["Sort 0 0 7 0"]["answer"] == "0 0 0 7"
    assert SortDigits()[:2] == [SortDigits()[0], SortDigits()[1]]
    assert SortDigits()[-1] == list(SortDigits())[-1]
    with pytest.raises(IndexError):
        SortDigits("eval")[256]


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(DataError, match=r"'validation'.*'train' or 'eval'"):
        SortDigits("validation")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\boxed{1 2 5 8}", 1.0),
        (r"It is \boxed{1 2 5 8}.", 1.0),
        (r"\boxed{8 5 2 1} no, \boxed{1 2 5 8}", 1.0),
        (r"\boxed{ 1 2  5 8 }", 1.0),
        (r"\boxed{1 2 5 8} or \boxed{8 5 2 1}", 0.0),
        (r"\boxed{1 2 5 8} or \boxed{none}", 0.0),
        (r"\boxed{1258}", 0.0),
        (r"\boxed{1, 2, 5, 8}", 0.0),
        (r"\boxed{1 2 5 8 8}", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{1 2 5 8", 0.0),
        ("1 2 5 8", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_last_box_counts(text: str, value: float) -> None:
    got = reward(text, "1 2 5 8", None)
    assert got == value
    assert isinstance(got, float)


def test_it_loads_without_numpy() -> None:
    code = "import sys, areal_hpc.tasks.sort_digits; sys.exit('numpy' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
