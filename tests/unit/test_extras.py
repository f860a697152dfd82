"""What is missing is named together with the command that installs it, and that command is right."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from areal_hpc.errors import ConfigError
from areal_hpc.extras import optional
from areal_hpc.training.megatron.requirements import PACKAGES

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_installed_is_imported() -> None:
    assert optional("json", extra="data", what="this test") is json


@pytest.mark.parametrize("module", ["no_such_package", "no_such_package.part"])
def test_what_is_missing_comes_with_how_to_install_it(module: str) -> None:
    with pytest.raises(ConfigError) as caught:
        optional(module, extra="math", what="the reward math_answer")
    assert str(caught.value) == (
        "the reward math_answer needs the package no_such_package, which cannot be imported (No module named "
        "'no_such_package'); run `pip install 'areal-hpc[math]'`, or in a clone of the repository `pip install -e "
        "'.[math]'`"
    )


def test_a_package_that_lacks_one_of_its_own_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy.py").write_text("import what_it_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"package needy, .*No module named 'what_it_needs'"):
        optional("needy", extra="data", what="this test")
    assert "needy" not in sys.modules


def with_those_it_names(extra: str, extras: dict[str, list[str]]) -> set[str]:
    """Requirements of an extra, and of the extras of ours among them."""
    found: set[str] = set()
    for requirement in extras[extra]:
        named = re.fullmatch(r"areal-hpc\[(.+)\]", requirement)
        inner = [with_those_it_names(one, extras) for one in named[1].split(",")] if named else [{requirement}]
        found = found.union(*inner)
    return found


def test_what_computes_on_cuda_devices_is_in_its_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    packages = {re.split(r"[<>=]", requirement)[0] for requirement in with_those_it_names("cuda", extras)}
    assert {"torch", "transformers", "flash-attn", "transformer-engine[pytorch]"} <= packages
    for package in PACKAGES.values():
        (extra,) = re.findall(r"areal-hpc\[(.+)\]", package.command)
        assert any(one.replace("-", "_").startswith(package.module) for one in extras[extra]), package


def test_every_extra_that_the_code_asks_for_installs_what_it_asks_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    calls = [
        call
        for path in sorted((ROOT / "areal_hpc").rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "optional"
    ]
    assert len(calls) >= 6
    for call in calls:
        asked = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        assert asked["extra"] in extras
        if isinstance(call.args[0], ast.Constant):
            package = str(call.args[0].value).partition(".")[0].replace("_", "-")
            assert any(requirement.startswith(package) for requirement in extras[asked["extra"]])
