"""Trainers of pairs: everything is the reference backend's but what a pair's margin is.

    policy against its reference     PreferenceBackend       DPO, IPO
    a score for each answer          RewardModelBackend      Bradley-Terry

The loss is a mean over the pairs of all ranks. Both answers of a pair are in one micro-batch, the better one first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from areal_hpc.algorithms.preferences import pair_margins
from areal_hpc.algorithms.stats import Stats
from areal_hpc.scorer import load_scorer, scores
from areal_hpc.training.forward import forward
from areal_hpc.training.reference import ReferenceBackend
from areal_hpc.training.updates import answer_margins, pair_losses
from areal_hpc.types import Batch


class PreferenceBackend(ReferenceBackend):
    """``TrainerBackend`` of a policy that learns from pairs."""

    def _losses(self, batch: Batch) -> tuple[Tensor, Stats]:
        """One loss for each pair."""
        return pair_losses(self._margins(batch), self._algorithm)

    def _margins(self, batch: Batch) -> Tensor:
        """float64 [P]"""
        return answer_margins(batch, self._forward(self._model, batch)[0])


class RewardModelBackend(PreferenceBackend):
    """``TrainerBackend`` of a reward model. What it exports is one; ``rollout.reward`` may name the directory."""

    def _load_model(self, path: Path) -> Any:
        return load_scorer(path, new_head=True)

    def _margins(self, batch: Batch) -> Tensor:
        """float32 [P]"""
        return pair_margins(scores(self._model, forward(self._model.get_decoder(), batch, self._device).after()))
