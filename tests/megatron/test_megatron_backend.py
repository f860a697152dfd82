"""What the Megatron trainer keeps and refuses: checkpoints on any layout, boundaries of sequences, broken shares."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.distributed_c10d as c10d
import transformers
from layouts import Run
from steps import begin_save, make, make_reference, save, train, weights_of, whole_batch

from areal_hpc.config.schema import Dtype, ParallelConfig
from areal_hpc.errors import CheckpointError, ConfigError
from areal_hpc.pretrained.files import TensorFiles
from areal_hpc.training.megatron.weights import Weights
from areal_hpc.training.ranks import Ranks
from areal_hpc.training.shards import SHARDS, ShardFiles, policy_weights
from areal_hpc.training.snapshot import same_bits
from areal_hpc.types import Batch

pytestmark = pytest.mark.megatron


def go_on(
    ranks: Ranks, parallel: ParallelConfig, path: Path, first: int, load: Path | None, saved: Path, dtype: Dtype
) -> dict[str, Any]:
    """One step from a checkpoint on; what the loaded backend would itself save, and what it saves after the step.

    The first of these is written when the step is over, as a disk may be that is slower than training.
    """
    backend = make(ranks, parallel, path, dtype)
    if load is not None:
        backend.load(str(load))
    end_save = begin_save(ranks, backend, saved / "loaded")
    served = weights_of(backend)
    told = train(backend, backend.data_ranks, first, first)
    end_save()
    save(ranks, backend, saved / "trained")
    return {"told": told, "served": served, "trained": weights_of(backend)}


def assert_same_state(found: Path, expected: Path) -> None:
    """Masters, both moments and progress, bit for bit, whichever ranks wrote them."""
    assert (found / "trainer.json").read_bytes() == (expected / "trainer.json").read_bytes()
    one, other = ShardFiles(found / SHARDS), ShardFiles(expected / SHARDS)
    assert one.shapes == other.shapes
    for name in one.shapes:
        assert same_bits(one.read(name), other.read(name)), name


@pytest.mark.parametrize(
    ("family", "layouts", "dtype"),
    [
        ("qwen3", ("tp2 pp2", "dp2", "tp2 pp2", "cp2"), Dtype.FLOAT32),
        ("qwen2", ("dp2", "tp2 dp2", "pp2"), Dtype.BFLOAT16),
        ("qwen3_moe", ("dp2 ep2", "tp2 etp2", "pp2 vpp2"), Dtype.FLOAT32),
    ],
)
def test_C35_C9_C32_a_checkpoint_of_one_layout_goes_on_on_every_other(
    run: Run, models: dict[str, Path], tmp_path: Path, family: str, layouts: tuple[str, ...], dtype: Dtype
) -> None:
    """Each layout saves bit for bit what it has loaded, and serves the weights that were served before."""
    undisturbed = train(make_reference(models[family], dtype), Ranks(), 1, len(layouts))
    before: Path | None = None
    served: dict[str, Any] = {}
    for step, layout in enumerate(layouts, start=1):
        saved = tmp_path / f"{step} {layout}"
        stories = run(layout, go_on, models[family], step, before, saved, dtype)
        if before is not None:
            assert_same_state(saved / "loaded", before)
            for name, tensor in stories[0]["served"].items():
                np.testing.assert_array_equal(tensor, served[name], err_msg=name)
        (found,) = stories[-1]["told"]
        rounding = 2e-4 if dtype is Dtype.FLOAT32 else 0.1
        assert found["grad_norm"] == pytest.approx(undisturbed[step - 1]["grad_norm"], rel=rounding)
        assert found["loss"] == pytest.approx(undisturbed[step - 1]["loss"], rel=rounding, abs=rounding / 50)
        before, served = saved / "trained", stories[0]["trained"]


def export(ranks: Ranks, parallel: ParallelConfig, path: Path, load: Path, target: Path) -> None:
    backend = make(ranks, parallel, path)
    backend.load(str(load))
    backend.export(str(target))


def begun(ranks: Ranks, parallel: ParallelConfig, path: Path) -> dict[str, Any]:
    return weights_of(make(ranks, parallel, path))


def test_each_backend_goes_on_from_the_others_checkpoint_and_from_an_export(
    run: Run, models: dict[str, Path], tmp_path: Path
) -> None:
    path = models["qwen3"]
    reference = make_reference(path)
    undisturbed = train(reference, Ranks(), 1, 1)
    (tmp_path / "one").mkdir()
    reference.snapshot()(tmp_path / "one")
    undisturbed += train(reference, Ranks(), 2, 3)
    (second,) = run("tp2", go_on, path, 2, tmp_path / "one", tmp_path / "two", Dtype.FLOAT32)[0]["told"]
    again = make_reference(path)
    again.load(str(tmp_path / "two" / "trained"))
    (third,) = train(again, Ranks(), 3, 3)
    assert [second, third] == [pytest.approx(told, rel=2e-4, abs=2e-6) for told in undisturbed[1:]]

    run("pp2", export, path, tmp_path / "two" / "trained", tmp_path / "exported")
    masters = dict(policy_weights(tmp_path / "two" / "trained" / SHARDS, "float32"))
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    for name, tensor in found.named_parameters():
        assert torch.equal(tensor, masters[name]), name

    again.export(str(tmp_path / "of the reference"))
    right = weights_of(again)
    for weights in run("tp2", begun, tmp_path / "of the reference"):
        assert weights.keys() == right.keys()
        for name, tensor in right.items():
            np.testing.assert_array_equal(weights[name], tensor, err_msg=name)


def refused(ranks: Ranks, parallel: ParallelConfig, path: Path, other: Path) -> list[str]:
    """What is said of a directory without a checkpoint, and of another model's."""
    backend, said = make(ranks, parallel, path), []
    for directory in (path, other):
        with pytest.raises(CheckpointError) as error:
            backend.load(str(directory))
        said.append(str(error.value))
    return said


