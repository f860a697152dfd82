"""Kernels of packages that need a device: what they are asked for is what exact attention computes.

Each is a stand-in that takes what its package documents and computes attention by definition; that the packages do so
only a device can tell.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import Run
from stand_ins_of_kernels import installed
from steps import make, make_reference, save, train, trainer, weights_of, whole_batch

from areal_hpc.config.schema import Attention, Dtype, ParallelConfig, TrainerConfig
from areal_hpc.errors import ConfigError
from areal_hpc.training.ranks import Ranks

pytestmark = [pytest.mark.megatron, pytest.mark.long]


def told(ranks: Ranks, path: Path, config: TrainerConfig) -> tuple[Any, dict[str, float]]:
    """Log-probs, and what a step of training says."""
    backend = make(ranks, config.parallel, path, Dtype.BFLOAT16, trainer=config)
    return backend.logprobs(whole_batch()), train(backend, backend.data_ranks, 1, 1)[0]


def by_every_kernel(ranks: Ranks, parallel: ParallelConfig, path: Path) -> dict[str, Any]:
    with installed():
        return {
            attention: told(ranks, path, replace(trainer(parallel), attention=attention)) for attention in Attention
        }


def test_every_kernel_is_asked_for_what_exact_attention_computes(run: Run, models: dict[str, Path]) -> None:
    for found in run("tp2", by_every_kernel, models["qwen3"]):
        exact, exact_told = found[Attention.EXACT]
        for attention in set(Attention) - {Attention.EXACT}:
            logprobs, told = found[attention]
            assert np.abs(logprobs - exact).max() < 0.1, attention  # bfloat16, rounded in other places
            assert np.abs(logprobs - exact).mean() < 0.01, attention
            assert told["grad_norm"] == pytest.approx(exact_told["grad_norm"], rel=0.05), attention


def shared_by_context(ranks: Ranks, parallel: ParallelConfig, path: Path) -> list[Any]:
    with installed():
        kinds = (Attention.EXACT, Attention.TRANSFORMER_ENGINE)
        backends = [
            make(ranks, parallel, path, Dtype.BFLOAT16, trainer=replace(trainer(parallel), attention=one))
            for one in kinds
        ]
        return [backend.logprobs(whole_batch()) for backend in backends]


def test_transformer_engine_finds_the_chunks_of_context_ranks_where_it_looks_for_them(
    run: Run, models: dict[str, Path]
) -> None:
    for exact, found in run("cp2", shared_by_context, models["qwen3"]):
        assert np.abs(found - exact).max() < 0.1
        assert np.abs(found - exact).mean() < 0.01


def with_fp8(ranks: Ranks, parallel: ParallelConfig, path: Path) -> list[Any]:
    """Without, and with: by a rank with less to do than another, so that some of its passes are of nothing."""
    with installed():
        return [told(ranks, path, replace(trainer(parallel), fp8=fp8)) for fp8 in (False, True)]


def test_fp8_is_given_tokens_by_sixteens_and_the_layers_of_transformer_engine(
    run: Run, models: dict[str, Path]
) -> None:
    """The stand-ins compute in bfloat16, so only the padding may tell."""
    for (logprobs, stats), (padded, padded_stats) in run("dp2", with_fp8, models["qwen3"]):
        np.testing.assert_allclose(padded, logprobs, atol=0.05)
        assert padded_stats["grad_norm"] == pytest.approx(stats["grad_norm"], rel=0.05)


def continued(ranks: Ranks, parallel: ParallelConfig, path: Path, directory: Path) -> dict[str, Any]:
    """Weights after three steps, before the last of which the trainer is another one."""
    with installed():
        before = make(ranks, parallel, path)
        train(before, before.data_ranks, 1, 2)
        save(ranks, before, directory)
        after = make(ranks, parallel, path)
        after.load(str(directory))
        train(after, after.data_ranks, 3, 3)
    return weights_of(after)


def test_an_optimizer_that_counts_the_updates_of_a_group_goes_on_from_their_number(
    run: Run, models: dict[str, Path], tmp_path: Path
) -> None:
    """Transformer Engine's, which Megatron takes where it is installed; torch's is what it is held against."""
    reference = make_reference(models["qwen3"])
    train(reference, reference.data_ranks, 1, 3)
    expected = weights_of(reference)
    for found in run("dp2", continued, models["qwen3"], tmp_path / "checkpoint"):
        for name, weight in expected.items():
            np.testing.assert_allclose(found[name], weight, atol=1e-5, err_msg=name)


def without(ranks: Ranks, parallel: ParallelConfig, path: Path) -> list[str]:
    said = []
    for choice in ({"attention": Attention.TRANSFORMER_ENGINE}, {"fp8": True}):
        with pytest.raises(ConfigError) as refused:
            make(ranks, parallel, path, Dtype.BFLOAT16, trainer=replace(trainer(parallel), **choice))
        said.append(str(refused.value))
    return said


def test_what_megatron_cannot_import_is_refused_by_name(run: Run, models: dict[str, Path]) -> None:
    ((attention, fp8),) = run("tp1", without, models["qwen3"])
    assert attention.startswith("trainer.attention=transformer_engine needs Transformer Engine")
    assert fp8.startswith("trainer.fp8 needs Transformer Engine")
