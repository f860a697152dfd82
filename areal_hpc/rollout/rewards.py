r"""Rewards for answers that can be checked: plain functions ``f(text, answer, prompt) -> 0.0 or 1.0``.

    exact_match     the whole text is the answer
    boxed_equals    the last \boxed{...} is the answer, as a normalised string
    gsm8k_answer    the number after the last ####, else in the last \boxed{...}, equals the answer's
    math_answer     the last \boxed{...}, else the end of the text, is mathematically equal to the answer

They run in the workers of ``reward_pool``, whose time limit is the only one: math-verify's own needs SIGALRM and the
main thread, so it is switched off. An expected answer may be a number, a text or a list; None equals nothing.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeVar

from areal_hpc.extras import optional
from areal_hpc.types import Prompt

TAIL = 1000
"""Characters at the end of a text without a box in which an answer is looked for."""
LONGEST_BOX, LONGEST_RATIO = 400, 4
"""Characters of a box that are read: at least the first, or the second times the answer's; sums of hundreds of terms
take math-verify minutes and are no answer."""
NUMERIC_TOLERANCE = 1e-4
"""Largest relative difference of two numbers that math-verify, which rounds to six decimals, may call equal."""

F = TypeVar("F", bound=Callable[..., Any])


def prepared_by(prepare: Callable[[], Any]) -> Callable[[F], F]:
    """Mark a reward with what its worker runs once before the first call: slow imports, caches."""

    def mark(reward: F) -> F:
        reward.prepare = prepare  # type: ignore[attr-defined]
        return reward

    return mark


def as_text(answer: Any) -> str:
    """An expected answer from a data set as text: lists joined by commas, None as the empty text."""
    if answer is None:
        return ""
    if isinstance(answer, list | tuple):
        return ", ".join(as_text(item) for item in answer)
    return str(answer)


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, braces balanced; None where there is none or it is not closed."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    begin = start + len(r"\boxed{")
    depth, position = 1, begin
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # an escaped brace does not count
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[begin:position]
        position += 1
    return None


_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|,|;|:|!|quad|qquad)(?![A-Za-z])|\\?\$")
_BLANKS = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # "1 2" is not "12"
_FONTS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_WHOLE_DECIMAL = re.compile(r"(?<![\d.])(\d+)\.0*(?!\d)")


def normalise(answer: str) -> str:
    """One spelling for answers that differ only in how they are written: spaces, fonts, dollar signs, 1,000, 2.0."""
    plain = _LAYOUT.sub(" ", _FONTS.sub(r"\1", answer)).replace(r"\%", "%")
    plain = re.sub(r"\\[dt]frac", r"\\frac", plain)
    plain = _BLANKS.sub("", plain.strip()).rstrip(".")
    if _THOUSANDS.fullmatch(plain):
        plain = plain.replace(",", "")
    return _WHOLE_DECIMAL.sub(r"\1", plain).removeprefix("+")


def exact_match(text: str, answer: Any, prompt: Prompt | None = None) -> float:
    """1.0 if the text is the answer, but for white space around it."""
    return float(answer is not None and text.strip() == as_text(answer).strip())


def boxed_equals(text: str, answer: Any, prompt: Prompt | None = None) -> float:
    r"""1.0 if the last ``\boxed{...}`` is the answer as a normalised string."""
    boxed = last_boxed(text)
    return float(boxed is not None and answer is not None and normalise(boxed) == normalise(as_text(answer)))


def _number(text: str) -> Decimal | None:
    """The only number in ``text``; None where there is none, or several, as in a fraction."""
    found = re.findall(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", text)
    return Decimal(found[0].replace(",", "")) if len(found) == 1 else None


def _after_hashes(text: str) -> str | None:
    return text.rpartition("####")[2].strip().split("\n")[0] if "####" in text else None


def gsm8k_answer(text: str, answer: Any, prompt: Prompt | None = None) -> float:
    r"""1.0 if the number after the last ``####``, else the one in the last ``\boxed{...}``, is the answer's.

    The answer is GSM8K's own column (a solution that ends with ``#### n``) or the number alone (arXiv:2110.14168).
    """
    expected = as_text(answer)
    gold = _number(_after_hashes(expected) or expected)
    said = _after_hashes(text)
    given = _number((last_boxed(text) or "") if said is None else said)
    return float(gold is not None and gold == given)


_PLAIN_WORD = re.compile(
    r"(?<![\\A-Za-z])(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|pi)(?![A-Za-z])"
)
_ROOT = re.compile(r"\\?(?<![A-Za-z])sqrt\s*\(([^()]*)\)")
_ONE_I = re.compile(r"(?<![\d.])1\s*i(?![A-Za-z])")


def _as_latex(answer: str) -> str:
    """Plain text as people and sympy write it (7*sin(pi*x/5), x**2, sqrt(2), 1.0i) in the LaTeX that is read right."""
    latex = _ROOT.sub(r"\\sqrt{\1}", answer.replace("**", "^"))
    latex = _PLAIN_WORD.sub(r"\\\1", latex)
    return _ONE_I.sub("i", _WHOLE_DECIMAL.sub(r"\1", latex))


@functools.cache
def _math_verify() -> tuple[Callable[..., list[Any]], Callable[..., bool], Any]:
    """math-verify's parse, verify and LaTeX reader; seconds to import, so here and once."""
    math_verify = optional("math_verify", extra="math", what="the reward math_answer")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that its own limits are off
    math_verify.parse(r"\boxed{\frac{1}{2}}", parsing_timeout=None)  # builds its grammar
    return math_verify.parse, math_verify.verify, math_verify.LatexExtractionConfig


