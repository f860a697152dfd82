"""The compact layout. Sizes and refusals are those that AReaL's own parser gives for the same words."""

from __future__ import annotations

import pytest

from areal_hpc.config.layout import parse_allocation, parse_layout, settings
from areal_hpc.config.schema import EngineName, TrainerBackendName
from areal_hpc.errors import ConfigError

ALLOCATIONS = {  # dp, tp, pp, cp, ep, etp, edp, world size
    "sglang:d4t2": (4, 2, 1, 1, 1, 1, 4, 8),
    "vllm:d2t2p2": (2, 2, 2, 1, 1, 1, 2, 8),
    "fsdp:d4t2c2": (4, 2, 1, 2, 1, 1, 4, 16),
    "megatron:d2p2t2c2e2": (2, 2, 2, 2, 2, 1, 4, 16),
    "megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)": (4, 2, 2, 2, 2, 4, 2, 32),
    "megatron:(attn:d4p2t2c2|ffn:t1e4)": (4, 2, 2, 2, 4, 1, 4, 32),
    "megatron:(attn:d1p12t4|ffn:d1p12e4)": (1, 4, 12, 1, 4, 1, 1, 48),
    "megatron:p2": (1, 1, 2, 1, 1, 1, 1, 2),
    "megatron:(attn:d4t2|ffn:d8)": (4, 2, 1, 1, 1, 1, 8, 8),
}

REFUSED = {
    "fsdp:d4p2": "'d4p2' has p; this backend takes only d (data), t (tensor), c (context)",
    "d4": "write backend:sizes, such as sglang:d4t2; backends are sglang, vllm, embedded, megatron",
    "sglang:d4+fsdp:d4": "write backend:sizes",
    "megatron:(attn:d2p2|ffn:p4)": "ffn has p4, attn p2; a stage holds both, write the same p",
    "sglang:d0": "'d0' is no row of letter and positive number",
    "sglang:": "'' is no row of letter and positive number",
    "sglang:d4 t2": "'d4 t2' is no row",
    "sglang:4d": "'4d' is no row",
    "sglang:d٤": "is no row",
    "sglang:d1234567": "is no row",
    "sglang:d2d2": "names a letter twice; keep one",
    "sglang:d2x2": "'d2x2' has x",
    "sglang:d2c2": "'d2c2' has c",
    "embedded:d2t2": "this backend takes only d (data)",
    "torch:d2": "write backend:sizes",
    "fsdp:(attn:d4|ffn:d4)": "parentheses are for experts under megatron",
    "megatron:(attn:d4)": "parentheses are for experts under megatron",
    "megatron:(ffn:d4|attn:d4)": "parentheses are for experts under megatron",
    "megatron:(attn:d4e2|ffn:d4)": "'d4e2' has e",
    "megatron:(attn:d4|ffn:c2)": "'c2' has c",
    "megatron:(attn:d4|ffn:)": "'' is no row",
    "megatron:d2e4": "one copy of the experts takes 4 ranks, which do not divide 2 devices; change p, e or t",
    "megatron:(attn:d4|ffn:d4e2)": "ffn has d4, but the 4 devices of attn leave d2",
}


@pytest.mark.parametrize("text", ALLOCATIONS)
def test_an_allocation_gives_all_sizes(text: str) -> None:
    found = parse_allocation(text)
    sizes = (found.dp, found.tp, found.pp, found.cp, found.ep, found.etp, found.edp, found.world_size)
    assert sizes == ALLOCATIONS[text]
    assert found.backend == text.partition(":")[0]


@pytest.mark.parametrize("text", REFUSED)
def test_an_allocation_that_cannot_be_says_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_allocation(text)
    assert repr(text) in str(caught.value)
    assert REFUSED[text] in str(caught.value)


@pytest.mark.parametrize("text", ["sglang:d4t2+megatron:d2p2t2e2", "megatron:d2p2t2e2+sglang:d4t2"])
def test_a_layout_fills_both_sections_in_either_order(text: str) -> None:
    assert settings(parse_layout(text)) == {
        "generation.backend": EngineName.SGLANG,
        "generation.replicas": 4,
        "generation.tensor_parallel": 2,
        "generation.pipeline_parallel": 1,
        "trainer.backend": TrainerBackendName.MEGATRON,
        "trainer.ranks": 8,
        "trainer.parallel.tensor": 2,
        "trainer.parallel.pipeline": 2,
        "trainer.parallel.context": 1,
        "trainer.parallel.expert": 2,
        "trainer.parallel.expert_tensor": 1,
    }


def test_fsdp_is_the_reference_backend_while_it_is_data_parallel_only() -> None:
    assert settings(parse_layout("vllm:d1+fsdp:d4"))["trainer.backend"] is TrainerBackendName.REFERENCE
    with pytest.raises(ConfigError, match="data-parallel only; write fsdp:d8, or use megatron"):
        settings(parse_layout("vllm:d1+fsdp:d4t2"))


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("sglang:d4", "1 engines and 0 trainers"),
        ("megatron:d4", "0 engines and 1 trainers"),
        ("sglang:d4+vllm:d4", "2 engines and 0 trainers"),
        ("sglang:d4+fsdp:d4+megatron:d2", "1 engines and 2 trainers"),
    ],
)
def test_a_layout_is_one_engine_and_one_trainer(text: str, counts: str) -> None:
    with pytest.raises(ConfigError, match=counts):
        parse_layout(text)
