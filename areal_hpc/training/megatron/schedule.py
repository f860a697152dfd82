"""A minibatch through Megatron's pipeline: micro-batches of different lengths in, what a head makes of them out.

    parts = [part for part, _ in passes.split(batch)]
    passes.run(chunks, parts, head, on_outputs)                 forward only
    passes.run(chunks, parts, head, on_outputs, train=True)     and backward, gradients summed over the ranks

On the last stage ``on_outputs(number, *outputs)`` is called for each part with what the ``head`` made of it: the same
on the tensor- and context-parallel ranks of a copy of the model. What it returns is a loss whose gradient is wanted; it
is made of whole sequences, however they are cut over context-parallel ranks.

All data-parallel ranks make equally many passes, since experts of one may wait for tokens of another; who has fewer
parts sends some tokens along that nobody learns from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from areal_hpc.collective import meeting
from areal_hpc.config.schema import TrainerConfig
from areal_hpc.routing import replayed
from areal_hpc.training.forward import IntArray, parts
from areal_hpc.training.megatron.heads import Head, on
from areal_hpc.training.megatron.packing import Packed, nothing, pack_for_rank
from areal_hpc.training.megatron.parallel import Place
from areal_hpc.training.megatron.replay import send_along
from areal_hpc.training.megatron.requirements import FP8_MULTIPLE
from areal_hpc.types import Batch, Float32Array
from areal_hpc.waits import advance

OnOutputs = Callable[..., Tensor]


class Passes:
    """How micro-batches go through a model on this rank."""

    def __init__(self, place: Place, trainer: TrainerConfig) -> None:
        self._place, self._parallel = place, trainer.parallel
        self._budget = trainer.tokens_per_microbatch * trainer.parallel.context
        self._multiple = trainer.parallel.tensor * (FP8_MULTIPLE if trainer.fp8 else 1)

    def split(self, batch: Batch, *, together: int = 1) -> list[tuple[Batch, IntArray]]:
        """The batch in micro-batches, and where their tokens stand in it; see ``forward.parts``."""
        return list(parts(batch, self._budget, together=together, padded=False))

    def run(
        self, chunks: Sequence[Any], parts: Sequence[Batch], head: Head, on_outputs: OnOutputs, *, train: bool = False
    ) -> None:
        """Every rank of the trainer calls this together."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        num_passes = self._num_passes(len(parts))
        packed = [self._pack(part) for part in parts]
        packed += [nothing(2 * self._multiple, self._parallel.context)] * (num_passes - len(parts))
        scale = float(num_passes * self._place.data.size)  # Megatron divides by the first, and by the second after all

        def step(rows: Iterator[tuple[int, Packed]], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number, one = next(rows)
            token_ids, positions = on(self._place, np.stack([one.token_ids, one.positions]))[:, None]
            output = chunk(token_ids, positions, None, packed_seq_params=self._lengths(one))

            def loss(hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                part = parts[number] if number < len(parts) else None
                outputs = head(getattr(chunk, "module", chunk), hidden, one, part)
                advance("micro-batches")
                found = outputs[0].sum() if part is None else on_outputs(number, *outputs)
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

    def of_last_stage(self, found: Float32Array) -> Float32Array:
        """What the last stage has found, on all stages."""
        group = self._place.pipeline
        if group.size() == 1:
            return found
        tensor = on(self._place, found)
        with meeting("what the last stage has found", group):
            dist.broadcast(tensor, group=group, group_src=group.size() - 1)
        on_host: Float32Array = tensor.cpu().numpy()
        return on_host

    def _num_passes(self, num_parts: int) -> int:
        """How many micro-batches every rank runs: as many as the data-parallel rank with the most parts needs, in whole
        rounds where stages are interleaved."""
        most: int = max(1, *self._place.data.gather(num_parts))
        stages = self._parallel.pipeline if self._parallel.virtual_pipeline > 1 else 1
        return -(-most // stages) * stages

    def _pack(self, part: Batch) -> Packed:
        context = self._place.context
        return pack_for_rank(part, context_rank=context.rank(), context_size=context.size(), multiple=self._multiple)

    def _lengths(self, packed: Packed) -> Any:
        """What every layer is given of a pass: Megatron's lengths of sequences, and with them what only ours read."""
        from megatron.core.packed_seq_params import PackedSeqParams

        boundaries = on(self._place, packed.boundaries)
        longest = int((packed.boundaries[1:] - packed.boundaries[:-1]).max())
        lengths = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        lengths.ends = packed.boundaries[1:].tolist()  # on the host: no layer is to wait for the device to tell
        if packed.experts is not None:
            send_along(lengths, on(self._place, replayed(packed.experts)), self._place)
        return lengths
