"""Log-probs of sampled tokens where each tensor-parallel rank holds a part of the vocabulary.

As ``algorithms.logprobs`` a chunk of tokens at a time: a rank projects it on its words, and three numbers a token are
summed over the ranks; logits never leave the rank that made them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint


def split_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    first: int,
    temperature: float,
    chunk_size: int,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Log-probs of ``targets`` at the sampling temperature, and the entropies of the distributions, without gradient.

    Both are float32 [N]. At most ``chunk_size`` rows of this rank's logits exist at a time: of several chunks each is
    computed again in the backward pass, while one alone is kept, which takes no more memory.

    Args:
        hidden: float [N, H], the same on all ranks of ``group``; what each finds for its gradient is not yet summed.
        weight: float [W, H], this rank's words of the vocabulary, of which ``first`` is the first.
        targets: int64 [N].
    """
    if len(targets) <= chunk_size:  # also none at all, so that the graph stays whole
        return _chunk(hidden, weight, targets - first, temperature, group)
    starts = range(0, len(targets), chunk_size)
    chunks = [
        checkpoint(
            _chunk,
            hidden[start : start + chunk_size],
            weight,
            targets[start : start + chunk_size] - first,
            temperature,
            group,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing here is random
        )
        for start in starts
    ]
    return torch.cat([logprobs for logprobs, _ in chunks]), torch.cat([entropy for _, entropy in chunks])


def _chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    logits = linear(hidden, weight).float()  # [C, V / ranks]: no pass over it is for nothing
    if temperature != 1.0:
        logits = logits / temperature
    logprobs, entropy = _SplitLogSoftmax.apply(logits, targets, group)  # type: ignore[no-untyped-call]
    return logprobs, entropy.detach()


class _SplitLogSoftmax(torch.autograd.Function):
    """Logits [C, W] of this rank's words, targets [C] counted from its first word -> log-probs [C], entropies [C]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        together = group.size() > 1 and logits.shape[0] > 0
        largest = logits.amax(-1)
        if together:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest.unsqueeze(-1)
        here = (targets >= 0) & (targets < logits.shape[-1])
        places = targets.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        chosen = torch.where(here, shifted.gather(-1, places).squeeze(-1), 0.0)
        weights = shifted.exp()
        sums = torch.stack([weights.sum(-1), shifted.mul_(weights).sum(-1), chosen])
        if together:
            dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums
        ctx.save_for_backward(weights.div_(total.unsqueeze(-1)), places, here)
        return chosen - total.log(), total.log() - weighted / total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """d log-prob / d logit is (1 where the logit is the target's) - its probability."""
        probabilities, places, here = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(-1)
        found = probabilities * -gradient
        found.scatter_add_(-1, places, gradient * here.unsqueeze(-1))
        return found, None, None