def test_a_checkpoint_of_another_model_is_refused(run: Run, models: dict[str, Path], tmp_path: Path) -> None:
    make_reference(models["llama"]).snapshot()(tmp_path)
    for nothing, another in run("tp2", refused, models["qwen3"], tmp_path):
        assert "has no trainer.json" in nothing
        assert "is of another model" in another and "check model.path" in another


def disturbed(ranks: Ranks, parallel: ParallelConfig, path: Path) -> list[Any]:
    """Log-probs with each sequence's tokens in turn replaced by others."""
    backend, batch = make(ranks, parallel, path), whole_batch()
    found = [backend.logprobs(batch)]
    for start, end in zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True):
        token_ids = batch.token_ids.copy()
        token_ids[start:end] = 7
        found.append(backend.logprobs(replace(batch, token_ids=token_ids)))
    return found


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_E11_packed_sequences_do_not_see_each_other(run: Run, models: dict[str, Path], layout: str) -> None:
    batch = whole_batch()
    before, *after = run(layout, disturbed, models["qwen3"])[0]
    for sequence, found in enumerate(after):
        same = np.repeat(np.arange(batch.num_sequences), batch.lengths) != sequence
        np.testing.assert_allclose(found[same], before[same], atol=1e-6)
        if batch.loss_mask[~same].any():
            assert np.abs(found[~same] - before[~same]).max() > 0.1


def groups_and_weights(ranks: Ranks, parallel: ParallelConfig, path: Path) -> list[Any]:
    """Process groups when everything is built, and after all that a run does; whether each weight is contiguous."""
    backend = make(ranks, parallel, path)
    built = set(c10d._world.pg_names.values())
    contiguous = {name: tensor.is_contiguous() for name, tensor in backend.weights()}
    train(backend, backend.data_ranks, 1, 1)  # with log-probs of the policy and of the reference model
    backend.snapshot()
    return [built, set(c10d._world.pg_names.values()), contiguous]


@pytest.mark.parametrize("layout", ["tp2 pp2", "tp2 dp2"])
def test_K5_every_group_is_made_before_anything_is_computed_and_D8_weights_are_contiguous(
    run: Run, models: dict[str, Path], layout: str
) -> None:
    for built, used, contiguous in run(layout, groups_and_weights, models["qwen3"]):
        assert built == used
        assert len(built) > 4
        assert all(contiguous.values()), contiguous


def bytes_of(tensors: Iterable[weakref.ref[torch.Tensor]]) -> int:
    return sum(tensor.nbytes for one in tensors if (tensor := one()) is not None)


