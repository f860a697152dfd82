"""What the engines hold, bit for bit, on the trainer's rank 0: with it, an update sends only what has changed.

    published  whole   delta   delta   ...   whole         every ``whole_every``-th update is whole whatever happens,
                                                           and so is the first after anything went wrong:
               an update failed, an engine was lost, came back, or was caught up

Each tensor travels as a delta if that is shorter than the tensor. Whoever takes a delta proves by a checksum that it
made of its tensor what the trainer has, so a member that does not hold what is believed here fails the update, loudly.

The price is one copy of the weights in host memory, and reading both copies once for each update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from areal_hpc.buckets import num_bytes, whole_bytes
from areal_hpc.delta import Weight, difference
from areal_hpc.transfer import TensorSpec


class DeltaBaseline:
    """The copy, and for whom it holds.

    Args:
        whole_every: of so many updates in a row at least one is whole.
    """

    def __init__(self, whole_every: int) -> None:
        self._whole_every = whole_every
        self._held: dict[str, torch.Tensor] = {}
        self._holders: int | None = None
        self._num_deltas = 0

    def against(self, weights: Iterable[tuple[str, torch.Tensor]], holders: int) -> Iterator[tuple[str, Weight]]:
        """``weights`` as they are to travel. Until ``settle`` says that they have arrived, nobody holds anything.

        Args:
            holders: which membership it is for: ``Membership.changes``.
        """
        whole = self._holders != holders or self._num_deltas + 1 >= self._whole_every
        self._holders = None
        self._num_deltas = 0 if whole else self._num_deltas + 1
        return self._whole(weights) if whole else self._deltas(weights)

    def settle(self, holders: int) -> None:
        """Every engine of that membership holds, and serves, what ``against`` was last given."""
        self._holders = holders

    def _whole(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Weight]]:
        for name, tensor in weights:
            self._hold(name, tensor.detach())
            yield name, tensor

    def _deltas(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Weight]]:
        for name, tensor in weights:
            now = tensor.detach().cpu().contiguous()
            delta = difference(self._held[name], now)
            self._hold(name, now)
            yield name, delta if delta.nbytes < tensor.nbytes else tensor

    def _hold(self, name: str, now: torch.Tensor) -> None:
        held = self._held.get(name)
        if held is None:
            self._held[name] = torch.empty(now.shape, dtype=now.dtype, device="cpu").copy_(now)
        else:
            held.copy_(now)


def sent(specs: Sequence[TensorSpec], stands_for: int | None, *, deltas: bool) -> dict[str, float]:
    """How many ``bytes`` an update of these ``specs`` is; with deltas or adapters also the ``bytes_saved`` by them.

    Args:
        stands_for: bytes of the frozen weights that adapters are sent in place of; None where weights are sent.
    """
    num, whole = sum(map(num_bytes, specs)), sum(map(whole_bytes, specs))
    if stands_for is None and not deltas:
        return {"bytes": float(num)}
    return {"bytes": float(num), "bytes_saved": float((whole if stands_for is None else stands_for) - num)}
