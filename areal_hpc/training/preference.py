"""Trainers of pairs: everything is the reference backend's but what a pair's margin is.

    policy against its reference     PreferenceBackend       DPO, IPO
    a score for each answer          RewardModelBackend      Bradley-Terry

The loss is a mean over the pairs of all ranks. Both answers of a pair are in one micro-batch, the better one first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from areal_hpc.algorithms.preferences import pair_margins, pair_stats, policy_margins
from areal_hpc.algorithms.stats import Stats
from areal_hpc.algorithms.table import find
from areal_hpc.scorer import load_scorer, scores
from areal_hpc.training.forward import forward, sequence_of_token
from areal_hpc.training.reference import ReferenceBackend
from areal_hpc.training.updates import sums
from areal_hpc.types import Batch


class PreferenceBackend(ReferenceBackend):
    """``TrainerBackend`` of a policy that learns from pairs."""

    def _losses(self, batch: Batch) -> tuple[Tensor, Stats]:
        """One loss for each pair."""
        pair_loss = find(self._algorithm.name).pair_loss
        assert pair_loss is not None, f"{self._algorithm.name} is not of pairs"
        margins = self._margins(batch)
        losses = pair_loss(margins, self._algorithm)
        return losses, pair_stats(margins.detach(), losses)

    def _margins(self, batch: Batch) -> Tensor:
        """float64 [P]"""
        assert batch.reference is not None, "the reference's log-probs are missing from the batch"
        logprobs, _ = self._forward(self._model, batch)
        mask = self._tensor(batch.loss_mask)
        return policy_margins(
            current=logprobs.new_zeros(mask.shape).masked_scatter(mask, logprobs),
            reference=self._tensor(batch.reference),
            mask=mask,
            segments=self._tensor(sequence_of_token(batch)),
        )

    def _divisors(self, minibatches: Sequence[Batch], totals: Sequence[int]) -> list[int]:
        return sums([batch.num_sequences // 2 for batch in minibatches], self._ranks)


class RewardModelBackend(PreferenceBackend):
    """``TrainerBackend`` of a reward model. What it exports is one; ``rollout.reward`` may name the directory."""

    def _load_model(self, path: Path) -> Any:
        return load_scorer(path, new_head=True)

    def _margins(self, batch: Batch) -> Tensor:
        """float32 [P]"""
        return pair_margins(scores(self._model, forward(self._model.get_decoder(), batch, self._device).after()))
