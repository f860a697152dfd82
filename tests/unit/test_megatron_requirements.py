"""What is refused before Megatron is imported."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_model

from areal_hpc.config.schema import Attention, ParallelConfig, TrainerConfig
from areal_hpc.errors import ConfigError, DataError
from areal_hpc.training.megatron import requirements
from areal_hpc.training.megatron.kernels import kernel_of
from areal_hpc.training.megatron.requirements import check_model, require_kernels, require_megatron


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def answer(_: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(metadata, "version", answer)


@pytest.mark.parametrize("version", ["0.16.1", "0.17.1"])
def test_versions_that_are_known_pass(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, version)
    require_megatron()


def test_what_newer_versions_import_beside_themselves_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.19.2")
    monkeypatch.setattr(requirements, "find_spec", lambda name: None if name == "triton" else object())
    with pytest.raises(ConfigError, match="imports triton; pip install triton"):
        require_megatron()
    monkeypatch.setattr(requirements, "find_spec", lambda name: object())
    require_megatron()


@pytest.mark.parametrize("version", [None, "0.15.3", "0.20.0", "1.0"])
def test_none_and_versions_that_nobody_tried_are_refused(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    installed(monkeypatch, version)
    with pytest.raises(ConfigError, match=r"pip install 'areal-hpc\[megatron\]'") as refused:
        require_megatron()
    assert version is None or version in str(refused.value)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tensor": 3}, ["4 attention heads", "2 key-value heads do not divide each other", "128 feed-forward units"]),
        ({"pipeline": 2, "virtual_pipeline": 2}, ["pipeline times virtual_pipeline = 4 does not divide its 2 layers"]),
        ({"expert": 2}, ["it has no experts"]),
    ],
)
def test_sizes_that_do_not_divide_the_model_are_told_at_once(
    tmp_path: Path, sizes: dict[str, int], said: list[str]
) -> None:
    make_model(tmp_path, "qwen3", 0)
    check_model(tmp_path, ParallelConfig(tensor=2, pipeline=2))
    with pytest.raises(ConfigError) as refused:
        check_model(tmp_path, ParallelConfig(**sizes))
    for words in said:
        assert words in str(refused.value)


def test_experts_are_divided_whole(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe", 0, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
    assert check_model(tmp_path, ParallelConfig(expert=3)).experts is not None
    with pytest.raises(ConfigError, match="expert = 4 does not divide its 6 experts"):
        check_model(tmp_path, ParallelConfig(expert=4))


def test_copies_of_experts_that_nobody_would_keep_alike_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe", 0, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    check_model(tmp_path, ParallelConfig(tensor=2, expert_tensor=2))
    check_model(tmp_path, ParallelConfig(tensor=2, expert=2))
    with pytest.raises(ConfigError, match="expert_tensor = 1 leaves copies of its experts on the 2 ranks"):
        check_model(tmp_path, ParallelConfig(tensor=2))


def test_a_bias_that_is_not_computed_and_a_foreign_model_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "llama", "llama", 0, attention_bias=True)
    with pytest.raises(ConfigError, match="adds a bias to attention's output"):
        check_model(tmp_path / "llama", ParallelConfig())
    make_model(tmp_path / "gemma", "gemma2", 0)
    with pytest.raises(DataError, match="gemma2"):
        check_model(tmp_path / "gemma", ParallelConfig())


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (
            {"attention": Attention.FLASH},
            r"trainer.attention=flash needs flash-attn.*`cuda`.*--no-build-isolation 'areal-hpc\[flash\]'",
        ),
        ({"attention": Attention.ASCEND}, r"trainer.attention=ascend needs torch-npu.*areal-hpc\[npu\]"),
        (
            {"attention": Attention.TRANSFORMER_ENGINE},
            r"trainer.attention=transformer_engine needs Transformer Engine.*`cuda`.*areal-hpc\[transformer-engine\]",
        ),
        ({"fp8": True}, r"trainer.fp8 needs Transformer Engine.*`cuda`.*areal-hpc\[transformer-engine\]"),
    ],
)
def test_a_kernel_that_is_not_installed_is_refused_by_name(choice: dict[str, Any], said: str) -> None:
    require_kernels(TrainerConfig(total_steps=1))
    with pytest.raises(ConfigError, match=said):
        require_kernels(TrainerConfig(total_steps=1, **choice))


@pytest.mark.parametrize(("attention", "package"), [(Attention.FLASH, "flash_attn"), (Attention.ASCEND, "torch_npu")])
def test_and_by_who_would_call_it(attention: Attention, package: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer.attention={attention} needs the package {package}"):
        kernel_of(attention, scale=1.0)


def test_fp8_wants_widths_that_its_products_take(tmp_path: Path) -> None:
    make_model(tmp_path / "fits", "qwen3", 0, hidden_size=64, head_dim=16, num_attention_heads=4, intermediate_size=96)
    check_model(tmp_path / "fits", ParallelConfig(tensor=2), fp8=True)
    with pytest.raises(ConfigError, match=r"on each rank feed-forward width 24; lower trainer.parallel.tensor"):
        check_model(tmp_path / "fits", ParallelConfig(tensor=4), fp8=True)
    make_model(tmp_path / "mixture", "qwen3_moe", 0, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    with pytest.raises(ConfigError, match="has experts, whose tokens come in any number"):
        check_model(tmp_path / "mixture", ParallelConfig(), fp8=True)
