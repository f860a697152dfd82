"""Frequencies and amplitudes of every rotary variant against transformers', and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from areal_hpc.errors import DataError
from areal_hpc.pretrained.rope import amplitude, inverse_frequencies, read_rope

CONFIG = {"max_position_embeddings": 4096}
NUMBERS = {
    "factor": st.floats(1.0, 40.0),
    "original_max_position_embeddings": st.sampled_from([32, 4096, 32768]),
    "low_freq_factor": st.floats(0.5, 1.5),
    "high_freq_factor": st.floats(2.0, 8.0),
}
OF_YARN = {
    "original_max_position_embeddings": NUMBERS["original_max_position_embeddings"],
    "beta_fast": st.floats(4.0, 64.0),
    "beta_slow": st.floats(0.5, 3.0),
    "attention_factor": st.floats(0.5, 2.0),
    "truncate": st.booleans(),
    "mscale": st.floats(0.1, 2.0),
    "mscale_all_dim": st.floats(0.1, 2.0),
}
VARIANTS = st.one_of(
    st.just({"rope_type": "default"}),
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": NUMBERS["factor"]}),
    st.fixed_dictionaries({"rope_type": st.just("llama3"), **NUMBERS}),
    st.fixed_dictionaries({"rope_type": st.just("yarn"), "factor": NUMBERS["factor"]}, optional=OF_YARN),
)


@settings(max_examples=200, deadline=None)
@given(variant=VARIANTS, theta=st.sampled_from([100.0, 1e4, 1e6]), dim=st.sampled_from([8, 64, 128]))
def test_every_variant_is_that_of_transformers(variant: dict[str, Any], theta: float, dim: int) -> None:
    written = {**variant, "rope_theta": theta}
    rope = read_rope({**CONFIG, "rope_parameters": written}, Path("model"))
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=dim, rope_parameters=dict(written), **CONFIG))
    torch.testing.assert_close(inverse_frequencies(rope, dim), theirs.inv_freq, rtol=1e-5, atol=0.0)  # float32
    assert amplitude(rope) == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_yarn_stretches_what_its_authors_stretch() -> None:
    """A context of 4,096 by 16, theta 10,000, width 128: frequencies 0 to 20 are kept, from 46 on they are divided."""
    written = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
    rope = read_rope({**CONFIG, "rope_scaling": written}, Path("model"))
    plain = 10_000 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    shares = inverse_frequencies(rope, 128) / plain
    torch.testing.assert_close(shares[:21], torch.ones(21, dtype=torch.float64), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(shares[46:], torch.full((18,), 1 / 16, dtype=torch.float64), rtol=1e-6, atol=0.0)
    assert ((shares[21:46] < 1) & (shares[21:46] > 1 / 16)).all()
    assert amplitude(rope) == pytest.approx(1.2772588722239781)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rotary variant 'dynamic' is not known"),
        ({"rope_type": "yarn"}, "has no factor for its rotary variant 'yarn'"),
        ({"rope_type": "llama3", "factor": 8.0}, "has no low_freq_factor and no high_freq_factor"),
    ],
)
def test_what_is_not_known_or_not_whole_is_refused(written: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_rope({**CONFIG, "rope_parameters": written}, Path("model"))
