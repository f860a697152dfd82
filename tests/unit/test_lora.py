"""Adapters of the reference trainer: held against float64 gradients of the merged weights, and against `peft`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_steps import (
    TRAINER,
    digest,
    double_gradients,
    double_logprobs,
    gradients,
    make,
    random_batch,
    small_model,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from areal_hpc.buckets import fingerprint_of
from areal_hpc.config.algorithm import AlgorithmConfig, KlConfig, ProximalMethod
from areal_hpc.config.lora import ATTENTION, LoraConfig
from areal_hpc.config.schema import Dtype
from areal_hpc.errors import CheckpointError, ConfigError
from areal_hpc.pretrained.lora import BASE, DOWN, UP, adapted_layers, adapter_shapes, is_adapter, merged, start_value
from areal_hpc.training.preference import PreferenceBackend
from areal_hpc.training.reference import ReferenceBackend

LORA = LoraConfig(rank=4, alpha=6.0)
LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "qwen3")


def adapted(path: Path, lora: LoraConfig = LORA, **changes: Any) -> ReferenceBackend:
    return make(path, lora=lora, **changes)


def trained(path: Path, lora: LoraConfig = LORA, **changes: Any) -> ReferenceBackend:
    """After one update, so that no B is 0."""
    backend, batch = adapted(path, lora, **changes), random_batch()
    backend.train_step([batch.with_proximal(backend.logprobs(batch))])
    return backend


# Arithmetic


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 9)] * 4),
    scale=st.floats(0.0, 8.0),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_merged_weights_compute_what_the_two_matrices_add(
    sizes: tuple[int, ...], scale: float, dtype: torch.dtype, seed: int
) -> None:
    """By numpy in float64; and what has no adapter passes as it is, the very tensor."""
    outputs, inputs, rank, num = sizes
    random = np.random.default_rng(seed)
    weight, down, up, x = (
        random.normal(size=s) for s in [(outputs, inputs), (rank, inputs), (outputs, rank), (num, inputs)]
    )
    w, a, b = (torch.from_numpy(one).to(dtype) for one in (weight, down, up))
    other = torch.ones(3)
    found = dict(merged([("l.weight", w), ("norm.weight", other)], {"l" + DOWN: a, "l" + UP: b}, scale))
    w64, a64, b64 = (one.double().numpy() for one in (w, a, b))
    step = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-23
    bound = step * (np.abs(w64) + scale * np.abs(b64) @ np.abs(a64)) * (rank + 2)
    assert found["l.weight"].dtype == dtype
    assert (np.abs(found["l.weight"].double().numpy() - (w64 + scale * b64 @ a64)) <= bound + 1e-30).all()
    np.testing.assert_allclose(
        x @ (w64 + scale * b64 @ a64).T, x @ w64.T + scale * (x @ a64.T) @ b64.T, rtol=1e-9, atol=1e-9
    )
    assert found["norm.weight"] is other


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rank=st.integers(1, 8))
def test_taking_the_product_away_again_leaves_the_weight(seed: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, down, up = (torch.randn(s, generator=generator) for s in [(7, 5), (rank, 5), (7, rank)])
    adapters = {"l" + DOWN: down, "l" + UP: up}
    [(_, there)] = merged([("l.weight", weight)], adapters, 1.5)
    [(_, back)] = merged([("l.weight", there)], adapters, -1.5)
    torch.testing.assert_close(back, weight, atol=1e-4, rtol=0)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shape=st.tuples(st.integers(1, 8), st.integers(1, 400)))
def test_every_process_begins_with_the_same_adapters(seed: int, shape: tuple[int, int]) -> None:
    down = start_value(LAYER + DOWN, shape, seed)
    assert torch.equal(down, start_value(LAYER + DOWN, shape, seed))
    assert not torch.equal(down, start_value("model.layers.1.self_attn.q_proj" + DOWN, shape, seed))
    assert down.abs().max() <= shape[1] ** -0.5
    assert not start_value(LAYER + UP, shape, seed).any()


def test_names_and_shapes() -> None:
    names = [f"model.layers.{n}.self_attn.{p}" for n in range(2) for p in ("q_proj", "v_proj")] + ["model.x_proj"]
    assert adapted_layers(names, LoraConfig(rank=2, target_modules=("v_proj",))) == [names[1], names[3]]
    with pytest.raises(ConfigError, match=r"no layer k_proj that can be adapted; choose among q_proj, v_proj, x_proj"):
        adapted_layers(names, LoraConfig(rank=2, target_modules=("v_proj", "k_proj")))
    shapes = adapter_shapes(LAYER, (12, 8), 3)
    assert shapes == {LAYER + DOWN: (3, 8), LAYER + UP: (12, 3)}
    assert all(map(is_adapter, shapes)) and not is_adapter(f"{LAYER}.weight")


# Training


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_adapters_change_nothing_before_they_are_trained(qwen3: Path, dtype: Dtype) -> None:
    batch = random_batch()
    np.testing.assert_array_equal(adapted(qwen3, dtype=dtype).logprobs(batch), make(qwen3, dtype=dtype).logprobs(batch))


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_log_probs_and_gradients_are_those_of_the_merged_weights_in_float64(tmp_path: Path, family: str) -> None:
    """With W' = W + s B A: dL/dB = s dL/dW' A^T and dL/dA = s B^T dL/dW'."""
    path, batch = small_model(tmp_path / family, family), random_batch()
    source = adapted(path)
    source.snapshot()(tmp_path)
    masters = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    masters = {name: torch.randn(one.shape, generator=generator) * 0.1 for name, one in masters.items()}
    save_file(masters, tmp_path / "model.safetensors")
    backend, whole = adapted(path), adapted(path, whole=True)
    for one in (backend, whole):
        one.load(str(tmp_path))
    whole.export(str(tmp_path / "merged"))
    expected = double_logprobs(tmp_path / "merged", batch)[1].detach().numpy()
    found = backend.logprobs(batch)
    np.testing.assert_allclose(found[batch.loss_mask], expected[batch.loss_mask], atol=1e-5)
    right = double_gradients(tmp_path / "merged", batch)
    backend.train_step([batch.with_proximal(found)])
    ours = gradients(backend, tmp_path / "after")
    assert ours.keys() == masters.keys()
    for name, gradient in ours.items():
        layer = name.removesuffix(DOWN).removesuffix(UP)
        of_weight, down, up = right[f"{layer}.weight"], masters[layer + DOWN].double(), masters[layer + UP].double()
        product = LORA.scale * (up.T @ of_weight if name.endswith(DOWN) else of_weight @ down.T)
        torch.testing.assert_close(gradient.double(), product, atol=2e-5, rtol=1e-3, msg=name)


