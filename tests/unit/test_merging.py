"""What a worker makes of adapters that came alone: what the trainer would have sent whole, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from frozen_models import LORA, FrozenModel
from reference_steps import make, random_batch, small_model

from areal_hpc.config.lora import ATTENTION, LoraConfig
from areal_hpc.config.schema import Dtype
from areal_hpc.generation.served.merging import Merging, lora_of, order
from areal_hpc.pretrained.lora import BASE

LIMIT_S = 30.0


def made(written: str) -> Merging:
    """As a worker has it, which is told by JSON."""
    merging = Merging(json.loads(written))
    merging.begin()
    merging.wait(LIMIT_S)
    assert merging.is_ready()
    return merging


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_it_is_what_the_trainer_would_have_sent_whole(tmp_path: Path, family: str, dtype: Dtype) -> None:
    """Tied and untied, with biases, and a mixture, whose experts transformers fuses in memory and which get none."""
    lora = LoraConfig(rank=4, alpha=6.0, target_modules=ATTENTION)
    path, batch = small_model(tmp_path / "model", family), random_batch()
    alone = make(path, lora=lora, dtype=dtype)
    alone.train_step([batch.with_proximal(alone.logprobs(batch))])  # so that no B is 0
    (tmp_path / "saved").mkdir()
    alone.snapshot()(tmp_path / "saved")
    whole = make(path, lora=lora, dtype=dtype, whole=True)
    whole.load(str(tmp_path / "saved"))

    adapters = dict(alone.weights())
    merging = made(json.dumps(order(str(path), dtype, lora)))
    assert merging.lacks(adapters) == ""
    found, expected = dict(merging.whole(adapters, "cpu")), dict(whole.weights())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(not torch.equal(found[name], tensor) for name, tensor in make(path, dtype=dtype).weights())


def test_numbers_are_those_of_another_arithmetic(tmp_path: Path) -> None:
    model = FrozenModel(tmp_path / "model", torch.bfloat16)
    adapters = model.adapters(3)
    found = dict(made(json.dumps(model.order)).whole(adapters, "cpu"))
    expected = model.with_adapters(adapters)
    assert found.keys() == expected.keys(), "no head that is tied, and no buffer"
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in expected.items()
    )


def test_frozen_weights_stay_what_they_were_when_they_were_read(tmp_path: Path) -> None:
    """Whatever becomes of the file."""
    model = FrozenModel(tmp_path / "model")
    merging, adapters = made(json.dumps(model.order)), model.adapters(1)
    file = tmp_path / "model" / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-64, 2)
        opened.write(b"\xff" * 64)
    found = dict(merging.whole(adapters, "cpu"))
    assert all(torch.equal(found[name], tensor) for name, tensor in model.with_adapters(adapters).items())


def test_what_could_not_be_read_is_read_by_the_next_update(tmp_path: Path) -> None:
    model = FrozenModel(tmp_path / "model")
    hidden = (tmp_path / "model").rename(tmp_path / "away")
    merging, adapters = made(json.dumps(model.order)), model.adapters(1)
    assert "cannot be read" in merging.lacks(adapters)
    hidden.rename(tmp_path / "model")
    merging.begin()
    merging.wait(LIMIT_S)
    assert merging.lacks(adapters) == ""


def test_adapters_of_another_rank_or_of_fewer_layers_are_named(tmp_path: Path) -> None:
    model = FrozenModel(tmp_path / "model")
    merging, adapters = made(json.dumps(model.order)), model.adapters(1)
    for lacking in adapters:
        left = {name: tensor for name, tensor in adapters.items() if name != lacking}
        assert lacking in merging.lacks(left)
    wider = adapters | {"model.q_proj.lora_A.weight": torch.zeros(3, 4)}
    assert "are not the adapters of" in merging.lacks(wider) and "(3, 4)" in merging.lacks(wider)
    assert "of other weights" in merging.lacks(adapters | {BASE: adapters[BASE] + 1})


def test_an_order_says_which_adapters_and_nothing_where_there_are_none() -> None:
    assert order("/m", "float32", LoraConfig()) is None
    told = order("/m", "float32", LORA)
    assert told is not None and lora_of(json.loads(json.dumps(told))) == LORA
