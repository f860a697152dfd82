"""Adapters on split models against the reference's, which are held against float64: any layout, the same adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import Run
from safetensors.torch import load_file
from steps import make, make_reference, save, train, trainer, weights_of, whole_batch

from areal_hpc.config.lora import ATTENTION, LoraConfig
from areal_hpc.config.schema import Dtype, ParallelConfig, Recompute
from areal_hpc.errors import CheckpointError, ConfigError
from areal_hpc.pretrained.lora import BASE, PEFT_PREFIX
from areal_hpc.training.lora import saved_adapters
from areal_hpc.training.ranks import Ranks

pytestmark = pytest.mark.megatron

LORA = LoraConfig(rank=3, alpha=12.0)
LAYOUTS = [
    ("qwen3", "tp2 pp2"),
    pytest.param("qwen2", "cp2 dp2", marks=pytest.mark.long),
    pytest.param("qwen3", "tp2", marks=pytest.mark.long),
    pytest.param("qwen2", "tp4", marks=pytest.mark.long),  # more ranks than key-value heads
    pytest.param("qwen2", "pp2", marks=pytest.mark.long),  # a tied embedding on both stages
    pytest.param("qwen2", "dp2", marks=pytest.mark.long),
    pytest.param("qwen2", "tp2 dp2", marks=pytest.mark.long),
    pytest.param("qwen3", "tp2 cp2", marks=pytest.mark.long),
    pytest.param("llama", "pp2 vpp2", marks=pytest.mark.long),
    pytest.param("qwen3_moe", "dp2 ep2", marks=pytest.mark.long),
    pytest.param("qwen3_moe", "tp2 ep2 pp2", marks=pytest.mark.long),
]


def lora_of(family: str) -> LoraConfig:
    return replace(LORA, target_modules=ATTENTION) if family.endswith("moe") else LORA


def story(ranks: Ranks, parallel: ParallelConfig, path: Path, saved: Path) -> dict[str, Any]:
    lora = lora_of(path.name)
    backend = make(ranks, parallel, path, lora=lora)
    found = {"loaded": weights_of(backend), "logprobs": backend.logprobs(whole_batch())}
    found["told"] = train(backend, backend.data_ranks, 1, 2)
    save(ranks, backend, saved)
    found["trained"], found["reference"] = weights_of(backend), backend.reference_logprobs(whole_batch())
    found["told"] += train(backend, backend.data_ranks, 3, 3)
    again = make(ranks, parallel, path, lora=lora, whole=True)
    again.load(str(saved))
    return found | {"merged": weights_of(again), "again": train(again, again.data_ranks, 3, 3)}


Expected = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def expected(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """What the reference makes of the same steps on a family."""

    @functools.cache
    def of(family: str) -> dict[str, Any]:
        path, lora, saved = models[family], lora_of(family), tmp_path_factory.mktemp(family)
        backend = make_reference(path, lora=lora)
        found = {"loaded": weights_of(backend), "logprobs": backend.logprobs(whole_batch())}
        found["told"] = train(backend, Ranks(), 1, 2)
        found["trained"] = weights_of(backend)
        backend.snapshot()(saved)
        found["told"] += train(backend, Ranks(), 3, 3)
        whole = make_reference(path, lora=lora, whole=True)
        whole.load(str(saved))
        return found | {"merged": weights_of(whole)}

    return of


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_every_layout_trains_the_adapters_that_the_reference_does(
    run: Run, models: dict[str, Path], expected: Expected, tmp_path: Path, family: str, layout: str
) -> None:
    """Statistics, the gradient's norm among them; adapters; the model merged; and a checkpoint on the same layout."""
    stories, right = run(layout, story, models[family], tmp_path), expected(family)
    for found in stories:
        assert list(found["loaded"]) == list(right["loaded"])
        for name, tensor in found["loaded"].items():
            np.testing.assert_array_equal(tensor, right["loaded"][name], err_msg=name)  # also of the base: its print
        np.testing.assert_allclose(found["logprobs"], right["logprobs"], atol=1e-5)
        np.testing.assert_array_equal(found["reference"], found["logprobs"])  # before training, and without adapters
        for told, known in zip(found["told"], right["told"], strict=True):
            assert told == pytest.approx(known, rel=5e-4, abs=5e-6)
        assert found["again"] == found["told"][2:]
        for what in ("trained", "merged"):
            assert found[what].keys() == right[what].keys()
            for name, tensor in right[what].items():
                np.testing.assert_array_equal(found[what][name], stories[0][what][name], err_msg=name)
                np.testing.assert_allclose(found[what][name], tensor, atol=2e-5, err_msg=name)
    ups = [tensor for name, tensor in right["trained"].items() if ".lora_B." in name]
    assert min(np.abs(tensor).max() for tensor in ups) > 1e-4


