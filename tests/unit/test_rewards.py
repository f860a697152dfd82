r"""Rewards against cases that graders got wrong in the field; the wanted grades are mathematics, not our output."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from areal_hpc.rollout.rewards import (
    as_text,
    boxed_equals,
    exact_match,
    gsm8k_answer,
    last_boxed,
    math_answer,
    normalise,
)

DIFFERENT = {
    "I20": [
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
        (r"\frac1{2^{99}}", r"\frac1{2^{98}}"),
        ("12:00", "1:00"),
        (r"\pm 2021", "2021"),
        ("n=2,3,4", "n=1,2,3"),
    ],
    "I23": [("4", r"4\sqrt(2)"), ("1,-2", "1,-3")],
    "I24": [("7*sin(pi*x/5)+1", r"7\sin\left(\frac{\pi x}{5}\right)+2")],
    "rounding": [
        ("0.0000001", "0.0000002"),
        ("0.001", "0.0010004"),
        ("0", "0.0000001"),
        (r"x=\frac1{2^{99}}", r"\frac1{2^{98}}"),
        (r"\sqrt{2}", "1.414"),
        ("5", "5.0001"),
        ("0.333", r"\frac13"),
        ("10^{20}", "10^{20}+1"),
    ],
    "plain": [
        ("-5", "5"),
        ("100", "1"),
        ("A", "B"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        (r"2\pi", r"2\pi r"),
        ("1 2", "12"),
        ([1, 2], "1,3"),
        (None, "5"),
        (None, "None"),
        ("", ""),
    ],
}
EQUAL = {
    "I6": [(r"\frac{1}{3}", r"\frac{1}{3}"), (r"\frac{1}{3}", r"\frac{2}{6}")],
    "I11": [(5, "5"), (5.0, "5"), (0.5, r"\frac12"), ([1, 2], "1,2"), ([1, 2], "2,1")],
    "I21": [
        ("2x+4y-3=0", r"y=-\frac12x+\frac34"),
        (r"\text{13}", "13"),
        ("pi/2", r"\dfrac{\pi}{2}"),
        ("-1+exp(16)", "e^{16}-1"),
        ("14.0 + -1.0i", "14-i"),
    ],
    "I24": [
        ("7*sin(pi*x/5)+1", r"7\sin\left(\frac{\pi x}{5}\right)+1"),
        ("x**2", "x^2"),
        ("sqrt(2)/2", r"\frac{\sqrt2}{2}"),
    ],
    "plain": [
        ("1,234", "1234"),
        ("5", "5 apples"),
        ("5", r"5\text{ cm}"),
        ("x=3", "3"),
        ("3", "x=3"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\{1,2\}", r"\{2,1\}"),
        ("10", "10.0"),
        (r"50\%", "0.5"),
        (r"\frac{3}{4}", "0.75"),
        ("3/4", ".75"),
        (r"\frac13", "0.333333"),
        ("1/300", "0.0033333"),
        ("3,4", r"3 \text{ or } 4"),
        ("1:00", "1:00"),
        ("0", "-0.0"),
    ],
}
KNOWN_LIMITS = [("50", r"50\%"), ("(1,2)", "1,2"), ("3:4", "6:8")]
"""Graded equal by math-verify; written down in the docstring of ``math_answer``."""


def cases(table: dict[str, list[tuple[Any, str]]]) -> list[Any]:
    return [pytest.param(gold, said, id=f"{name}-{gold}-{said}") for name, rows in table.items() for gold, said in rows]


@pytest.mark.parametrize(("gold", "said"), cases(DIFFERENT))
def test_different_answers_earn_nothing(gold: Any, said: str) -> None:
    assert math_answer(rf"So it is \boxed{{{said}}}.", gold) == 0.0


@pytest.mark.parametrize(("gold", "said"), cases(EQUAL))
def test_equal_answers_earn_the_reward(gold: Any, said: str) -> None:
    assert math_answer(rf"So it is \boxed{{{said}}}.", gold) == 1.0


@pytest.mark.parametrize(("gold", "said"), KNOWN_LIMITS)
def test_known_limits_are_still_the_ones_that_we_tell_of(gold: str, said: str) -> None:
    assert math_answer(rf"\boxed{{{said}}}", gold) == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\boxed{6}, no: \boxed{5}", 1.0),
        (r"\boxed{5}, no: \boxed{6}", 0.0),
        (r"\boxed{5}, no: \boxed{6", 0.0),
        (r"\boxed{5", 0.0),
        ("The answer is 5.", 1.0),
        ("5", 1.0),
        ("so $x=5$", 1.0),
        ("It is not 5 but 6.", 0.0),
        ("no idea", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_box_counts_else_the_end_of_the_text(text: str, value: float) -> None:
    assert math_answer(text, 5) == value


def test_a_solution_as_the_answer_means_its_box() -> None:
    assert math_answer(r"\boxed{\frac{2}{4}}", r"We add. \boxed{\frac12} is the sum of 3 numbers.") == 1.0


def test_a_box_much_longer_than_the_answer_is_not_read() -> None:
    terms = "+".join(f"x^{{{n}}}" for n in range(400))
    assert math_answer(rf"\boxed{{{terms}}}", "x") == 0.0
    assert math_answer(rf"\boxed{{{terms}}}", terms) == 1.0


def test_I6_it_grades_outside_the_main_thread() -> None:
    grades: list[float] = []
    thread = threading.Thread(target=lambda: grades.append(math_answer(r"\boxed{\frac{2}{6}}", r"\frac{1}{3}")))
    thread.start()
    thread.join()
    assert grades == [1.0]


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}} and \boxed{\sqrt{\frac{1}{2}}}", r"\sqrt{\frac{1}{2}}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\left\{ x }", r"\left\{ x "),
        (r"\boxed{}", ""),
        (r"\boxed{5} \boxed{6", None),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_the_last_box_has_balanced_braces(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (r"\dfrac{1}{2}", r"\frac12", False),  # a string comparison: only spelling
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        (r"\$1,000.00", "1000", True),
        ("1,000,000", "1000000", True),
        ("1,00", "100", False),
        ("(100,200)", "(100200)", False),
        ("2.05", "2.5", False),
        ("2.0", "2", True),
        ("+3.", "3", True),
        ("1 2", "12", False),
        (r"50\%", "50 %", True),
        (r"\text{Monday}", "Monday", True),
        (r"\lefty", r"y", False),
    ],
)
def test_normalised_strings(one: str, other: str, same: bool) -> None:
    assert (normalise(one) == normalise(other)) is same


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("2 + 16 = 18\n#### 18", "He has 2 + 16.\n#### 18", 1.0),
        ("#### 18", 18, 1.0),
        ("#### 18.00", "18", 1.0),
        ("#### $1,800", "#### 1800", 1.0),
        ("####-3", "#### -3", 1.0),
        ("#### 18 apples\nDone in 3 steps.", "#### 18", 1.0),
        ("#### 17\nNo.\n#### 18", "#### 18", 1.0),
        ("#### 18\nNo.\n#### 17", "#### 18", 0.0),
        (r"so \boxed{18}", "#### 18", 1.0),
        (r"\boxed{18} #### 17", "#### 18", 0.0),
        (r"\boxed{\frac{18}{1}}", "#### 18", 0.0),
        ("#### 18/5", "#### 18", 0.0),
        ("####", "#### 18", 0.0),
        ("It is 18.", "#### 18", 0.0),
        ("#### 180", "#### 18", 0.0),
        ("#### 18", None, 0.0),
        ("#### none", None, 0.0),
    ],
)
def test_gsm8k_compares_the_last_number(text: str, answer: Any, value: float) -> None:
    assert gsm8k_answer(text, answer) == value


@pytest.mark.parametrize(
    ("text", "answer", "exact", "boxed"),
    [
        ("5", 5, 1.0, 0.0),
        (" Paris\n", "Paris", 1.0, 0.0),
        ("paris", "Paris", 0.0, 0.0),
        (r"\boxed{ Paris }", "Paris", 0.0, 1.0),
        (r"\boxed{5.0}", 5, 0.0, 1.0),
        (r"\boxed{None}", None, 0.0, 0.0),
        ("None", None, 0.0, 0.0),
        ("", None, 0.0, 0.0),
        (r"\boxed{1, 2}", [1, 2], 0.0, 1.0),
    ],
)
def test_plain_comparisons(text: str, answer: Any, exact: float, boxed: float) -> None:
    assert (exact_match(text, answer), boxed_equals(text, answer)) == (exact, boxed)


def test_I11_answers_of_any_kind_have_a_text() -> None:
    assert [as_text(answer) for answer in (5, 0.5, None, "x", [1, "a"], True)] == ["5", "0.5", "", "x", "1, a", "True"]
