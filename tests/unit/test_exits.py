"""Exit codes are written down once, and everywhere else they are told, they are the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from areal_hpc import exits
from areal_hpc.cli import main
from areal_hpc.exits import EXIT_ELSEWHERE, EXIT_STOPPED, EXIT_UNNEEDED, MEANINGS

ROOT = Path(__file__).resolve().parents[2]


def test_every_code_has_its_number_and_a_meaning() -> None:
    """The numbers of sysexits.h and of shells; a scheduler's script and people's scripts go by them."""
    codes = {name: code for name, code in vars(exits).items() if name.startswith("EXIT_")}
    expected = {"DONE": 0, "FAILED": 1, "USER_ERROR": 2, "UNNEEDED": 69, "STALLED": 70, "ELSEWHERE": 71, "STOPPED": 75}
    expected["INTERRUPTED"] = 130
    assert codes == {f"EXIT_{name}": code for name, code in expected.items()}
    assert sorted(MEANINGS) == sorted(codes.values())


def test_the_readme_lists_them_all() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| exit code | meaning |\n|---|---|\n")[2]
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", table.partition("\n\n")[0], flags=re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == MEANINGS


def test_the_help_lists_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for code, meaning in MEANINGS.items():
        assert f"\n  {code:>3}  {meaning}\n" in shown


def test_the_batch_scripts_go_by_the_code_of_a_run_that_stopped_or_could_not_hear_yet() -> None:
    for name in ("train.sbatch", "train_split.sbatch"):
        text = (ROOT / "sbatch" / name).read_text(encoding="utf-8")
        soon = [f"soon:{code}" for code in (EXIT_STOPPED, 143, EXIT_ELSEWHERE)]
        assert f"\n  {' | '.join(soon)} | :{EXIT_ELSEWHERE}) again && " in text
    text = (ROOT / "sbatch/satellites.sbatch").read_text(encoding="utf-8")
    assert re.findall(r"^  ([\d |]+)\) again ?(\w*) &&", text, re.MULTILINE) == [
        (f"{EXIT_STOPPED} | 143 | {EXIT_ELSEWHERE}", ""),
        (str(EXIT_UNNEEDED), "requeuehold"),
    ]


def test_nobody_else_defines_one() -> None:
    for path in sorted((ROOT / "areal_hpc").rglob("*.py")):
        if path.name == "exits.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
            assert not [name for name in names if re.match(r"EXIT_(?!CODES)", name)], path
