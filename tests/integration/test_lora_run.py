"""A run that trains adapters: an engine dies, the run goes on by the other transport, and is exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from launched import GROUPS, launched, newest_checkpoint, num_consumed
from safetensors.torch import load_file
from tiny_models import make_model

from areal_hpc.cli import main
from areal_hpc.config.load import load
from areal_hpc.config.lora import NO_LORA
from areal_hpc.pretrained.lora import PEFT_PREFIX, merged
from areal_hpc.roles.evaluation import evaluation_config

LORA = ("model.lora.rank=4", "model.lora.alpha=8", "algorithm.kl.coef=0.01", "checkpoint.every_steps=2")
SCALE = 2.0


def test_adapters_alone_travel_are_kept_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "tiny"
    make_model(model, "qwen3", 1, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    with launched(tmp_path, model, *LORA, "trainer.total_steps=6") as started:
        started.wait_for_step(1)
        started.roles()["generator-0"].kill()
        assert started.wait() == 0, started.text
        assert "generator-0 ended with signal 9 (SIGKILL); it is started again" in started.text
        sent = {record.number("weight_bytes") for record in started.records("step")}
        gaps = [record.number("logprob_gap_fresh") for record in started.records("step")]
    with launched(tmp_path, model, *LORA, "trainer.total_steps=8", "weights.transport=disk", "--resume") as again:
        assert again.wait() == 0, again.text
        assert again.left_over() == []
    assert num_consumed(started.run) == 8 * GROUPS
    assert all(gap is None or gap < 1e-4 for gap in gaps)

    saved = newest_checkpoint(started.run).path
    masters, base = load_file(saved / "model.safetensors"), load_file(model / "model.safetensors")
    assert sent == {sum(one.nbytes for one in masters.values()) + 8}  # and the fingerprint of what they stand on
    assert sum(one.nbytes for one in masters.values()) < sum(one.nbytes for one in base.values()) / 2

    assert main(["export", str(started.run.root), str(tmp_path / "adapter")]) == 0
    assert main(["export", str(started.run.root), "--merged", str(tmp_path / "merged")]) == 0
    told = capsys.readouterr().out
    assert f"adapters, which peft loads upon {model}" in told and "give it as model.path" in told
    exported = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert exported.keys() == {PEFT_PREFIX + name for name in masters}
    assert all(torch.equal(exported[PEFT_PREFIX + name], one) for name, one in masters.items())
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, tensor in merged(base.items(), masters, SCALE):
        assert torch.equal(found[name], tensor), name
    assert main(["ledger", str(started.run.root)]) == 0
    evaluated = evaluation_config(load([started.run.config]), started.run.root, None, None)
    assert evaluated.model.lora == NO_LORA  # for its model is made as the merged one was
