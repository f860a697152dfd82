"""The embedded engine's forward pass against transformers' own, for every family and switch it claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from areal_hpc.errors import DataError, WeightUpdateError
from areal_hpc.generation.embedded.cache import KVCache
from areal_hpc.generation.embedded.model import Model, load_model
from areal_hpc.pretrained.architecture import read_architecture

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("llama", {"attention_bias": True, "head_dim": 32}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    ("qwen2", {}),
    ("qwen2", {"rope_parameters": YARN}),
    ("qwen2", {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": False, "head_dim": 24, "num_attention_heads": 6}),
    ("qwen3", {"attention_bias": True}),
]


def reference_logits(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(token_ids).logits.float()
    return logits


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(("family", "config"), VARIANTS, ids=str)
def test_prefill_and_decode_give_the_logits_of_transformers(
    tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    reference = make_model(tmp_path, family, 3, **config)
    model = load_model(tmp_path, torch.float32, 256)
    cache = KVCache(model.architecture, torch.float32, 3, 256)
    torch.manual_seed(0)
    token_ids = torch.randint(0, 256, (2, 150))
    expected = reference_logits(reference, token_ids)
    num_prefilled = 140

    hidden = model.prefill(token_ids[:, :num_prefilled], torch.tensor([0, 1]), cache)
    torch.testing.assert_close(model.logits(hidden), expected[:, :num_prefilled], atol=1e-4, rtol=1e-4)
    for position in range(num_prefilled, 150):
        hidden = model.decode(token_ids[:, position], torch.tensor([position, position]), cache)
        torch.testing.assert_close(model.logits(hidden), expected[:, position], atol=1e-4, rtol=1e-4)


def test_rows_of_different_lengths_do_not_see_each_other_or_their_padding(tmp_path: Path) -> None:
    reference = make_model(tmp_path, "qwen2", 5)
    model = load_model(tmp_path, torch.float32, 64)
    cache = KVCache(model.architecture, torch.float32, 4, 64)
    torch.manual_seed(1)
    long, short = torch.randint(0, 256, (1, 41)), torch.randint(0, 256, (1, 8))
    padded = torch.zeros(2, 40, dtype=torch.long)
    padded[0], padded[1, :7] = long[0, :40], short[0, :7]

    model.prefill(padded, torch.tensor([1, 0]), cache)  # rows in another order than the batch
    tokens, positions = torch.tensor([short[0, 7], long[0, 40]]), torch.tensor([7, 40])
    logits = model.logits(model.decode(tokens, positions, cache))
    torch.testing.assert_close(logits[0], reference_logits(reference, short)[0, -1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1], reference_logits(reference, long)[0, -1], atol=1e-4, rtol=1e-4)


def test_bfloat16_stays_close_to_transformers_in_bfloat16(tmp_path: Path) -> None:
    reference = make_model(tmp_path, "qwen3", 3, initializer_range=0.02).to(torch.bfloat16)
    model = load_model(tmp_path, torch.bfloat16, 64)
    cache = KVCache(model.architecture, torch.bfloat16, 1, 64)
    token_ids = torch.arange(30)[None]
    logits = model.logits(model.prefill(token_ids, torch.tensor([0]), cache))
    ours, theirs = (torch.log_softmax(x, -1) for x in (logits, reference_logits(reference, token_ids)))
    assert logits.dtype == torch.float32
    assert (ours - theirs).abs().max() < 0.05


def test_rope_is_read_from_the_keys_of_older_checkpoints(tmp_path: Path) -> None:
    reference = make_model(tmp_path, "llama", 3, rope_parameters=LLAMA3)
    scaling = {key: value for key, value in LLAMA3.items() if key not in ("rope_theta", "rope_type")}
    edit_config(tmp_path, rope_parameters=None, rope_theta=500000.0, rope_scaling={**scaling, "type": "llama3"})
    model = load_model(tmp_path, torch.float32, 256)
    cache = KVCache(model.architecture, torch.float32, 1, 256)
    token_ids = torch.arange(200)[None]
    logits = model.logits(model.prefill(token_ids, torch.tensor([0]), cache))
    torch.testing.assert_close(logits, reference_logits(reference, token_ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "dynamic"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial rotary"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    make_model(tmp_path, "llama", 0)
    edit_config(tmp_path, **changes)
    with pytest.raises(DataError, match=named):
        load_model(tmp_path, torch.float32, 64)


def test_G12_end_tokens_may_be_a_number_a_list_or_absent(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", 0)
    generation = tmp_path / "generation_config.json"
    for in_config, in_generation, expected in (
        (260, [260, 258], {258, 260}),
        ([7, 8], None, {7, 8}),
        (None, 5, {5}),
        (None, None, set()),
    ):
        edit_config(tmp_path, eos_token_id=in_config)
        generation.write_text(json.dumps({"eos_token_id": in_generation}))
        assert read_architecture(tmp_path).eos_token_ids == expected
    generation.unlink()
    assert read_architecture(tmp_path).eos_token_ids == set()


# -- weights


def test_every_parameter_reads_back_as_the_checkpoint_has_it(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3", 0)
    stored = load_file(tmp_path / "model.safetensors")
    parameters = load_model(tmp_path, torch.float32, 64).serving.by_name
    assert parameters.keys() == stored.keys()
    assert all(torch.equal(parameters[name], stored[name]) for name in stored)


def test_loading_in_place_gives_the_new_model(tmp_path: Path) -> None:
    make_model(tmp_path / "old", "qwen2", 0)
    reference = make_model(tmp_path / "new", "qwen2", 1)
    model = load_model(tmp_path / "old", torch.float32, 64)
    weights = load_file(tmp_path / "new" / "model.safetensors")
    assert model.serving.missing(model.serving.load(weights.items())) == []
    cache = KVCache(model.architecture, torch.float32, 1, 64)
    token_ids = torch.arange(20)[None]
    logits = model.logits(model.prefill(token_ids, torch.tensor([0]), cache))
    torch.testing.assert_close(logits, reference_logits(reference, token_ids), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("tied")
    make_model(directory, "qwen2", 0)
    return load_model(directory, torch.float32, 64)


def test_unknown_misshapen_and_repeated_parameters_are_refused(tied: Model) -> None:
    norm = torch.ones(64)
    for weights, named in (
        ([("model.norm.weights", norm)], "model.norm.weights"),
        ([("model.norm.weight", torch.ones(63))], r"\(63,\)"),
        ([("model.norm.weight", norm), ("model.norm.weight", norm)], "twice"),
        ([("lm_head.weight", torch.zeros(272, 64))], "lm_head"),
    ):
        with pytest.raises(WeightUpdateError, match=named):
            tied.serving.load(weights)


def test_a_tied_head_that_equals_the_embedding_and_derived_buffers_are_taken(tied: Model) -> None:
    embedding = tied.serving.by_name["model.embed_tokens.weight"].clone()
    buffer = ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))
    assert tied.serving.load([("lm_head.weight", embedding), buffer]) == frozenset()
    assert "model.norm.weight" in tied.serving.missing(["model.embed_tokens.weight"])


def test_an_incomplete_checkpoint_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", 0)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file({name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}, path)
    with pytest.raises(DataError, match=r"1 tensors missing \['lm_head.weight'\]"):
        load_model(tmp_path, torch.float32, 64)
    path.unlink()
    with pytest.raises(DataError, match="lacks"):
        load_model(tmp_path, torch.float32, 64)


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama", 0)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "consolidated.safetensors").write_bytes(b"another format of the same weights")
    parameters = load_model(tmp_path, torch.float32, 64).serving.by_name
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert all(torch.equal(parameters[name], whole[name]) for name in whole)
