"""Log-probs of sampled tokens from hidden states, without ever holding logits for the whole batch.

Logits of 8,192 tokens over 152,000 words are 5 GB in float32, and as much again for their gradient. Here a chunk of
tokens is projected, reduced to one number a token and forgotten; the backward pass projects it again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_size: int, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of ``targets`` at the sampling temperature, and the entropy of each distribution if asked.

    Both are float32 [N] and differentiable in ``hidden`` and ``weight``. At most ``chunk_size * V`` logits exist at a
    time, in forward and backward; the price is one more projection.

    Args:
        hidden: float [N, H], the last hidden state that predicts each target.
        weight: float [V, H], the output embedding.
        targets: int64 [N].
        temperature: above 0; the one that generation used.
        chunk_size: tokens projected at a time.
    """
    assert temperature > 0 and chunk_size > 0, (temperature, chunk_size)
    starts = range(0, max(len(targets), 1), chunk_size)  # one empty chunk of an empty batch keeps the graph whole
    chunks = [
        checkpoint(
            _chunk,
            hidden[start : start + chunk_size],
            weight,
            targets[start : start + chunk_size],
            temperature,
            with_entropy,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing here is random
        )
        for start in starts
    ]
    logprobs = torch.cat([logprobs for logprobs, _ in chunks])
    return logprobs, torch.cat([entropy for _, entropy in chunks]) if with_entropy else None


def _chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits = linear(hidden, weight).float() / temperature  # [C, V]
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)  # [C]
    return chosen, -(logprobs.exp() * logprobs).sum(-1) if with_entropy else None
