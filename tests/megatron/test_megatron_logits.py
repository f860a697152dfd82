"""Logits of split models against transformers on the same weights, and what must not change them or their gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from layouts import Run
from steps import ALGORITHM, TEMPERATURE, VOCAB_SIZE, make, train, trainer, whole_batch
from torch import Tensor

from areal_hpc.config.schema import Dtype, ParallelConfig, Recompute
from areal_hpc.training.megatron.backend import MegatronBackend
from areal_hpc.training.megatron.heads import whole_sequence
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import Batch

pytestmark = [pytest.mark.megatron, pytest.mark.long]

LAYOUTS = [
    ("llama", "tp1"),
    ("llama", "tp2"),
    ("llama3", "tp1"),
    ("yarn", "tp1"),
    ("llama", "pp2 vpp2"),
    ("qwen2", "tp2 pp2"),
    ("qwen2", "cp2"),
    ("qwen3", "pp2 dp2"),
    ("qwen3", "tp4"),  # of its two key-value heads each is on two ranks
    ("qwen3", "tp2 cp2"),
    ("qwen3_moe", "dp2 ep2"),
    ("qwen3_moe", "tp2 etp2"),
    ("qwen3_moe", "tp2 ep2 pp2"),
]


def all_tokens() -> Batch:
    """Every token but the first of each sequence is wanted, so that its state is computed."""
    batch = whole_batch()
    mask = np.ones(batch.token_ids.size, dtype=np.bool_)
    mask[batch.boundaries[:-1]] = False
    return replace(batch, loss_mask=mask)


def logits(ranks: Ranks, parallel: ParallelConfig, path: Path, dtype: Dtype = Dtype.FLOAT32) -> Any:
    """Logits [T, V] that predict each token; rows of first tokens are 0."""
    backend, batch = make(ranks, parallel, path, dtype), all_tokens()
    place, split = backend._place, backend._passes.split(batch)
    found = torch.zeros(batch.token_ids.size, VOCAB_SIZE)

    def head(model: Any, hidden: Tensor, packed: Any, part: Batch | None) -> tuple[Tensor, Any]:
        hidden = whole_sequence(hidden, place, sum_gradients=True)[torch.from_numpy(packed.rows)]
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        mine = hidden @ weight.T
        every = [torch.empty_like(mine) for _ in range(place.tensor.size())]
        dist.all_gather(every, mine, group=place.tensor)
        return torch.cat(every, 1)[:, :VOCAB_SIZE].float(), packed

    def keep(number: int, rows: Tensor, packed: Any) -> Tensor:
        found[torch.from_numpy(split[number][1][packed.slots])] = rows
        return rows.sum()

    with torch.no_grad():
        backend._passes.run(backend._model.chunks, [part for part, _ in split], head, keep)
    if place.context.size() > 1:
        dist.all_reduce(found, group=place.context)
    return found.numpy() if place.is_last_stage else None


def of_transformers(path: Path, dtype: torch.dtype) -> Any:
    batch = all_tokens()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    found = np.zeros((batch.token_ids.size, VOCAB_SIZE), dtype=np.float32)
    with torch.no_grad():
        for start, end in zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True):
            ids = torch.from_numpy(batch.token_ids[start:end]).long()
            found[start + 1 : end] = model(input_ids=ids[None]).logits[0, :-1].float().numpy()
    return found


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_D6_logits_are_those_of_transformers(run: Run, models: dict[str, Path], family: str, layout: str) -> None:
    """Of every copy of the model: each computed the sequences of the whole batch."""
    right = of_transformers(models[family], torch.float32)
    assert np.abs(right).max() > 1.0
    stories = [found for found in run(layout, logits, models[family]) if found is not None]
    assert stories
    for found in stories:
        np.testing.assert_allclose(found, right, atol=1e-4)


@pytest.mark.parametrize(("family", "layout"), [("llama", "tp2"), ("qwen2", "pp2"), ("qwen3", "cp2")])
def test_in_bfloat16_they_are_as_near_to_the_exact_ones_as_transformers_own(
    run: Run, models: dict[str, Path], family: str, layout: str
) -> None:
    """Which is within 0.1 of logits of up to 3; two roundings in another order make no larger error than one."""
    exact = of_transformers(models[family], torch.float32)
    theirs = np.abs(of_transformers(models[family], torch.bfloat16) - exact)
    ours = np.abs(run(layout, logits, models[family], Dtype.BFLOAT16)[-1] - exact)
    assert ours.max() < 0.1
    assert ours.mean() < 1.2 * theirs.mean()


def recomputed(ranks: Ranks, parallel: ParallelConfig, path: Path) -> list[Any]:
    told = []
    for what in Recompute:
        backend = MegatronBackend(
            model_path=str(path),
            algorithm=ALGORITHM,
            trainer=replace(trainer(parallel), recompute=what),
            temperature=TEMPERATURE,
            ranks=ranks,
        )
        told.append(train(backend, backend.data_ranks, 1, 2))
    return told


@pytest.mark.parametrize(("family", "layout"), [("qwen3", "tp2 pp2"), ("qwen3_moe", "dp2 ep2")])
def test_what_is_computed_again_changes_no_gradient(
    run: Run, models: dict[str, Path], family: str, layout: str
) -> None:
    for kept, attention, layers in run(layout, recomputed, models[family]):
        for again in (attention, layers):
            for step, told in zip(again, kept, strict=True):
                assert step == pytest.approx(told, rel=1e-6)