@prepared_by(_math_verify)
def math_answer(text: str, answer: Any, prompt: Prompt | None = None) -> float:
    r"""1.0 if the last ``\boxed{...}``, else the end of the text, equals the answer as mathematics.

    Equal normalised strings are equal; everything else is up to math-verify, with two guards of our own: plain text is
    turned into LaTeX first (it would read ``pi`` as p times i), and numbers that it takes for equal because both round
    to the same six decimals must also be close in proportion.

    Known limits, all of math-verify: a percentage equals the number without its sign (50 and 50\%), an open interval
    equals the pair or set that is written alike, and ``3:4`` is the quotient (equal to ``6:8``).
    """
    gold = as_text(answer)
    gold = last_boxed(gold) or gold
    boxed = last_boxed(text)
    if not gold.strip() or (boxed is None and r"\boxed" in text):
        return 0.0
    if normalise(gold) == normalise(text if boxed is None else boxed):
        return 1.0
    if boxed is not None and len(boxed) > max(LONGEST_BOX, LONGEST_RATIO * len(gold)):
        return 0.0
    parse, verify, latex_reader = _math_verify()
    only_latex = {"extraction_config": [latex_reader()], "parsing_timeout": None}
    expected = parse(rf"\boxed{{{_as_latex(gold)}}}", **only_latex)
    if boxed is None:
        given = parse(text[-TAIL:], parsing_timeout=None)
    else:
        given = parse(rf"\boxed{{{_as_latex(boxed)}}}", **only_latex)
    return float(verify(expected, given, timeout_seconds=None) and not _far_apart(expected, given))


def _far_apart(expected: list[Any], given: list[Any]) -> bool:
    """Whether both are numbers that differ in proportion, also by the factor 100 of a percentage."""
    values = [_value(parsed[0]) for parsed in (expected, given)]
    if values[0] is None or values[1] is None:
        return False
    return not any(_are_close(values[0] * factor, values[1]) for factor in (1, 100)) and not _are_close(
        values[0], values[1] * 100
    )


def _value(expression: Any) -> Any:
    """The number that a sympy expression, or the right side of an equation, stands for; None if it is none."""
    from sympy import Eq, Expr

    if isinstance(expression, Eq):
        expression = expression.rhs
    if not isinstance(expression, Expr) or expression.free_symbols:
        return None
    value = expression.doit()
    return value if value.is_number and value.is_finite else None


def _are_close(first: Any, second: Any) -> bool:
    difference = abs(first - second)
    if first.is_Rational and second.is_Rational:
        return bool(difference == 0)
    return bool(difference.evalf() <= NUMERIC_TOLERANCE * max(abs(first).evalf(), abs(second).evalf()))
