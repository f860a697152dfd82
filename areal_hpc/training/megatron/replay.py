"""Routers that choose the experts that a record names, and leave the weights of these to be learned as ever.

    replay(chunks)                              once: their routers look for records
    send_along(lengths, experts, place)         each pass: its record travels with the lengths of its sequences

The record is not told to the routers beforehand: with pipeline stages several passes are under way at once, and where
layers are computed again in backward a router runs twice for each. But whenever a layer runs it is given the lengths of
the pass that it runs for, and finds the record there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from areal_hpc.training.megatron.parallel import Place

TopK = Callable[..., tuple[Tensor, Tensor]]


class RecordedChoice:
    """Stands where Megatron's router looks for its own ``RouterReplay``, which wants a record of every token."""

    def __init__(self) -> None:
        self.experts: Tensor | None = None
        """[tokens of this rank, K], -1 where the router is to choose by itself; None: everywhere."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: TopK
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers [tokens, K] of the experts that compute each token, of ``scores`` [tokens, experts]."""
        own_scores, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.experts is None:
            return own_scores, own
        assert self.experts.shape == own.shape, (self.experts.shape, own.shape)
        chosen = torch.where(self.experts < 0, own, self.experts)
        return scores.gather(1, chosen), chosen


def replay(chunks: Sequence[Any]) -> None:
    """Have the routers of these chunks of a mixture, as ``model.build`` made them, replay records that come along."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            assert hasattr(layer.mlp.router, "router_replay"), "this Megatron routes elsewhere"
            layer.mlp.router.router_replay = RecordedChoice()
            layer.register_forward_pre_hook(_find_record, with_kwargs=True)


def send_along(lengths: Any, experts: Tensor, place: Place) -> None:
    """Put a pass's record into its ``PackedSeqParams``.

    Args:
        experts: [P / C, L, K], of this context rank's tokens, of which each tensor-parallel rank routes its share.
    """
    lengths.experts = experts.chunk(place.tensor.size())[place.tensor.rank()]


def _find_record(layer: Any, _: tuple[Any, ...], arguments: Mapping[str, Any]) -> None:
    experts = getattr(arguments["packed_seq_params"], "experts", None)
    layer.mlp.router.router_replay.experts = None if experts is None else experts[:, layer.layer_number - 1]
