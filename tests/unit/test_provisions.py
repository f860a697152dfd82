"""What a run needs on disk, and what is said when it is not there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_model

from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.errors import ConfigError
from areal_hpc.roles.planning import plan_run
from areal_hpc.roles.provisions import INDEX, missing, missing_of_model

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with all that a checkpoint has, and nothing in it."""
    path = tmp_path / "model"
    path.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ):
        (path / name).write_text("{}")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (path / INDEX).write_text(json.dumps({"weight_map": shards}))
    return path


@pytest.mark.parametrize(("image", "is_there"), [("/images/run.sif", False), ("docker:me/run:1", True)])
def test_an_image_that_is_a_file_has_to_be_there(image: str, is_there: bool) -> None:
    words = ["cluster.shape=het", "cluster.container.runtime=apptainer", f"cluster.container.image={image}"]
    said = list(missing(resolve(load([QUICKSTART], words))))
    assert said == (
        [] if is_there else [f"there is no {image}; set cluster.container.image to a file that all nodes see"]
    )


def test_a_whole_checkpoint_lacks_nothing(model: Path) -> None:
    assert list(missing_of_model(model)) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer"),
        ("model-00002-of-00002.safetensors", "00002.safetensors is in the index of the weights, and not there"),
    ],
)
def test_what_a_broken_download_lacks_is_named(model: Path, name: str, says: str) -> None:
    (model / name).unlink()
    (said,) = missing_of_model(model)
    assert says in said
    assert "hf download" in said


def test_an_empty_shard_and_no_weights_at_all(model: Path) -> None:
    (model / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert [said.partition("; ")[0] for said in missing_of_model(model)] == [
        f"{model}/model-00001-of-00002.safetensors is empty"
    ]
    (model / INDEX).unlink()
    for shard in model.glob("*.safetensors"):
        shard.unlink()
    assert "has no weights" in next(missing_of_model(model))


def test_data_and_model_that_are_not_there_stand_against_a_plan(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    words = ["cluster.shape=split", f"prompts.train={data}", f"model.path={model}", "model.maker=''", "prompts.eval=''"]
    config = resolve(load([QUICKSTART], [*words, "evaluation.every_steps=0"]))
    assert list(missing(config)) == [f"there is no {data}; set prompts.train to a file or directory that all nodes see"]
    lines, possible = plan_run(config)
    assert not possible
    assert f"missing      there is no {data}; " in "\n".join(lines)
    data.touch()
    assert list(missing(config)) == []
    assert plan_run(config)[1]


def test_what_a_run_makes_itself_is_not_missing(tmp_path: Path) -> None:
    config = resolve(load([QUICKSTART], [f"model.path={tmp_path}/none"]))
    assert list(missing(config)) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainer.ranks=3", "trainer.parallel.tensor=3"], "tensor = 3 does not divide its 4 attention heads"),
        (
            ["trainer.ranks=4", "trainer.parallel.pipeline=4"],
            "pipeline times virtual_pipeline = 4 does not divide its 2",
        ),
        (["trainer.ranks=3", "trainer.parallel.tensor=2"], "3 is no multiple of tensor * pipeline * context = 2"),
        (["trainer.ranks=2", "trainer.parallel.expert=2"], "it has no experts"),
    ],
)
def test_a_layout_that_cannot_be_is_no_plan(tmp_path: Path, words: list[str], said: str) -> None:
    make_model(tmp_path, "qwen3", 0)
    given = ["cluster.shape=split", "trainer.backend=megatron", f"model.path={tmp_path}", "model.maker=''", *words]
    with pytest.raises(ConfigError, match=re.escape(said)):
        plan_run(resolve(load([QUICKSTART], given)))


def test_a_plan_needs_no_torch() -> None:
    words = ["plan", str(QUICKSTART), "cluster.shape=het"]
    code = f"import sys; from areal_hpc.cli import main; main({words!r}); sys.exit(70 if 'torch' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
