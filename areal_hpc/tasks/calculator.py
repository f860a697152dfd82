"""A task for an agent with a tool: a sum that a tiny model cannot work out, and a calculator that can.

    What is 37 * 46?      ->  calculator(expression="37*46") -> 1702  ->      1702

There are 16,200 prompts, every product and sum of two numbers of two digits; 256 of them are held out for evaluation,
always the same ones whatever the seed. Standard library only.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping

from areal_hpc.tasks.rows import MadeRows, Row

OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
ASKED = "+*"
OPERANDS = range(10, 100)
EXPRESSION = re.compile(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*")
NUMBER = re.compile(r"-?\d+")


def calculate(expression: str) -> str:
    """What two whole numbers come to, as text; text about what is wrong for anything else, since a model reads it."""
    match = EXPRESSION.fullmatch(expression)
    if match is None:
        return "error: write two whole numbers with +, - or * between them"
    left, sign, right = match.groups()
    return str(OPERATIONS[sign](int(left), int(right)))


def called(name: str, arguments: str | Mapping[str, object]) -> str:
    """The result of a model's call of the calculator, whatever it calls and with whatever it calls it.

    Args:
        arguments: a JSON text as the model wrote it, or what was read from it.
    """
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        expression = given["expression"]
    except (ValueError, TypeError, KeyError, RecursionError):  # the last from brackets that a model opens without end
        expression = ""
    if name != "calculator":
        return f"error: there is no tool {name!r}, only calculator"
    return calculate(expression if isinstance(expression, str) else "")


class Calculations(MadeRows[str]):
    """The rows of one split, ``{"prompt", "answer", "id"}`` each, in an order drawn by ``seed``.

    Raises:
        DataError: ``split`` is neither "train" nor "eval".
    """

    def __init__(self, split: str = "train", seed: int = 0) -> None:
        super().__init__((f"{a} {sign} {b}" for a in OPERANDS for sign in ASKED for b in OPERANDS), split, seed)

    def row(self, item: str) -> Row:
        return {"prompt": f"What is {item}?", "answer": calculate(item), "id": f"calculate {item}"}


def reward(text: str, answer: str) -> float:
    """1.0 if the last number of ``text`` is ``answer``, otherwise 0.0."""
    numbers = NUMBER.findall(text)
    return float(bool(numbers) and numbers[-1] == answer)
