"""Drawing tokens from logits, vectorised over the batch, reproducible for each request whoever its batch mates are.

The distribution that is sampled: logits divided by the temperature, softmax, then top-k, top-p and min-p **each judged
on that full distribution**, then renormalised over the tokens that all three keep. The log-prob that goes with a token
is that of this very distribution, in float32. A greedy token (temperature 0) carries its log-prob at temperature 1
over the whole vocabulary.

The uniform number behind token i of a request is a hash of (seed of the request, i), so it does not depend on batch
composition, pauses or retractions. Logits themselves may differ in the last bits with the batch's size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """How each row of a batch is sampled; arrays [B]."""

    temperature: NDArray[np.float32]  # 0 is greedy
    top_k: NDArray[np.int64]  # vocabulary size is off
    top_p: NDArray[np.float32]  # 1 is off
    min_p: NDArray[np.float32]  # 0 is off


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One token for each row."""

    token_ids: torch.Tensor  # int64 [B]
    logprobs: torch.Tensor  # float32 [B]
    distribution: torch.Tensor  # float32 [B, V], log-probs; -inf for tokens that were cut off


def mix(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea, Flood 2014) of stream ``seeds`` at ``indices``; uint64 [B]."""
    x = seeds + (indices + np.uint64(1)) * GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1 - 2**-48], one for each request and token index; float64 [B].

    Hashing the seed first keeps the streams of neighbouring seeds apart.
    """
    scrambled = mix(seeds, np.zeros_like(seeds))
    return (mix(scrambled, indices.astype(np.uint64)) >> np.uint64(16)).astype(np.float64) * 2.0**-48


@torch.inference_mode()
def sample(logits: torch.Tensor, columns: SamplingColumns, uniform: NDArray[np.float64]) -> Sampled:
    """One token for each row of float32 ``logits`` [B, V]; ``uniform`` [B] decides."""
    greedy = columns.temperature == 0
    if (columns.temperature != 1).any():
        logits = logits / torch.from_numpy(np.where(greedy, np.float32(1), columns.temperature))[:, None]
    distribution = torch.log_softmax(logits, -1)
    cut = np.flatnonzero(~greedy & ((columns.top_k < logits.shape[1]) | (columns.top_p < 1) | (columns.min_p > 0)))
    if cut.size:
        distribution[cut] = _truncated(distribution[cut], columns, cut)
    if greedy.all():
        token_ids = distribution.argmax(-1)
    else:
        token_ids = _invert(distribution, torch.from_numpy(uniform))
        if greedy.any():
            token_ids = torch.where(torch.from_numpy(greedy), distribution.argmax(-1), token_ids)
    logprobs = distribution.gather(1, token_ids[:, None])[:, 0]
    return Sampled(token_ids=token_ids, logprobs=logprobs, distribution=distribution)


def _invert(distribution: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds ``uniform`` of the total.

    Float64 sums keep the rounding of large vocabularies below any probability that matters; a token of probability 0
    adds nothing to the sum, so it is never the first to exceed. Rows that are not finite land on a valid index, and
    their log-prob tells.
    """
    cumulative = distribution.exp().cumsum(-1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=distribution.shape[1] - 1)


def _truncated(distribution: torch.Tensor, columns: SamplingColumns, rows: NDArray[np.int64]) -> torch.Tensor:
    """Log-probs [b, V] over the tokens that top-k, top-p and min-p of ``rows`` keep, renormalised; -inf elsewhere.

    Top-p keeps the tokens, likeliest first, before which less than p has been collected: the one that crosses p stays.
    """
    ordered, order = distribution.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.exp().double()
    before = probabilities.cumsum(-1) - probabilities
    top_k, top_p, min_p = (
        torch.from_numpy(column[rows])[:, None] for column in (columns.top_k, columns.top_p, columns.min_p)
    )
    keep = torch.arange(ordered.shape[1]) < top_k
    keep &= before < top_p
    keep &= probabilities >= min_p * probabilities[:, :1]
    keep[:, 0] = True  # the likeliest token survives whatever rounding says
    kept = ordered.masked_fill_(~keep, -torch.inf)
    kept -= kept.logsumexp(-1, keepdim=True)
    return torch.empty_like(kept).scatter_(1, order, kept)
