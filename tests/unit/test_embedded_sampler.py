"""Sampling against a float64 reference: which tokens are kept, how often each comes, and what its log-prob is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from areal_hpc.generation.embedded.sampler import Sampled, SamplingColumns, sample, uniforms
from areal_hpc.generation.embedded.sequence import sample_seed

VOCAB = 12


def columns(
    num: int, temperature: float = 1.0, top_k: int = VOCAB, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingColumns:
    return SamplingColumns(
        temperature=np.full(num, temperature, dtype=np.float32),
        top_k=np.full(num, top_k, dtype=np.int64),
        top_p=np.full(num, top_p, dtype=np.float32),
        min_p=np.full(num, min_p, dtype=np.float32),
    )


def reference(
    logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.float64]:
    """Probabilities [V] by the definitions, one token after the other."""
    scaled = logits / temperature
    full = np.exp(scaled - scaled.max())
    full /= full.sum()
    kept = np.zeros_like(full)
    collected = 0.0
    for rank, token in enumerate(sorted(range(len(full)), key=lambda t: -full[t])):
        if rank == 0 or (rank < top_k and collected < top_p and full[token] >= min_p * full.max()):
            kept[token] = full[token]
        collected += full[token]
    return kept / kept.sum()


SETTINGS = [
    (1.0, VOCAB, 1.0, 0.0),
    (0.6, VOCAB, 1.0, 0.0),
    (1.0, 3, 1.0, 0.0),
    (1.3, VOCAB, 0.7, 0.0),
    (1.0, VOCAB, 1.0, 0.2),
    (0.7, 8, 0.9, 0.02),
    (1.0, 1, 1.0, 0.0),
    (1.0, VOCAB, 1e-6, 0.0),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_E2_the_distribution_is_the_one_that_is_sampled(setting: tuple[float, int, float, float]) -> None:
    logits = np.random.default_rng(3).normal(0, 2, VOCAB)
    expected = reference(logits, *setting)
    num = 40_000
    batch = torch.tensor(logits, dtype=torch.float32).expand(num, VOCAB)
    uniform = (np.arange(num) + 0.5) / num  # every probability is hit to within one sample
    sampled = sample(batch, columns(num, *setting), uniform)

    np.testing.assert_allclose(sampled.distribution[0].exp().numpy(), expected, atol=1e-6)
    counts = np.bincount(sampled.token_ids.numpy(), minlength=VOCAB)
    np.testing.assert_allclose(counts / num, expected, atol=2 / num)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(sampled.logprobs.numpy(), np.log(expected)[sampled.token_ids.numpy()], atol=1e-5)


@pytest.mark.parametrize(("top_p", "num"), [(0.495, 1), (0.505, 2), (0.745, 2), (0.755, 3), (0.999, 4)])
def test_top_p_keeps_the_token_that_crosses_it_and_none_after(top_p: float, num: int) -> None:
    logits = torch.tensor([[0.125, 0.5, 0.25, 0.125]]).log()
    sampled = sample(logits, columns(1, top_k=4, top_p=top_p), np.array([0.5]))
    assert int(torch.isfinite(sampled.distribution).sum()) == num
    assert torch.isfinite(sampled.distribution[0, 1])


@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=30),
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(1, 30),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 1.0),
    u=st.floats(0, 1 - 2**-48),
)
@settings(max_examples=200)
def test_a_sampled_token_is_never_one_that_was_cut_off(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> None:
    sampled = sample(torch.tensor([logits]), columns(1, temperature, top_k, top_p, min_p), np.array([u]))
    assert torch.isfinite(sampled.logprobs).all()
    torch.testing.assert_close(sampled.distribution.exp().sum(-1), torch.ones(1), atol=1e-4, rtol=0)


def test_greedy_takes_the_likeliest_and_tells_its_logprob_at_temperature_one() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    mixed = SamplingColumns(
        temperature=np.array([0.0, 1.0, 0.0], dtype=np.float32),
        top_k=np.array([2, VOCAB, VOCAB]),
        top_p=np.array([0.1, 1.0, 1.0], dtype=np.float32),
        min_p=np.zeros(3, dtype=np.float32),
    )
    sampled = sample(logits, mixed, np.array([0.9, 0.0, 0.9]))
    expected = torch.log_softmax(logits.double(), -1)
    assert sampled.token_ids[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    assert sampled.token_ids[1] == 0  # uniform 0 is the first token
    chosen = expected.gather(1, sampled.token_ids[:, None])[:, 0].float()
    torch.testing.assert_close(sampled.logprobs, chosen)


def test_masked_tokens_at_both_ends_are_never_drawn() -> None:
    logits = torch.zeros(2, 4)
    logits[:, [0, 3]] = -torch.inf
    drawn: Sampled = sample(logits, columns(2, top_k=4), np.array([0.0, 1 - 2**-48]))
    assert drawn.token_ids.tolist() == [1, 2]


def test_logits_that_are_not_finite_show_in_the_logprob() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1] = torch.nan
    sampled = sample(logits, columns(2), np.array([0.5, 0.5]))
    assert torch.isfinite(sampled.logprobs).tolist() == [True, False]


# -- random numbers


def test_uniforms_are_uniform_and_streams_are_independent() -> None:
    num = 20_000
    for seeds, indices in ((np.full(num, 7), np.arange(num)), (np.arange(num), np.zeros(num))):
        numbers = uniforms(seeds.astype(np.uint64), indices.astype(np.int64))
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
        chi2 = ((counts - num / 50) ** 2 / (num / 50)).sum()
        assert chi2 < 95  # 49 degrees of freedom: exceeded by chance in 1 of 10,000
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    first, second = (uniforms(np.full(1000, s, dtype=np.uint64), np.arange(1000)) for s in (1, 2))
    assert not set(first) & set(second)


def test_F10_samples_of_one_request_differ_and_the_first_keeps_its_seed() -> None:
    seeds = [sample_seed(5, index) for index in range(100)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 100
