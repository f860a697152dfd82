"""A minibatch through Megatron's pipeline: micro-batches of different lengths in, log-probs out, on any layout.

    passes.run(chunks, parts, on_logprobs)              forward only
    passes.run(chunks, parts, on_logprobs, train=True)  and backward, gradients summed over the ranks

Where log-probs are, on the last stage, ``on_logprobs(number, logprobs, entropy)`` is called for each part: float32 of
the part's trainable tokens, the same on the tensor- and context-parallel ranks of a copy of the model. What it returns
is a loss whose gradient is wanted; it is made of whole sequences, however they are cut over context-parallel ranks.

All data-parallel ranks make equally many passes, since experts of one may wait for tokens of another; who has fewer
parts sends some tokens along that nobody learns from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_hpc.collective import meeting
from areal_hpc.config.schema import ParallelConfig
from areal_hpc.training.megatron.logprobs import split_logprobs
from areal_hpc.training.megatron.packing import Packed, nothing, pack_for_rank
from areal_hpc.training.megatron.parallel import Place
from areal_hpc.types import Batch
from areal_hpc.waits import advance

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time."""

OnLogprobs = Callable[[int, Tensor, Tensor], Tensor]


class Passes:
    """How micro-batches go through the model on this rank.

    Args:
        vocab_size: words of the model, without those that only pad the shares of tensor-parallel ranks.
        temperature: the one that generation uses, above 0.
    """

    def __init__(self, place: Place, parallel: ParallelConfig, *, vocab_size: int, temperature: float) -> None:
        self._place, self._parallel = place, parallel
        self._vocab_size, self._temperature = vocab_size, temperature

    def run(
        self, chunks: Sequence[Any], parts: Sequence[Batch], on_logprobs: OnLogprobs, *, train: bool = False
    ) -> None:
        """Every rank of the trainer calls this together."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        num_passes = self._num_passes(len(parts))
        packed = [self._pack(part) for part in parts]
        packed += [nothing(2 * self._parallel.tensor, self._parallel.context)] * (num_passes - len(parts))
        scale = float(num_passes * self._place.data.size)  # Megatron divides by the first, and by the second after all

        def step(rows: Iterator[tuple[int, Packed]], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number, one = next(rows)
            output = chunk(self._tensor(one.token_ids)[None], None, None, packed_seq_params=self._lengths(one))

            def loss(hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                part = parts[number] if number < len(parts) else None
                logprobs, entropy = self._logprobs(chunk, hidden, one, part)
                advance("micro-batches")
                found = logprobs.sum() if part is None else on_logprobs(number, logprobs, entropy)
                return found * scale, {}

            return output, loss

        group = self._place.ranks.group
        with nullcontext() if group is None else meeting("the passes of a minibatch", group):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(list(enumerate(packed))) for _ in chunks],
                model=list(chunks),
                num_microbatches=num_passes,
                seq_length=1,  # lengths vary, and each pass tells its own
                micro_batch_size=1,
                forward_only=not train,
            )

    def _num_passes(self, num_parts: int) -> int:
        """As many as the data-parallel rank with the most parts needs; interleaved stages want whole rounds."""
        most: int = max(1, *self._place.data.gather(num_parts))
        stages = self._parallel.pipeline if self._parallel.virtual_pipeline > 1 else 1
        return -(-most // stages) * stages

    def _pack(self, part: Batch) -> Packed:
        context = self._place.context
        return pack_for_rank(
            part, context_rank=context.rank(), context_size=context.size(), multiple=self._parallel.tensor
        )

    def _lengths(self, packed: Packed) -> Any:
        from megatron.core.packed_seq_params import PackedSeqParams

        boundaries = self._tensor(packed.boundaries)
        longest = int((packed.boundaries[1:] - packed.boundaries[:-1]).max())
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    def _logprobs(self, chunk: Any, hidden: Tensor, packed: Packed, part: Batch | None) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N] of the trainable tokens of the part, in order, on all context-parallel ranks."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        model, group = getattr(chunk, "module", chunk), self._place.tensor
        if group.size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden)
        head = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        head = model.output_layer.weight if head is None else head
        first = group.rank() * head.shape[0]
        logprobs, entropy = split_logprobs(
            hidden.squeeze(1)[self._tensor(packed.rows)],
            head[: self._vocab_size - first],
            self._tensor(packed.targets),
            first=first,
            temperature=self._temperature,
            chunk_size=CHUNK_TOKENS,
            group=group,
        )
        if part is None or self._place.context.size() == 1:
            return logprobs, entropy
        both = torch.zeros(2, part.token_ids.size, device=hidden.device)
        both[:, self._tensor(packed.slots)] = torch.stack([logprobs, entropy])
        both = _SumOfParts.apply(both, self._place.context)  # type: ignore[no-untyped-call]
        return tuple(both[:, self._tensor(part.loss_mask)])

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self._place.ranks.device)


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
