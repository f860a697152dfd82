"""What of a layer is ours, with its gradients, against its definition in float64 and against transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from areal_hpc.training.megatron.fused import gated, rms_norm
from areal_hpc.training.megatron.rotary import rotate, turns_of

TOKENS, HEADS, WIDTH, EPS = 7, 3, 8, 1e-5
FREQUENCIES = 1.0 / 10_000 ** (torch.arange(0, WIDTH, 2, dtype=torch.float32) / WIDTH)
POSITIONS = torch.tensor([0, 1, 2, 0, 1, 2, 4000])


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def norm_by_definition(hidden: Tensor, weight: Tensor) -> Tensor:
    """Zhang and Sennrich 2019, arXiv 1910.07467."""
    return weight * hidden / (hidden.square().mean(-1, keepdim=True) + EPS).sqrt()


def norm_of_transformers(hidden: Tensor, weight: Tensor) -> Tensor:
    """In float32 at most; its module has its own parameter, which would keep its gradient to itself."""
    module = LlamaRMSNorm(WIDTH, EPS).to(hidden.dtype)
    del module.weight
    module.weight = weight
    found: Tensor = module(hidden)
    return found


def rotation_of_transformers(heads: Tensor) -> Tensor:
    phases = torch.outer(POSITIONS.float(), FREQUENCIES)
    phases = torch.cat([phases, phases], -1)[None].to(heads.dtype)
    query = heads.transpose(0, 1)[None]
    query, _ = apply_rotary_pos_emb(query, query, phases.cos(), phases.sin())
    return query[0].transpose(0, 1)


def gate_of_transformers(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


Function = Callable[..., Tensor]
CASES: dict[str, tuple[Function, Function, Function, list[tuple[int, ...]]]] = {
    "norm": (
        lambda hidden, weight: rms_norm(hidden, weight, EPS),
        norm_of_transformers,
        norm_by_definition,
        [(TOKENS, HEADS, WIDTH), (WIDTH,)],
    ),
    "rotation": (
        lambda heads: rotate(heads, turns_of(FREQUENCIES, 1.0, POSITIONS, heads.dtype)),
        rotation_of_transformers,
        rotation_of_transformers,
        [(TOKENS, HEADS, WIDTH)],
    ),
    "gate": (gated, gate_of_transformers, gate_of_transformers, [(TOKENS, 1, 2 * WIDTH)]),
}


def value_and_gradients(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in inputs]
    value = function(*leaves)
    value.backward(torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view(value.shape))  # type: ignore[no-untyped-call]
    return [value.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_exact(name: str) -> None:
    """Ours and their gradients in float32, the definition and autograd's in float64."""
    ours, _, definition, shapes = CASES[name]
    inputs = [random(*shape) for shape in shapes]
    exact = value_and_gradients(definition, inputs)
    assert len(exact) == 1 + len(inputs)
    found = value_and_gradients(ours, [one.float() for one in inputs])
    for one, right in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), right, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_in_bfloat16_they_are_as_near_to_these_as_transformers_own(name: str) -> None:
    ours, theirs, definition, shapes = CASES[name]
    rounded = [random(*shape).bfloat16() for shape in shapes]
    exact = value_and_gradients(definition, [one.double() for one in rounded])
    found, other = (value_and_gradients(function, rounded) for function in (ours, theirs))
    for one, another, right in zip(found, other, exact, strict=True):
        assert one.dtype == torch.bfloat16
        error, allowed = (one.double() - right).abs(), (another.double() - right).abs()
        assert error.mean() <= 1.25 * allowed.mean()


@pytest.mark.parametrize("name", CASES)
def test_of_no_token_there_is_nothing(name: str) -> None:
    ours, _, _, shapes = CASES[name]
    if name == "rotation":
        ours = lambda heads: rotate(heads, turns_of(FREQUENCIES, 1.0, POSITIONS[:0], heads.dtype))  # noqa: E731
    found: list[Any] = value_and_gradients(ours, [random(0, *shapes[0][1:]), *(random(*one) for one in shapes[1:])])
    assert found[0].shape[0] == 0 and all(torch.isfinite(one).all() for one in found)
