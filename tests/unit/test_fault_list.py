"""tests/FAULTS.md is complete, and every test that it or tests/SECURITY.md names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TEXT = (TESTS / "FAULTS.md").read_text(encoding="utf-8").splitlines()
SECURITY = (TESTS / "SECURITY.md").read_text(encoding="utf-8").splitlines()
LINES = [line for line in TEXT if re.match(r"\d+\. ", line)]
STEPS = [line for line in TEXT if line.startswith("- ")]
TEST = r"`\w+/test_\w+\.py::test_\w+`"


def test_every_fault_is_listed_once() -> None:
    assert sorted(int(line.split(".")[0]) for line in LINES) == list(range(1, 67))


def test_every_fault_has_a_test_or_a_reason() -> None:
    for line in LINES:
        assert re.search(rf"{TEST}|no test: .{{20}}", line), line


def test_every_step_has_a_test() -> None:
    assert len(STEPS) == 16
    for line in STEPS:
        assert re.search(TEST, line), line


def test_every_named_test_exists() -> None:
    named = set(re.findall(r"`([^`]*\.py)::(\w+)`", "\n".join([*TEXT, *SECURITY])))
    assert len(named) > 70
    for path, name in sorted(named):
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{path} has no {name}"