def test_the_model_is_frozen_and_the_optimizer_knows_adapters_alone(qwen3: Path, tmp_path: Path) -> None:
    backend = trained(qwen3)
    sent = dict(backend.weights())
    stored = load_file(qwen3 / "model.safetensors")
    assert int(sent.pop(BASE)) == fingerprint_of(stored.items())
    assert fingerprint_of(backend._model_weights()) == fingerprint_of(stored.items())
    layers = {f"model.layers.{n}.{part}" for n in range(2) for part in parts_of(LORA)}
    assert sent.keys() == {layer + kind for layer in layers for kind in (DOWN, UP)}
    assert list(sent) == sorted(sent)
    assert all(one.any() for one in sent.values())
    backend.snapshot()(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == sent.keys()
    moments = load_file(tmp_path / "optimizer.safetensors")
    assert moments.keys() == {f"{moment}.{name}" for name in sent for moment in ("exp_avg", "exp_avg_sq")}


def parts_of(lora: LoraConfig) -> list[str]:
    return [f"{'self_attn' if name in ATTENTION else 'mlp'}.{name}" for name in lora.target_modules]


def test_the_reference_is_the_frozen_model_and_takes_no_memory(qwen3: Path) -> None:
    algorithm = AlgorithmConfig(kl=KlConfig(coef=0.1))
    batch = random_batch()
    backend = adapted(qwen3, algorithm=algorithm)
    before = backend.logprobs(batch)
    told = backend.train_step([replace(batch.with_proximal(before), reference=backend.reference_logprobs(batch))])
    assert told["reference_kl"] == 0.0
    assert backend._reference is None
    np.testing.assert_array_equal(backend.reference_logprobs(batch), make(qwen3).logprobs(batch))
    assert np.abs(backend.logprobs(batch) - before).max() > 1e-3


def test_dpo_holds_the_policy_near_the_frozen_model(qwen3: Path) -> None:
    algorithm = AlgorithmConfig(name="dpo", decoupled=False, proximal=ProximalMethod.BEHAVIOUR)
    settings = {"algorithm": algorithm, "trainer": replace(TRAINER, tokens_per_microbatch=100), "temperature": 1.0}
    backend, pairs = (
        PreferenceBackend(model_path=str(qwen3), lora=LORA, **settings),
        random_batch().select([0, 1, 2, 3]),
    )
    frozen = backend.reference_logprobs(pairs)
    told = backend.train_step([replace(pairs, reference=frozen)])
    assert told["loss"] == pytest.approx(np.log(2), abs=1e-6)  # nothing is preferred yet
    np.testing.assert_array_equal(backend.reference_logprobs(pairs), frozen)
    assert backend.evaluate(replace(pairs, reference=frozen))["loss"] < told["loss"]


def test_another_reference_is_loaded_beside_the_policy(qwen3: Path, tmp_path: Path) -> None:
    other = small_model(tmp_path / "other", seed=8)
    backend = adapted(qwen3, algorithm=AlgorithmConfig(kl=KlConfig(coef=0.1, reference=str(other))))
    np.testing.assert_array_equal(backend.reference_logprobs(random_batch()), make(other).logprobs(random_batch()))


# Checkpoints


def test_a_resumed_run_goes_on_with_the_same_bits(qwen3: Path, tmp_path: Path) -> None:
    first = trained(qwen3)
    first.snapshot()(tmp_path)
    second = adapted(qwen3, seed=77)
    second.load(str(tmp_path))
    assert digest(second) == digest(first)
    for backend in (first, second):
        batch = random_batch(4)
        backend.train_step([batch.with_proximal(backend.logprobs(batch))])
    assert digest(second) == digest(first)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (LoraConfig(), "holds adapters and this run trains weights"),
        (replace(LORA, rank=8), r"model\.lora\.rank: .* was made with 4, not 8"),
        (replace(LORA, alpha=7.0), r"model\.lora\.alpha: .* was made with 6\.0, not 7\.0"),
        (replace(LORA, target_modules=("q_proj",)), r"model\.lora\.target_modules"),
    ],
)
def test_adapters_that_would_mean_something_else_are_refused(
    qwen3: Path, tmp_path: Path, lora: LoraConfig, said: str
) -> None:
    adapted(qwen3).snapshot()(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        adapted(qwen3, lora).load(str(tmp_path))


def test_adapters_of_another_base_are_refused(qwen3: Path, tmp_path: Path) -> None:
    adapted(qwen3).snapshot()(tmp_path)
    with pytest.raises(CheckpointError, match="of adapters on other weights"):
        adapted(small_model(tmp_path / "other", seed=8)).load(str(tmp_path))
    make(qwen3).snapshot()(tmp_path)
    with pytest.raises(CheckpointError, match="holds weights and this run trains adapters"):
        adapted(qwen3).load(str(tmp_path))


# Exports

PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
for base, adapter, out in (words.split() for words in sys.argv[1:]):
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    with torch.no_grad():
        torch.save(model(input_ids=torch.arange(20)[None] * 11 % 256).logits, out)
"""


def logits_of(path: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(20)[None] * 11 % 256).logits
    return logits


def test_peft_loads_an_export_and_computes_the_same(tmp_path: Path) -> None:
    """In a process of its own, since importing it takes seconds and changes transformers."""
    few = replace(LORA, target_modules=("q_proj", "v_proj", "down_proj"))
    words = []
    for family, lora in (("qwen3", LORA), ("llama", few)):
        place = tmp_path / family
        path = small_model(place / "base", family)
        backend, whole = trained(path, lora), adapted(path, lora, whole=True)
        backend.export(str(place / "adapter"))
        backend.snapshot()(place)
        whole.load(str(place))
        whole.export(str(place / "merged"))
        words.append(f"{path} {place / 'adapter'} {place / 'logits'}")
    subprocess.run([sys.executable, "-c", PEFT, *words], check=True, timeout=120)
    for family in ("qwen3", "llama"):
        theirs, ours = torch.load(tmp_path / family / "logits"), logits_of(tmp_path / family / "merged")
        assert (ours - logits_of(tmp_path / family / "base")).abs().max() > 1e-2
        torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=1e-4)


def test_an_export_of_adapters_is_complete_and_says_of_what_they_are(qwen3: Path, tmp_path: Path) -> None:
    trained(qwen3, dtype=Dtype.BFLOAT16).export(str(tmp_path))
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["base_model_name_or_path"]) == (4, 6, str(qwen3))
    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as file:
        stored = {name: one.bfloat16() for name, one in load_file(qwen3 / "model.safetensors").items()}
        assert file.metadata()[BASE] == str(fingerprint_of(stored.items()))
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
        assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in file.keys()  # noqa: SIM118
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (qwen3 / name).read_bytes()


def test_engines_that_know_no_adapters_get_the_model_merged(qwen3: Path, tmp_path: Path) -> None:
    backend, whole = trained(qwen3), adapted(qwen3, whole=True)
    backend.snapshot()(tmp_path)
    whole.load(str(tmp_path))
    sent, stored = dict(whole.weights()), load_file(qwen3 / "model.safetensors")
    assert {name: one.shape for name, one in sent.items()} == {name: one.shape for name, one in stored.items()}
    changed = {name for name, one in sent.items() if not torch.equal(one, stored[name])}
    assert changed == {name for name in stored if name.removesuffix(".weight").endswith("_proj")}


def test_a_target_that_is_no_layer_is_refused(qwen3: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no layer fc1 that can be adapted; choose among down_proj, gate_proj"):
        adapted(qwen3, replace(LORA, target_modules=("q_proj", "fc1")))
    with pytest.raises(ConfigError, match=r"no layer lm_head"):
        adapted(qwen3, replace(LORA, target_modules=("lm_head",)))
    with pytest.raises(ConfigError, match=r"no layer down_proj, gate_proj|no layer gate_proj, up_proj, down_proj"):
        adapted(small_model(tmp_path / "experts", "qwen3_moe"))


def test_attention_of_a_mixture_of_experts_is_adapted(tmp_path: Path) -> None:
    path = small_model(tmp_path / "experts", "qwen3_moe")
    backend = trained(path, replace(LORA, target_modules=ATTENTION))
    assert int(dict(backend.weights())[BASE]) == fingerprint_of(load_file(path / "model.safetensors").items())
