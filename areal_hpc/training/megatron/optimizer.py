"""Megatron's distributed AdamW behind the words of ours: float32 masters and moments, shared by data-parallel ranks.

    optimizer = SplitOptimizer(chunks, config, dtype)       weights are loaded afterwards, by ``set_master``
    optimizer.zero_grad()
    ... forward and backward through optimizer.chunks ...   their gradients are summed over ranks by Megatron
    norm = optimizer.step(lr)                               changes nothing where the norm is not finite

Each data-parallel rank keeps masters and moments of one range of every weight that it holds. ``gathered`` puts the
ranges together again on one of these ranks, the weight's keeper, and the setters take such parts apart: bit for bit, so
what was saved on one layout goes on from the same numbers on any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from areal_hpc.collective import meeting
from areal_hpc.config.schema import OptimizerConfig

MASTER = "master"
"""The float32 weight itself, among what is kept of it,"""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""and what AdamW knows of its gradients."""


class SplitOptimizer:
    """Takes over ``chunks`` as ``model.build`` made them; weight decay spares vectors."""

    def __init__(self, chunks: Sequence[Any], config: OptimizerConfig, dtype: torch.dtype) -> None:
        from megatron.core import optimizer as megatron
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        self._grad_clip, self._weight_decay = config.grad_clip, config.weight_decay
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.chunks = [DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in chunks]
        for chunk in self.chunks:
            for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                _spare_copies(buckets)
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = (
                finalize_model_grads  # sums them over the ranks, after the last pass
            )
        self._optimizer = megatron.get_megatron_optimizer(
            megatron.OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                clip_grad=config.grad_clip,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
            ),
            self.chunks,
            use_gloo_process_groups=False,  # only Megatron's own checkpoints want them
        )
        self._owners = {parameter: inner for inner in self._inner() for parameter in inner.model_param_group_index_map}
        self._groups = {
            parameter: inner.data_parallel_group for inner in self._inner() for parameter in _held_by(inner)
        }
        self.num_updates = 0

    def _inner(self) -> Iterator[Any]:
        """Megatron's optimizers of this rank: one for what all data-parallel ranks hold, one for experts."""
        for inner in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            if not inner.is_stub_optimizer:
                yield inner

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Clip and apply one update at learning rate ``lr``; the norm before clipping, over all parts of the model.

        A norm that is not finite leaves weights, moments and ``num_updates`` as they are; all ranks see the same one.
        """
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return norm
        for inner in self._inner():
            for group in inner.optimizer.param_groups:
                group["lr"] = lr * group["lr_mult"]
                group["weight_decay"] = self._weight_decay * group["wd_mult"]
                for main in group["params"]:
                    if norm > self._grad_clip and main.grad is not None:
                        main.grad.mul_(self._grad_clip / norm)
        self._optimizer.step_with_ready_grads()
        self.num_updates += 1
        return norm

    def keepers(self, parameters: Iterable[Parameter]) -> dict[Parameter, int]:
        """Which of its data-parallel ranks is to keep each of the parameters, so that all get about equally many bytes.

        All those ranks give the same answer to the same parameters: largest first, to who has the fewest.
        """
        loads: dict[Any, list[int]] = {}
        found: dict[Parameter, int] = {}
        for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
            group = self._groups[parameter]
            load = loads.setdefault(group, [0] * group.size())
            found[parameter] = load.index(min(load))
            load[found[parameter]] += parameter.numel()
        return found

    @torch.no_grad()
    def gathered(self, what: str, parameter: Parameter, keeper: int) -> Tensor | None:
        """On the keeper, its part of the float32 master or of one of the moments, of the parameter's shape; None on
        the other data-parallel ranks. Collective over them. Moments are zeros before the first update.
        """
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if parameter in self._owners:
            main, span = self._range(parameter)
            state = {MASTER: main, **self._owners[parameter].optimizer.state.get(main, {})}
            if what in state:
                whole[span] = state[what].detach()
        group = self._groups[parameter]
        if group.size() > 1:
            with meeting("the ranges of a weight", group):  # of integers: of floats, -0.0 + 0.0 would be 0.0
                dist.reduce(whole.view(torch.int32), group=group, group_dst=keeper)
        return whole.view(parameter.shape) if group.rank() == keeper else None

    @torch.no_grad()
    def set_master(self, parameter: Parameter, part: Tensor) -> None:
        """Give the model its weight, and this rank its range of the float32 one."""
        parameter.copy_(part)
        if parameter in self._owners:
            main, span = self._range(parameter)
            main.copy_(part.reshape(-1)[span])

    def set_moment(self, name: str, parameter: Parameter, part: Tensor) -> None:
        """Give this rank its range of one of the ``MOMENTS``; afterwards call ``go_on``."""
        if parameter in self._owners:
            main, span = self._range(parameter)
            own = part.reshape(-1)[span].to(main.device, torch.float32, copy=True)
            self._owners[parameter].optimizer.state[main][name] = own

    def go_on(self, num_updates: int) -> None:
        """Continue from the moments that were set as those after so many updates."""
        self.num_updates = num_updates
        for parameter, inner in self._owners.items():
            main, _ = self._range(parameter)
            assert set(inner.optimizer.state[main]) - {"step"} == set(MOMENTS), "a weight was left without its moments"
        for inner in self._inner():
            _count_from(inner.optimizer, num_updates)

    def _range(self, parameter: Parameter) -> tuple[Tensor, slice]:
        """The float32 weights that this rank optimises of the flattened parameter, and which of it they are."""
        inner = self._owners[parameter]
        group, place = inner.model_param_group_index_map[parameter]
        span = inner._get_model_param_range_map(parameter)["param"]
        return inner.optimizer.param_groups[group]["params"][place], slice(span.start, span.end)


def _count_from(optimizer: Any, num_updates: int) -> None:
    """The updates that moments are corrected by: torch's AdamW counts those of each weight; Transformer Engine's and
    Apex's, which Megatron prefers where there is one, those of a group.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            for main in group["params"]:
                optimizer.state[main]["step"] = torch.tensor(float(num_updates))  # one each: counted up in place
        else:
            group["step"] = num_updates


def _held_by(inner: Any) -> Iterator[Parameter]:
    """Parameters whose ranges are spread over the optimizer's data-parallel ranks, this one's or not."""
    for buffer in inner.buffers:
        yield from buffer.params


def _spare_copies(buckets: Any) -> None:
    """A rank that shares these weights with nobody would hand itself their gradients, and after a step them, by copying
    them all.
    """
    alone = buckets.intra_distributed_optimizer_instance_size == 1
    if alone and all(bucket.gradient_scaling_factor == 1.0 for bucket in buckets.buckets):
        buckets.start_grad_sync = buckets.start_param_sync = _nothing


def _nothing(*_: Any, **__: Any) -> None: ...
