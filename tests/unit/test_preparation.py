"""The preflight of a run in a container: what is inside decides, and its words come out. srun is a stand-in that starts
the command in this environment; tests/slurm/test_slurm_sites.py has a real one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config
from areal_hpc.errors import AttemptFailed, ConfigError
from areal_hpc.roles.preparation import prepare, problem_of

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
INSIDE = f"""while [ "$1" != python ]; do shift; done; shift; exec {sys.executable} "$@\""""
IMAGE = ["cluster.shape=split", "cluster.container.runtime=apptainer", "cluster.container.image=/image.sif"]


def config_of(*words: str) -> Config:
    return resolve(load([QUICKSTART], [*IMAGE, *words]))


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in, on a PATH and in a job of its own."""
    path = tmp_path / "bin/srun"
    path.parent.mkdir()
    path.write_text(f"#!/bin/bash\necho $* >{tmp_path}/called\n{INSIDE}\n", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(QUICKSTART.parents[1]))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    return path


def test_what_is_wrong_inside_is_said_outside_in_the_same_words(srun: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.maker = 'nowhere:make' cannot be imported"):
        prepare(config_of("model.maker=nowhere:make", f"model.path={tmp_path / 'model'}"))
    called = (tmp_path / "called").read_text(encoding="utf-8")
    assert "--nodes=1 --ntasks=1" in called
    assert called.endswith("apptainer exec /image.sif python -m areal_hpc.roles.preparation\n")


def test_a_model_with_a_maker_is_made_where_the_preflight_is(tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert problem_of(config_of("model.maker=os:makedirs", f"model.path={model}")) == ""
    assert model.is_dir()


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("echo 'no such image' >&2; exit 255", r"ended with code 255:\nno such image"),
        ("exec sleep 60", r"waited 0\.5 s \(limits\.start_s\) for srun --nodes=1"),
    ],
)
def test_a_container_that_does_not_come_up_is_an_error_with_its_command(srun: Path, does: str, says: str) -> None:
    srun.write_text(f"#!/bin/bash\n{does}\n", encoding="utf-8")
    with pytest.raises(AttemptFailed, match=says):
        prepare(config_of("limits.start_s=0.5"))


def test_a_container_that_does_not_come_up_once_is_tried_again(srun: Path, tmp_path: Path) -> None:
    works = srun.read_text(encoding="utf-8").partition("\n")[2]
    first = f"[ -e {tmp_path}/tried ] || {{ touch {tmp_path}/tried; exit 255; }}"
    srun.write_text(f"#!/bin/bash\n{first}\n{works}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^model\.maker = 'nowhere:make' cannot be imported"):
        prepare(config_of("model.maker=nowhere:make", f"model.path={tmp_path / 'model'}"))
