"""Log-probs over a vocabulary in parts, against float64 over the whole of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from areal_hpc.training.megatron.logprobs import split_logprobs
from tests.ranks import run_ranks

NUM_TOKENS, HIDDEN, WORDS, TEMPERATURE = 11, 6, 21, 0.7


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, targets and what the log-probs' gradient is; one word outweighs all others by far."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    head = torch.randn(WORDS, HIDDEN, generator=generator)
    head[3] *= 40.0
    targets = torch.randint(0, WORDS, (NUM_TOKENS,), generator=generator)
    return hidden, head, targets, torch.randn(NUM_TOKENS, generator=generator)


def of_rank(group: ProcessGroup, num_tokens: int, chunk_size: int) -> Any:
    """Log-probs, entropies, gradients of hidden states (not yet summed) and of this rank's words."""
    hidden, head, targets, gradient = tensors()
    hidden.requires_grad_()
    rows = -(-WORDS // group.size())
    first = group.rank() * rows
    mine = head[first : first + rows].clone().requires_grad_()
    logprobs, entropy = split_logprobs(
        hidden[:num_tokens],
        mine,
        targets[:num_tokens],
        first=first,
        temperature=TEMPERATURE,
        chunk_size=chunk_size,
        group=group,
    )
    assert not entropy.requires_grad
    (logprobs * gradient[:num_tokens]).sum().backward()
    assert hidden.grad is not None and mine.grad is not None
    return [tensor.detach().numpy() for tensor in (logprobs, entropy, hidden.grad, mine.grad)]


@pytest.mark.parametrize(
    ("num_ranks", "num_tokens", "chunk_size"), [(2, NUM_TOKENS, 4), (3, NUM_TOKENS, 100), (2, 0, 4)]
)
def test_parts_of_a_vocabulary_give_the_log_probs_and_gradients_of_the_whole(
    num_ranks: int, num_tokens: int, chunk_size: int
) -> None:
    results = run_ranks(num_ranks, of_rank, num_tokens, chunk_size)
    hidden, head, targets, gradient = (t.double() if t.is_floating_point() else t for t in tensors())
    hidden.requires_grad_()
    head.requires_grad_()
    logs = (hidden[:num_tokens] @ head.T / TEMPERATURE).log_softmax(-1)
    chosen = logs[torch.arange(num_tokens), targets[:num_tokens]]
    (chosen * gradient[:num_tokens]).sum().backward()
    entropy = -(logs.exp() * logs).sum(-1)
    for logprobs, entropies, _, _ in results:
        torch.testing.assert_close(torch.from_numpy(logprobs).double(), chosen, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(torch.from_numpy(entropies).double(), entropy, rtol=1e-5, atol=2e-5)
    of_hidden = sum(torch.from_numpy(result[2]).double() for result in results)
    of_head = torch.cat([torch.from_numpy(result[3]).double() for result in results])
    torch.testing.assert_close(of_hidden, hidden.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of_head, head.grad, rtol=1e-4, atol=1e-4)
