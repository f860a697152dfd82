"""The calculator's task: splits, results, what a model is told that misuses it, and the reward."""

from __future__ import annotations

import subprocess
import sys

import pytest

from areal_hpc.errors import DataError
from areal_hpc.tasks.calculator import Calculations, calculate, called, reward


def test_splits_are_disjoint_and_together_every_prompt() -> None:
    train, held_out = Calculations("train", 1), Calculations("eval", 1)
    assert (len(train), len(held_out)) == (16_200 - 256, 256)
    ids = {row["id"] for row in train} | {row["id"] for row in held_out}
    assert len(ids) == 16_200
    assert {row["id"] for row in Calculations("eval", 2)} == {row["id"] for row in held_out}
    assert list(Calculations("train", 2)) != list(train) == list(Calculations("train", 1))


def test_rows_hold_their_results() -> None:
    rows = {row["prompt"]: row["answer"] for row in [*Calculations("train"), *Calculations("eval")]}
    assert (rows["What is 37 * 46?"], rows["What is 99 + 10?"], rows["What is 99 * 99?"]) == ("1702", "109", "9801")
    assert Calculations()[:2] == [Calculations()[0], Calculations()[1]]
    with pytest.raises(IndexError):
        Calculations("eval")[256]


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(DataError, match=r"'validation'.*'train' or 'eval'"):
        Calculations("validation")


@pytest.mark.parametrize(
    ("expression", "result"),
    [("37*46", "1702"), (" 37 * 46 ", "1702"), ("10-99", "-89"), ("-5+-6", "-11"), ("000000012*12", "144")],
)
def test_two_numbers_are_worked_out(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize("expression", ["", "37", "37*", "1+2+3", "9" * 10 + "*2", "2**9", "__import__('os')", "٣*٤x"])
def test_anything_else_is_told_to_the_model(expression: str) -> None:
    assert calculate(expression).startswith("error: write two whole numbers")


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("calculator", '{"expression": "37*46"}', "1702"),
        ("calculator", {"expression": "37*46"}, "1702"),
        ("calculator", '{"expression": 5}', "error: write"),
        ("calculator", '{"expr": "37*46"}', "error: write"),
        ("calculator", '["37*46"]', "error: write"),
        ("calculator", '{"expression": "37*', "error: write"),
        pytest.param("calculator", '{"expression": ' + "[" * 5000, "error: write", id="brackets-without-end"),
        ("abacus", '{"expression": "37*46"}', "error: there is no tool 'abacus'"),
    ],
)
def test_a_call_has_a_result_whatever_is_wrong_with_it(name: str, arguments: str, result: str) -> None:
    assert called(name, arguments).startswith(result)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1702", 1.0),
        ("37 * 46 is 1702.", 1.0),
        ("1702 = 37 * 46", 0.0),
        ("-1702", 0.0),
        ("17020", 0.0),
        ("no idea", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_counts(text: str, value: float) -> None:
    assert reward(text, "1702") == value


def test_it_loads_without_numpy() -> None:
    code = "import sys, areal_hpc.tasks.calculator; sys.exit('numpy' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
