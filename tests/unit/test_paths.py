"""Relative paths of a configuration begin where the command is typed, wherever its files lie."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_hpc.config.keys import keys, value_of, with_value
from areal_hpc.config.load import load
from areal_hpc.config.paths import PATHS, anchored
from areal_hpc.config.schema import Config
from areal_hpc.errors import DataError
from areal_hpc.prompts import open_dataset
from areal_hpc.roles.wiring.models import check_model_path

LAYER = """\
name: small
model: {path: models/tiny}
prompts: {train: data/train.jsonl, eval: /data/test.jsonl}
rollout: {reward: my_rewards:near}
trainer: {total_steps: 10}
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of a file in another directory than the one that the command is typed in."""
    file = tmp_path / "configs" / "small.yaml"
    file.parent.mkdir()
    file.write_text(LAYER, encoding="utf-8")
    return load([file])


def test_relative_paths_begin_here_and_nothing_else_changes(config: Config) -> None:
    found = anchored(config, Path("/home/me"))
    changed = {key: value_of(found, key) for key in keys() if value_of(found, key) != value_of(config, key)}
    assert changed == {
        "model.path": "/home/me/models/tiny",
        "prompts.train": "/home/me/data/train.jsonl",
        "run_root": "/home/me/runs",
    }
    assert anchored(found, Path("/elsewhere")) == found


def test_a_task_is_no_path(config: Config) -> None:
    task = "areal_hpc.tasks.sort_digits:SortDigits"
    assert anchored(with_value(config, "prompts.train", task), Path("/home/me")).prompts.train == task


def test_every_key_that_names_a_file_or_directory_is_known() -> None:
    """A new knob is a decision; so is whether it is a path."""
    telling = re.compile(r"(?i)(?<!checkpoint's )\bdirectory\b|\.jsonl|same forms")
    told = {name for name, key in keys().items() if telling.search(key.help)}
    assert told - {"name", "model.maker"} == set(PATHS)


def test_what_is_not_there_is_named_with_where_it_was_looked_for(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "data").mkdir()
    (tmp_path / "configs" / "data" / "train.jsonl").touch()  # beside the configuration: not where it is looked for
    with pytest.raises(DataError, match=rf"data set {tmp_path}/data/train\.jsonl does not exist \(a relative path is"):
        open_dataset(config.prompts, "train", 1)
    with pytest.raises(DataError, match=rf"no directory {tmp_path}/models/tiny \(a relative path is looked for from"):
        check_model_path(config)