def whole_in_memory(ranks: Ranks, parallel: ParallelConfig, path: Path) -> dict[str, int]:
    """Bytes: of the model, of its largest layer, and the most of whole tensors that were alive at a time, when weights
    were read and when they were gathered.
    """
    alive: list[weakref.ref[torch.Tensor]] = []
    most = {"read": 0, "gathered": 0}

    def watched(make: Any, key: str) -> Any:
        def made(*args: Any) -> Any:
            found = make(*args)
            new = found if isinstance(found, list) else [found]
            alive[:] = [one for one in alive if one() is not None] + [weakref.ref(one) for one in new]
            until = time.monotonic() + 0.1  # gloo's thread lets go of what it has sent a moment after it is there
            while bytes_of(alive) > bytes_of(map(weakref.ref, new)) and time.monotonic() < until:
                time.sleep(0.001)
            most[key] = max(most[key], bytes_of(alive))
            return found

        return made

    with (
        mock.patch.object(TensorFiles, "read", watched(TensorFiles.read, "read")),
        mock.patch.object(Weights, "_gathered", watched(Weights._gathered, "gathered")),
    ):
        backend = make(ranks, parallel, path)
        sizes: dict[str, int] = {}
        for name, tensor in backend.weights():
            place = ".".join(name.split(".")[:3]) if ".layers." in name else name
            sizes[place] = sizes.get(place, 0) + tensor.nbytes
            del tensor
    return most | {"model": sum(sizes.values()), "largest": max(sizes.values())}


@pytest.mark.parametrize(("family", "layout"), [("llama", "tp2"), ("llama", "pp2 dp2"), ("qwen3_moe", "dp2 ep2")])
def test_whole_weights_are_in_memory_a_few_at_a_time(
    run: Run, models: dict[str, Path], family: str, layout: str
) -> None:
    for found in run(layout, whole_in_memory, models[family]):
        assert found["largest"] < found["model"] / 2
        for key in ("read", "gathered"):  # at most with a norm beside the largest
            assert 0 < found[key] < 1.1 * found["largest"], key


def odd_shares(ranks: Ranks, parallel: ParallelConfig, path: Path) -> dict[str, float]:
    """Four minibatches: one copy has nothing in the first, nobody in the second, one a broken one in the third."""
    backend, batch = make(ranks, parallel, path), whole_batch()
    copy = backend.data_ranks.rank
    batch = replace(batch, behaviour=backend.logprobs(batch), reference=backend.reference_logprobs(batch))
    batch = batch.with_proximal(batch.behaviour)
    broken = replace(batch, advantages=np.where(batch.loss_mask, np.nan, 0).astype(np.float32))
    nobody = batch.num_sequences - 1
    first = batch.select([0, 1] if copy == 0 else [])
    third = (broken if copy == 0 else batch).select([2])
    return dict(backend.train_step([first, batch.select([nobody]), third, batch.select([3 + copy])]))


@pytest.mark.parametrize("layout", ["dp2", "pp2 dp2", "tp2 dp2"])
def test_E17_an_empty_share_and_a_broken_one_are_the_same_decision_on_all_ranks(
    run: Run, models: dict[str, Path], layout: str
) -> None:
    one, *others = run(layout, odd_shares, models["qwen3"])
    for other in others:
        assert other == pytest.approx(one, nan_ok=True)
    assert (one["updates"], one["skipped_empty"], one["skipped_nonfinite"]) == (2.0, 1.0, 1.0)
    assert np.isfinite(one["grad_norm"])


def long_logprobs(ranks: Ranks, parallel: ParallelConfig, path: Path, batch: Batch) -> Any:
    return make(ranks, parallel, path, Dtype.BFLOAT16).logprobs(batch)


def test_in_bfloat16_late_tokens_are_as_near_to_the_reference_as_early_ones(run: Run, models: dict[str, Path]) -> None:
    """Rotary frequencies that are rounded drift with the position."""
    short, length = whole_batch(), 1024
    mask = np.arange(length) > 0
    batch = Batch(
        token_ids=np.resize(short.token_ids, length),
        loss_mask=mask,
        behaviour=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        advantages=np.zeros(length, np.float32),
        boundaries=np.array([0, length], dtype=np.int32),
    )
    (found, _) = run("tp2", long_logprobs, models["qwen3"], batch)
    exact = make_reference(models["qwen3"]).logprobs(batch)
    gap = np.abs(found - exact)
    assert gap.max() < 0.1
    assert gap[-256:].mean() < 2 * gap[1:257].mean()


def test_expert_tensor_parallelism_beside_expert_parallelism_is_refused_on_gloo(
    run: Run, models: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match="gloo cannot gather unequal numbers of tokens"):
        run("tp2 dp2 ep2 etp2", make, models["qwen3_moe"])
