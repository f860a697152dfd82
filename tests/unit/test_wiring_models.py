"""The model directory: who writes it when several runs want it at once."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_hpc.config.load import load
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError
from areal_hpc.roles.wiring import models
from areal_hpc.roles.wiring.models import check_model_path, make_model

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def config_of(path: Path, seed: int) -> Config:
    return load([QUICKSTART], [f"model.path={path}", f"seed={seed}", "model.maker=test:make"])


def test_B3_of_runs_that_make_one_model_at_once_one_writes_it_and_all_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "models" / "tiny"
    all_are_making, seen = threading.Barrier(3), list[bool]()

    def make(target: Path, seed: int) -> None:
        target.mkdir()
        (target / "config.json").write_text(str(seed))
        all_are_making.wait(timeout=30)
        seen.append(path.exists())  # half a model has no name that anybody looks for
        all_are_making.wait(timeout=30)
        (target / "model.safetensors").write_text(str(seed))

    monkeypatch.setattr(models, "dotted", lambda *_: make)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(make_model, [config_of(path, seed) for seed in (1, 2, 3)]))
    assert seen == [False] * 3
    assert (path / "config.json").read_text() == (path / "model.safetensors").read_text()
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
    assert [one.name for one in path.parent.iterdir()] == ["tiny"]


def test_what_a_maker_has_written_is_durable_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny"
    synced: list[Path] = []

    def make(target: Path, seed: int) -> None:
        target.mkdir()
        (target / "model.safetensors").write_text(str(seed))

    monkeypatch.setattr(models, "dotted", lambda *_: make)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    make_model(config_of(path, 1))
    file, directory, parent = synced
    assert (file.name, file.parent, directory.name, parent) == ("model.safetensors", directory, "tiny", tmp_path)
    assert directory != path  # still under the name that nobody looks for


def test_B3_a_model_that_is_there_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "dotted", lambda *_: pytest.fail("it was made"))
    make_model(config_of(tmp_path, 1))


def test_a_model_that_is_there_needs_no_maker_any_more(tmp_path: Path) -> None:
    check_model_path(config_of(tmp_path, 1))
    with pytest.raises(ConfigError, match=r"model\.maker = 'test:make' cannot be imported"):
        check_model_path(config_of(tmp_path / "missing", 1))


def test_a_file_in_the_models_place_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").write_text("")
    monkeypatch.setattr(models, "dotted", lambda *_: lambda target, _: target.mkdir())
    with pytest.raises(NotADirectoryError):
        make_model(config_of(tmp_path / "model", 1))
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
