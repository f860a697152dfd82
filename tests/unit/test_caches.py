"""Caches of code: by what the libraries themselves say they use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from areal_hpc.errors import RunDirError
from areal_hpc.roles.caches import VARIABLES, use_own_caches

ROLE = """
import json, os, sys
from pathlib import Path
from areal_hpc.roles.caches import use_own_caches
use_own_caches(Path("/runs/one"), "trainer", int(sys.argv[1]))
assert not {"torch", "huggingface_hub", "transformers"} & set(sys.modules), "too late for their variables"
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils.cpp_extension import _get_build_directory
from transformers.utils import HF_MODULES_CACHE
print(json.dumps([HF_MODULES_CACHE, cache_dir(), _get_build_directory("mine", False), os.environ["TRITON_CACHE_DIR"]]))
"""


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This node's directory for temporary files; nobody has set a cache."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def chosen(run: str, role: str, index: int) -> dict[str, str]:
    environment: dict[str, str] = {}
    use_own_caches(Path(run), role, index, environment)
    return environment


def test_B14_no_two_processes_share_a_cache_and_a_restarted_one_finds_its_own(node: Path) -> None:
    who = [("/a", "trainer", 0), ("/a", "trainer", 1), ("/a", "generator", 0), ("/b", "trainer", 0)]
    places = [place for one in who for place in chosen(*one).values()]
    assert len(set(places)) == len(who) * len(VARIABLES)
    assert all(Path(place).is_relative_to(node) for place in places)
    assert chosen(*who[0]) == chosen(*who[0])
    assert [path.stat().st_mode & 0o777 for path in node.iterdir()] == [0o700]


def test_B14_the_libraries_use_what_they_are_pointed_to(node: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(node), "HOME": str(node / "home"), "HF_HOME": str(node / "shared")}
    told = subprocess.run(
        [sys.executable, "-c", ROLE, "1"], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    used = json.loads(told.stdout)
    mine = chosen("/runs/one", "trainer", 1)
    assert used[:2] == [mine["HF_MODULES_CACHE"], mine["TORCHINDUCTOR_CACHE_DIR"]]
    assert Path(used[2]).is_relative_to(mine["TORCH_EXTENSIONS_DIR"])
    assert used[3] == mine["TRITON_CACHE_DIR"]


def test_what_a_person_has_set_stays() -> None:
    environment = {"TRITON_CACHE_DIR": "/scratch/triton"}
    use_own_caches(Path("/a"), "trainer", 0, environment)
    assert environment["TRITON_CACHE_DIR"] == "/scratch/triton"
    assert set(environment) == set(VARIABLES)


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file"])
def test_a_place_that_others_can_write_code_into_is_refused(kind: str, node: Path) -> None:
    place = node / f"areal_hpc-{os.getuid()}"
    if kind == "open to others":
        place.mkdir()
        place.chmod(0o777)
    elif kind == "a link":
        (node / "theirs").mkdir(mode=0o700)
        place.symlink_to(node / "theirs")
    else:
        place.write_text("")
    with pytest.raises(RunDirError, match="not a directory of yours alone; remove it, or set TMPDIR"):
        chosen("/a", "trainer", 0)