def loaded(ranks: Ranks, parallel: ParallelConfig, path: Path, saved: Path, written: Path) -> dict[str, Any]:
    backend = make(ranks, parallel, path, lora=LORA)
    backend.load(str(saved))
    save(ranks, backend, written)
    backend.export(str(written / "adapter"))
    return {"weights": weights_of(backend), "told": train(backend, backend.data_ranks, 3, 3)}


def test_each_backend_goes_on_from_the_other_s_adapters(run: Run, models: dict[str, Path], tmp_path: Path) -> None:
    """The reference's to two tensor-parallel ranks, and theirs back: the same bits, moments included."""
    path = models["qwen3"]
    reference = make_reference(path, lora=LORA)
    train(reference, Ranks(), 1, 2)
    reference.snapshot()(tmp_path)
    right = weights_of(reference)
    stories = run("tp2", loaded, path, tmp_path, tmp_path / "split")
    again = make_reference(path, lora=LORA)
    again.load(str(tmp_path / "split"))
    told = train(reference, Ranks(), 3, 3)
    assert train(again, Ranks(), 3, 3) == told
    for found in stories:
        assert found["told"][0] == pytest.approx(told[0], rel=5e-4, abs=5e-6)
        for name, tensor in right.items():
            np.testing.assert_array_equal(found["weights"][name], tensor, err_msg=name)
    exported = load_file(tmp_path / "split" / "adapter" / "adapter_model.safetensors")
    from_files = dict(saved_adapters(tmp_path / "split", "float32"))
    assert from_files.keys() == right.keys()
    for name in right.keys() - {BASE}:
        np.testing.assert_array_equal(from_files[name].numpy(), right[name], err_msg=name)
        np.testing.assert_array_equal(exported[PEFT_PREFIX + name].numpy(), right[name], err_msg=name)


def recomputed(ranks: Ranks, parallel: ParallelConfig, path: Path) -> list[Any]:
    told = []
    for what in (Recompute.NONE, Recompute.LAYERS):
        for dtype in Dtype:
            settings = replace(trainer(parallel), recompute=what)
            backend = make(ranks, parallel, path, dtype, trainer=settings, lora=LORA)
            told.append(train(backend, backend.data_ranks, 1, 2))
    return told


def test_layers_that_are_computed_again_learn_the_same(run: Run, models: dict[str, Path]) -> None:
    """Also the first one, whose input needs no gradient; and in bfloat16 nearly what float32 does."""
    [[kept, rounded, again, rounded_again]] = run("tp1", recomputed, models["qwen3"])
    for one, other in ((kept, again), (rounded, rounded_again)):
        for step, known in zip(other, one, strict=True):
            assert step == pytest.approx(known, rel=1e-6)
    assert rounded[1]["grad_norm"] == pytest.approx(kept[1]["grad_norm"], rel=0.05)


def refused(ranks: Ranks, parallel: ParallelConfig, path: Path, saved: Path) -> list[str]:
    told = []
    with pytest.raises(CheckpointError) as other:
        make(ranks, parallel, path, lora=replace(LORA, rank=4)).load(str(saved))
    told.append(str(other.value))
    with pytest.raises(ConfigError) as experts:
        make(ranks, parallel, path.parent / "qwen3_moe", lora=LORA)
    return [*told, str(experts.value)]


def test_what_cannot_be_is_refused(run: Run, models: dict[str, Path], tmp_path: Path) -> None:
    make_reference(models["qwen3"], lora=LORA).snapshot()(tmp_path)
    [[rank, experts]] = run("tp1", refused, models["qwen3"], tmp_path)
    assert "model.lora.rank" in rank and "was made with 3, not 4" in rank
    assert "has experts, which get no adapters; name q_proj" in experts
