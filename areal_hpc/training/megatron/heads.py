"""What is made of the last stage's hidden states: log-probs of words, or one number for each state.

    outputs = head(model, hidden, packed, part)     on the last stage; ``part`` is None where ranks only take part

What comes out is of the part's own tokens, in their order, and the same on the tensor- and context-parallel ranks of a
copy of the model.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from areal_hpc.training.megatron.logprobs import split_logprobs
from areal_hpc.training.megatron.packing import Packed
from areal_hpc.training.megatron.parallel import Place
from areal_hpc.types import Batch

CHUNK_BYTES = 512 << 20
"""Logits, in float32, that this rank makes at a time. What fits is kept for the backward pass; of more chunks than one
each is computed again, which is a tenth of a small model's work."""


class Head(Protocol):
    def __call__(self, model: Any, hidden: Tensor, packed: Packed, part: Batch | None) -> tuple[Tensor, ...]:
        """From ``hidden`` [P / C, 1, H], which with sequence parallelism is this tensor-parallel rank's share of it."""


class Words:
    """Log-probs and entropies of the trainable tokens, float32 [N] both.

    Args:
        vocab_size: words of the model, without those that only pad the shares of tensor-parallel ranks.
        temperature: the one that generation uses, above 0.
    """

    def __init__(self, place: Place, *, vocab_size: int, temperature: float) -> None:
        self._place, self._vocab_size, self._temperature = place, vocab_size, temperature

    def __call__(self, model: Any, hidden: Tensor, packed: Packed, part: Batch | None) -> tuple[Tensor, Tensor]:
        group = self._place.tensor
        # Each rank projects on its own words, and finds its own part of what the hidden states' gradient is.
        hidden = whole_sequence(hidden, self._place, sum_gradients=True)
        head = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        head = model.output_layer.weight if head is None else head
        first = group.rank() * head.shape[0]
        words = self._vocab_size - first
        head = head if words >= len(head) else head[:words]  # the gradient of a part is made of zeros of the whole
        logprobs, entropy = split_logprobs(
            hidden[on(self._place, packed.rows)],
            head,
            on(self._place, packed.targets),
            first=first,
            temperature=self._temperature,
            chunk_size=max(1, CHUNK_BYTES // (4 * len(head))),
            group=group,
        )
        if part is None or self._place.context.size() == 1:
            return logprobs, entropy
        both = _of_all_ranks(torch.stack([logprobs, entropy]), packed.slots, part, self._place)
        return tuple(both[:, on(self._place, part.loss_mask)])


class Numbers:
    """A number for the state after each token, float32 [T], by the layer that ``build`` put in the words' place."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def __call__(self, model: Any, hidden: Tensor, packed: Packed, part: Batch | None) -> tuple[Tensor]:
        # Every rank makes the same numbers of all states, and so finds all of their gradient.
        hidden = whole_sequence(hidden, self._place, sum_gradients=False)[on(self._place, packed.token_rows)]
        layer = model.get_submodule(model.number_head)
        bias = None if layer.bias is None else layer.bias.float()
        numbers = linear(hidden.float(), layer.weight.float(), bias).squeeze(-1)  # wide sums, whatever computes
        if part is None:
            return (numbers,)
        return (_of_all_ranks(numbers[None], packed.token_slots, part, self._place)[0],)


def whole_sequence(hidden: Tensor, place: Place, *, sum_gradients: bool) -> Tensor:
    """[tokens, H] of all tensor-parallel ranks, which hold a share of them each.

    Args:
        sum_gradients: whether each rank will find a part of the gradient, or all of it.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    if place.tensor.size() > 1:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=sum_gradients)
    return hidden.squeeze(1)


def on(place: Place, array: np.ndarray[Any, Any]) -> Tensor:
    """The array on this rank's device."""
    return torch.from_numpy(array).to(place.ranks.device)


def _of_all_ranks(mine: Tensor, slots: np.ndarray[Any, Any], part: Batch, place: Place) -> Tensor:
    """Rows of numbers [R, N] at their ``slots`` among the part's tokens, with those of the other context ranks:
    [R, T].
    """
    every = torch.zeros(mine.shape[0], part.token_ids.size, device=mine.device)
    every[:, on(place, slots)] = mine
    if place.context.size() == 1:
        return every
    found: Tensor = _SumOfParts.apply(every, place.context)  # type: ignore[no-untyped-call]
    return found


class _SumOfParts(torch.autograd.Function):
    """The sum over ranks of which each holds other places; all make the same of it, so the gradient stays as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
