"""AdamW on float32 master weights, with every gradient of the model in one flat float32 buffer.

    optimizer = Optimizer(model.named_parameters(), config, dtype)
    optimizer.zero_grad()
    loss.backward()                     # any number of times: gradients add up in float32
    optimizer.reduce(group)             # one sum over ranks for the whole model
    norm = optimizer.step(lr)           # changes nothing where the norm is not finite

Parameters of the model are the master weights themselves in float32, and a rounded copy of them in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from areal_hpc.collective import meeting
from areal_hpc.config.schema import OptimizerConfig
from areal_hpc.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Takes over ``parameters``, which arrive in float32 and leave as ``dtype``; weight decay spares vectors."""

    def __init__(
        self, parameters: Iterable[tuple[str, Parameter]], config: OptimizerConfig, dtype: torch.dtype
    ) -> None:
        self.num_updates = 0
        self._config = config
        self._parameters = dict(parameters)
        first = next(iter(self._parameters.values()))
        assert all(p.dtype == torch.float32 for p in self._parameters.values())
        self._gradients = torch.zeros(sum(p.numel() for p in self._parameters.values()), device=first.device)
        self.masters: dict[str, Tensor] = {}
        offset = 0
        for name, parameter in self._parameters.items():
            view = self._gradients[offset : offset + parameter.numel()].view_as(parameter)
            self.masters[name] = _with_master(parameter, view, dtype)
            offset += parameter.numel()
        self._adamw = torch.optim.AdamW(
            [
                {"params": [m for m in self.masters.values() if m.ndim >= 2], "weight_decay": config.weight_decay},
                {"params": [m for m in self.masters.values() if m.ndim < 2], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            foreach=False,  # on devices torch would take all weights at once, with temporaries as large as the model
        )

    def zero_grad(self) -> None:
        self._gradients.zero_()

    def reduce(self, group: ProcessGroup | None) -> None:
        """Sum the gradients over the ranks of ``group``; every rank then holds the same bits."""
        if group is not None:
            with meeting("the sum of gradients", group):
                dist.all_reduce(self._gradients, group=group)

    def step(self, lr: float) -> float:
        """Clip and apply one update at learning rate ``lr``; the norm before clipping.

        A norm that is not finite leaves weights, moments and ``num_updates`` as they are. All ranks hold the same
        gradients here, so they decide alike.
        """
        norm = float(torch.linalg.vector_norm(self._gradients))
        if not math.isfinite(norm):
            return norm
        if norm > self._config.grad_clip:
            self._gradients.mul_(self._config.grad_clip / norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.num_updates += 1
        self._round()
        return norm

    @torch.no_grad()
    def _round(self) -> None:
        """Give the model its weights in its own number format."""
        for name, parameter in self._parameters.items():
            if parameter is not self.masters[name]:
                parameter.copy_(self.masters[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Both moments of every weight as ``exp_avg.NAME`` and ``exp_avg_sq.NAME``; zeros before the first update."""
        state = self._adamw.state
        return {
            f"{moment}.{name}": state[master][moment] if self.num_updates else torch.zeros_like(master)
            for name, master in self.masters.items()
            for moment in MOMENTS
        }

    @torch.no_grad()
    def load_state_dict(self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor], num_updates: int) -> None:
        """Continue from other weights and moments.

        Raises:
            CheckpointError: a tensor is missing, left over, or of another shape.
        """
        _require_same(masters, self.masters, "weights")
        _require_same(moments, {f"{m}.{name}": t for name, t in self.masters.items() for m in MOMENTS}, "moments")
        self.num_updates = num_updates
        self._adamw.state.clear()
        for name, master in self.masters.items():
            master.copy_(masters[name])
            self._adamw.state[master] = {
                "step": torch.tensor(float(num_updates)),  # one tensor each: AdamW counts them up in place
                **{moment: moments[f"{moment}.{name}"].to(master.device, copy=True) for moment in MOMENTS},
            }
        self._round()


def _with_master(parameter: Parameter, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 weight that is optimised for ``parameter``; what backward finds lands in its ``gradient``."""
    if dtype == torch.float32:
        parameter.grad = gradient
        return parameter
    master = parameter.data
    master.grad = gradient
    parameter.data = master.to(dtype)

    def add_in_float32(leaf: Tensor) -> None:
        assert leaf.grad is not None
        gradient.add_(leaf.grad)
        leaf.grad = None

    parameter.register_post_accumulate_grad_hook(add_in_float32)  # type: ignore[no-untyped-call]
    return master


def _require_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    if found.keys() != expected.keys():
        names = sorted(found.keys() ^ expected.keys())
        raise CheckpointError(f"{what} of another model: {len(names)} names differ, first {names[0]}; check model.path")
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            shapes = f"{tuple(found[name].shape)} instead of {tuple(tensor.shape)}"
            raise CheckpointError(f"{what} of another model: {name} has shape {shapes}; check model.path")
