"""Which checkpoint is exported, and what is refused; ``tests/integration/test_run.py`` exports that of a real run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from areal_hpc import checkpoint
from areal_hpc.buffer.epochs import StartRecord, claim_epoch, write_start
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.describe import dump
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config, ModelConfig, PromptsConfig, RolloutConfig, TrainerConfig
from areal_hpc.errors import CheckpointError, DataError
from areal_hpc.fs import publish
from areal_hpc.roles import export as module
from areal_hpc.roles.export import export, find
from areal_hpc.run_dir import RunDir
from areal_hpc.training.shards import SHARDS, Shard, join_shards, write_shards
from areal_hpc.types import WeightVersion
from areal_hpc.watermark import Watermark
from tests.tiny_models import make_model


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Attempt 1 made steps 10, 20 and 30; attempt 2 went on from 20 and made its own 30."""
    run = RunDir.create(tmp_path / "run")
    config = Config(
        name="run",
        model=ModelConfig(path=str(tmp_path / "model")),
        prompts=PromptsConfig(train="m:C"),
        rollout=RolloutConfig(reward="m:f"),
        trainer=TrainerConfig(total_steps=30),
    )
    publish(run.config, dump(config).encode())
    begin(run, None)
    for step in (10, 20, 30):
        commit(run, 1, step)
    begin(run, WeightVersion(1, 20))
    commit(run, 2, 30)
    return run


def begin(run: RunDir, parent: WeightVersion | None) -> None:
    epoch = claim_epoch(run, {"pid": 1})
    version = WeightVersion(epoch, parent.step if parent else 0)
    write_start(run, epoch, StartRecord(parent=parent, version=version, consumed=Watermark(), fingerprint="f"))


def commit(run: RunDir, epoch: int, step: int) -> None:
    def save(directory: Path) -> None:
        (directory / "weights").write_bytes(b"x")

    checkpoint.write(run, WeightVersion(epoch, step), save, {})


@pytest.mark.parametrize(("step", "version"), [(None, (2, 30)), (30, (2, 30)), (20, (1, 20)), (10, (1, 10))])
def test_a_checkpoint_of_the_surviving_history_is_found(
    step: int | None, version: tuple[int, int], run: RunDir
) -> None:
    assert find(run, step).version == version


def test_a_step_without_a_checkpoint_is_refused_with_those_that_have_one(run: RunDir) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of step 25; there are: 10, 20, 30"):
        find(run, 25)


def test_a_damaged_checkpoint_is_not_replaced_by_another(run: RunDir) -> None:
    (find(run, 20).path / "weights").write_bytes(b"y")
    with pytest.raises(CheckpointError, match=r"step-00000020\.e00000001/weights is damaged"):
        find(run, 20)


def test_a_run_without_a_checkpoint_has_nothing_to_export(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "fresh")
    begin(run, None)
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        find(run, None)


@pytest.mark.parametrize("kind", ["a file", "a full directory"])
def test_what_is_there_is_never_overwritten(kind: str, run: RunDir, tmp_path: Path) -> None:
    target = tmp_path / "out"
    if kind == "a file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").touch()
    with pytest.raises(DataError, match="is there already"):
        export(run, None, target)
    assert [path.name for path in tmp_path.rglob("*") if path.name.startswith(".out")] == []


def test_a_run_whose_model_has_gone_says_where_it_was(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"model\.path: there is no directory {tmp_path / 'model'}"):
        export(run, None, tmp_path / "out")


def test_B3_of_two_exports_to_one_name_one_writes_it_and_the_other_says_so(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "model", "qwen3", 1, hidden_size=32, intermediate_size=48)
    before = {path.name for path in tmp_path.iterdir()}
    began = []

    def write(_: Config, source: Path, target: Path, *, merged: bool) -> None:
        assert not merged
        began.append(source)
        if len(began) == 1:  # the other begins after this one and is done before it
            export(run, 10, tmp_path / "out")
        target.mkdir()
        (target / "config.json").write_text(source.name)

    monkeypatch.setattr(module, "_write", write)
    with pytest.raises(DataError, match="out was written by somebody else meanwhile; give another name"):
        export(run, 20, tmp_path / "out")
    assert [path.name for path in began] == ["step-00000020.e00000001", "step-00000010.e00000001"]
    assert (tmp_path / "out" / "config.json").read_text() == "step-00000010.e00000001"
    assert {path.name for path in tmp_path.iterdir()} == before | {"out"}


def test_an_export_is_durable_before_it_has_its_name_and_then_the_name_is(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "model", "qwen3", 1, hidden_size=32, intermediate_size=48)
    synced: list[Path] = []

    def write(_: Config, source: Path, target: Path, *, merged: bool) -> None:
        (target / "deep").mkdir(parents=True)
        for name in ("config.json", "deep/weights"):
            (target / name).write_text("x")

    monkeypatch.setattr(module, "_write", write)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    export(run, 20, tmp_path / "out")
    *inside, top, parent = synced
    assert top.name.startswith(".out.") and top.name.endswith(".tmp")
    assert sorted(str(path.relative_to(top)) for path in inside) == ["config.json", "deep", "deep/weights"]
    assert parent == tmp_path


def test_an_export_that_fails_leaves_nothing_behind(run: RunDir, tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3", 1, hidden_size=32, intermediate_size=48)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"trainer\.json"):  # what ``commit`` wrote is no checkpoint of a backend
        export(run, None, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["grpo", "reward_model"])
def test_what_several_ranks_wrote_is_exported_weight_by_weight(run: RunDir, tmp_path: Path, name: str) -> None:
    """Two ranks' halves of each weight; neither the trainer's backend nor a whole model is in memory."""
    model = make_model(tmp_path / "model", "qwen3", 0)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    if name == "reward_model":
        weights["score.weight"] = torch.ones(1, 64)
    config = replace(load([run.config]), algorithm=AlgorithmConfig(name=name))
    publish(run.config, dump(config).encode())

    def save(directory: Path) -> None:
        for rank in range(2):
            write_shards(halves(weights, rank), directory / SHARDS, rank)
        join_shards(directory / SHARDS, 2)

    checkpoint.write(run, WeightVersion(2, 31), save, {})
    version, purpose = export(run, 31, tmp_path / "out")
    assert version == (2, 31)
    assert ("rollout.reward" in purpose) == (name == "reward_model")
    kind = transformers.AutoModelForCausalLM if name == "grpo" else transformers.AutoModelForSequenceClassification
    found = kind.from_pretrained(tmp_path / "out").state_dict()
    for weight, tensor in weights.items():
        assert torch.equal(found[weight], tensor), weight


def halves(weights: Mapping[str, torch.Tensor], rank: int) -> Iterator[Shard]:
    """One rank's rows of each weight; of one row, all of it is on rank 1."""
    for name, tensor in weights.items():
        middle = tensor.shape[0] // 2
        rows = slice(0, middle) if rank == 0 else slice(middle, None)
        offset = (rows.start, *[0] * (tensor.ndim - 1))
        if tensor[rows].numel():
            yield Shard(name=f"master.{name}", data=tensor[rows].clone(), offset=offset, whole=tuple(tensor.shape))
