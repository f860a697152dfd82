"""What the ranks of one SGLang engine agree on: its first alone answers the client, whatever became of the others."""

from __future__ import annotations

from typing import Any

import torch


def all_agree(updater: Any, here: bool) -> bool:
    """Whether all ranks of the engine say yes; each is asked by the same request, in the same order.

    Args:
        updater: SGLang's, of weights in this scheduler.
    """
    agreed = torch.tensor([int(here)])
    torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MIN, group=updater.tp_cpu_group)
    return bool(agreed.item())
