"""Weights in parts and whole again, bit for bit, and each part what Megatron multiplies with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import make_model
from torch.nn.functional import linear

from areal_hpc.pretrained.architecture import Architecture, read_architecture
from areal_hpc.training.megatron.names import Split, cut, joined, slices, weight_of

LAYER = "decoder.layers.1."
PARAMETERS = {
    "embedding.word_embeddings.weight": [(13, 24)],
    "output_layer.weight": [(13, 24)],
    "decoder.final_layernorm.weight": [(24,)],
    LAYER + "input_layernorm.weight": [(24,)],
    LAYER + "self_attention.linear_qkv.weight": [(32, 24), (16, 24), (16, 24)],
    LAYER + "self_attention.linear_qkv.bias": [(32,), (16,), (16,)],
    LAYER + "self_attention.linear_proj.weight": [(24, 32)],
    LAYER + "mlp.linear_fc1.weight": [(20, 24), (20, 24)],
    LAYER + "mlp.linear_fc2.weight": [(24, 20)],
    LAYER + "self_attention.linear_qkv.lora_A.weight": [(3, 24)] * 3,
    LAYER + "self_attention.linear_qkv.lora_B.weight": [(32, 3), (16, 3), (16, 3)],
    LAYER + "self_attention.linear_proj.lora_A.weight": [(3, 32)],
    LAYER + "self_attention.linear_proj.lora_B.weight": [(24, 3)],
    LAYER + "mlp.linear_fc1.lora_A.weight": [(3, 24)] * 2,
    LAYER + "mlp.linear_fc1.lora_B.weight": [(20, 3), (20, 3)],
    LAYER + "mlp.linear_fc2.lora_A.weight": [(3, 20)],
    LAYER + "mlp.linear_fc2.lora_B.weight": [(24, 3)],
    LAYER + "mlp.router.weight": [(6, 24)],
    LAYER + "mlp.experts.local_experts.2.linear_fc1.weight": [(20, 24), (20, 24)],
    LAYER + "mlp.experts.local_experts.2.linear_fc2.weight": [(24, 20)],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Architecture:
    path = tmp_path_factory.mktemp("model")
    make_model(path, "qwen2", 0)
    return replace(
        read_architecture(path),
        vocab_size=13,
        hidden_size=24,
        intermediate_size=20,
        num_heads=8,
        num_kv_heads=4,
        head_dim=4,
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", PARAMETERS)
def test_cut_and_joined_is_the_same_bits(model: Architecture, name: str, ranks: int) -> None:
    weight = weight_of(name, first_layer=3, first_expert=8)
    whole = [torch.randn(shape) for shape in PARAMETERS[name]]
    whole[0].view(-1)[:2] = torch.tensor([-0.0, torch.nan])  # bits, not values
    parts = [cut(weight, whole, model, ranks, rank) for rank in range(ranks)]
    assert len({part.shape for part in parts}) == 1
    for found, tensor in zip(joined(weight, parts, model), whole, strict=True):
        assert torch.equal(found.view(torch.int32), tensor.view(torch.int32))


@pytest.mark.parametrize(("ranks", "num_keys"), [(1, 4), (2, 4), (4, 4), (4, 2), (4, 1), (8, 2)])
@pytest.mark.parametrize("name", PARAMETERS)
def test_slices_say_where_every_element_of_a_part_comes_from(
    model: Architecture, name: str, ranks: int, num_keys: int
) -> None:
    """Each rank's part is made of slices of whole tensors; all slices of all ranks are the whole, with nothing twice.

    With fewer keys than ranks a part holds pieces of a group: some queries of it, a key, or half of one.
    """
    model = replace(model, num_kv_heads=num_keys)
    shapes = PARAMETERS[name]
    if "linear_qkv" in name and "lora_A" not in name:
        shapes = [(size, *shapes[0][1:]) for size in model.qkv_sizes]
    if "linear_fc" in name and ranks == 8:
        return  # 20 units are not shared by 8 ranks
    weight = weight_of(name)
    whole = {n: torch.randn(shape) for n, shape in zip(weight.names, shapes, strict=True)}
    covered = {n: torch.zeros(shape) for n, shape in zip(weight.names, shapes, strict=True)}
    for rank in range(ranks):
        part = cut(weight, list(whole.values()), model, ranks, rank)
        rebuilt = torch.zeros_like(part)
        for one in slices(weight, shapes, model, ranks, rank):
            span = tuple(slice(o, o + n) for o, n in zip(one.offset, one.shape, strict=True))
            assert whole[one.name][span].shape == one.shape and one.whole == tuple(whole[one.name].shape)
            rebuilt.index_copy_(one.dim, one.places, whole[one.name][span])
            covered[one.name][span] += 1
        assert torch.equal(rebuilt, part)
    copies = ranks if weight.split.is_whole() else 1
    for n, count in covered.items():
        assert torch.equal(count, torch.full_like(count, copies)), n
    parts = [cut(weight, list(whole.values()), model, ranks, rank) for rank in range(ranks)]
    for found, tensor in zip(joined(weight, parts, model), whole.values(), strict=True):
        assert torch.equal(found, tensor)


def test_names_count_layers_and_experts_from_the_whole_model() -> None:
    first = weight_of(LAYER + "mlp.experts.local_experts.2.linear_fc1.weight", first_layer=3, first_expert=8)
    prefix = "model.layers.4.mlp.experts.10."
    assert first.names == (prefix + "gate_proj.weight", prefix + "up_proj.weight")
    assert (first.split, first.expert) == (Split.GATED, 10)
    bias = weight_of(LAYER + "self_attention.linear_qkv.bias")
    assert bias.names == tuple(f"model.layers.1.self_attn.{part}_proj.bias" for part in "qkv")


def test_an_unknown_parameter_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="no rule for Megatron's parameter"):
        weight_of("decoder.layers.0.mlp.adapter")


def test_a_rank_has_the_queries_of_its_own_keys(model: Architecture) -> None:
    """8 heads in 4 groups; rank 1 of 2 has groups 2 and 3, heads 4 to 7, each as two queries, key and value."""
    q, k, v = (torch.randn(size, 24) for size in (32, 16, 16))
    hidden = torch.randn(5, 24)
    weight = weight_of(LAYER + "self_attention.linear_qkv.weight")
    of_rank = linear(hidden, cut(weight, [q, k, v], model, 2, 1)).view(5, 2, 4, 4)
    torch.testing.assert_close(of_rank[:, :, :2].flatten(1), linear(hidden, q)[:, 16:])
    torch.testing.assert_close(of_rank[:, :, 2].flatten(1), linear(hidden, k)[:, 8:])
    torch.testing.assert_close(of_rank[:, :, 3].flatten(1), linear(hidden, v)[:, 8:])


def test_words_are_padded_with_zeros_to_equal_shares(model: Architecture) -> None:
    weight = weight_of("output_layer.weight")
    last = cut(weight, [torch.ones(13, 24)], model, 2, 1)
    assert last.shape == (7, 24)
    assert last.sum(1).tolist() == [24.0] * 6 + [0.0]
