"""Chunked log-probs against a plain float64 log-softmax, and how large a tensor ever gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_hpc.algorithms.logprobs import token_logprobs


def problem(tokens: int, hidden: int, words: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    states = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(words, hidden, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(words, (tokens,), generator=generator)
    pull = torch.randn(2, tokens, generator=generator)  # what the loss would send back
    return states, weight, targets, pull


def exact(
    states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(states @ weight.T / temperature, dim=-1)
    return logprobs[torch.arange(len(targets)), targets], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_size", [1, 4, 11, 64])
def test_values_and_gradients_equal_float64(chunk_size: int, temperature: float) -> None:
    states, weight, targets, pull = problem(11, 8, 29)
    logprobs, entropy = token_logprobs(states, weight, targets, temperature, chunk_size, with_entropy=True)
    assert entropy is not None
    assert logprobs.dtype == entropy.dtype == torch.float32
    gradients = torch.autograd.grad((pull[0] * logprobs + pull[1] * entropy).sum(), (states, weight))

    precise = [x.detach().double().requires_grad_() for x in (states, weight)]
    expected, expected_entropy = exact(*precise, targets, temperature)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    expected_gradients = torch.autograd.grad((pull[0] * expected + pull[1] * expected_entropy).sum(), precise)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-5)


def test_entropy_is_left_out_unless_asked() -> None:
    states, weight, targets, _ = problem(3, 4, 5)
    assert token_logprobs(states, weight, targets, 1.0, 2)[1] is None


def test_bfloat16_weights_give_float32_log_probs() -> None:
    states, weight, targets, _ = problem(5, 16, 13, torch.bfloat16)
    logprobs, _ = token_logprobs(states, weight, targets, 1.0, 2)
    assert logprobs.dtype == torch.float32
    expected, _ = exact(states.double(), weight.double(), targets, 1.0)
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=0.05)  # logits are rounded to 8 bits
    logprobs.sum().backward()
    assert states.grad is not None
    assert states.grad.dtype == torch.bfloat16


def test_a_certain_token_has_log_prob_zero_and_finite_gradients() -> None:
    weight = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    states = torch.ones(2, 1, requires_grad=True)
    logprobs, entropy = token_logprobs(states, weight, torch.tensor([0, 1]), 1.0, 2, with_entropy=True)
    assert logprobs.tolist() == [0.0, -400.0]
    assert entropy is not None
    assert entropy.tolist() == [0.0, 0.0]
    gradients = torch.autograd.grad((logprobs + entropy).sum(), (states, weight))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_E17_no_tokens_still_reach_every_parameter() -> None:
    """A rank without tokens must take part in the reduction of gradients: its are zero, not missing."""
    states, weight, targets, _ = problem(0, 4, 5)
    logprobs, entropy = token_logprobs(states, weight, targets, 1.0, 8, with_entropy=True)
    assert entropy is not None
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert (weight.grad == 0).all()


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_full_logits_never_exist_and_are_not_kept() -> None:
    tokens, hidden, words, chunk_size = 256, 4, 64, 8
    states, weight, targets, _ = problem(tokens, hidden, words)
    given = {tensor.untyped_storage().data_ptr() for tensor in (states, weight, targets)}
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in given:
            kept.append(tensor.numel())
        return tensor

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            logprobs, entropy = token_logprobs(states, weight, targets, 1.0, chunk_size, with_entropy=True)
        assert entropy is not None
        (logprobs.sum() + entropy.sum()).backward()
    ceiling = max(chunk_size * words, tokens * hidden)
    assert chunk_size * words <= largest.numel <= ceiling < tokens * words
    assert sum(kept) <= 4 * tokens  # a few numbers a token wait for the backward pass, and no chunk's logits
