"""Do trainer and engines compute the same function? Measured at every step, on tokens of the weights it starts from.

Of an answer that these very weights have sampled, behaviour and proximal log-probs differ by numerics only: rounding,
or a mistake that no loss curve shows for days. Of older tokens they differ by what was learned since, and so do those
that follow older ones in the same answer: the engine goes on from keys and values that the older weights have left.

    stats = fresh_gap(part, version_now)
    watch = GapWatch(limit, suspects(config))
    watch.look(step, stats)         what to tell a person, or None
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
import torch

from areal_hpc.algorithms.stats import Stats, max_of, mean_of
from areal_hpc.config.schema import Config, Dtype
from areal_hpc.training.forward import sequence_of_token
from areal_hpc.types import Batch

FRESH, FRESH_MAX = "logprob_gap_fresh", "logprob_gap_fresh_max"
"""Statistics of a step: mean and largest |behaviour - proximal| of answers that the proximal weights sampled alone."""
JUMP = 10.0
"""So many times the usual gap is not the same cause any more."""
RARE = 200.0
"""A largest gap of so many times the mean: most tokens agree, and a few do not at all."""


def fresh_gap(batch: Batch, version_now: int) -> Stats:
    """The two statistics of a micro-batch, if its proximal log-probs were computed and not taken from elsewhere.

    Args:
        version_now: the version that this step makes; its proximal policy is the one before.
    """
    if batch.proximal is None:
        return {}
    sequence = sequence_of_token(batch)
    others = sequence[(batch.versions >= 0) & (batch.versions != version_now - 1)]
    whole = batch.loss_mask & (batch.versions >= 0) & ~np.isin(sequence, others)
    fresh = torch.from_numpy(whole & np.isfinite(batch.behaviour))
    gap = torch.from_numpy(batch.behaviour - batch.proximal).abs()
    return {FRESH: mean_of(gap, fresh), FRESH_MAX: max_of(gap, fresh)}


def suspects(config: Config) -> list[str]:
    """What this configuration makes likely, most likely first."""
    sampling, found = config.rollout.sampling, []
    reshaped = {"top_p": sampling.top_p < 1.0, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0.0}
    if names := [name for name, is_set in reshaped.items() if is_set]:
        found.append(
            f"rollout.sampling.{' and '.join(names)} cut the distribution that is sampled, which the trainer does not"
        )
    if config.agent.python or config.agent.command or config.agent.online.enabled:
        found.append(
            "answers that agents ask for as JSON of a schema, and calls of strict tools, sampled from fewer tokens "
            "than the trainer sees"
        )
    if sampling.temperature != 1.0:
        found.append(f"an engine that reports log-probs before the temperature {sampling.temperature:g}")
    if config.model.dtype is not Dtype.FLOAT32:
        found.append(f"rounding in {config.model.dtype}: compare with model.dtype=float32")
    return found


class GapWatch:
    """Knows what was usual. ``limit`` is the largest mean gap, in nats, that is none; 0 looks at nothing."""

    def __init__(self, limit: float, suspects: Sequence[str]) -> None:
        self._limit, self._suspects = limit, suspects
        self._calm: list[float] = []

    def look(self, step: int, stats: Mapping[str, float]) -> str | None:
        """A sentence for the log where the step's gap is too large; a step without a fresh token has none."""
        mean, largest = stats.get(FRESH, math.nan), stats.get(FRESH_MAX, math.nan)
        if not self._limit or math.isnan(mean):
            return None
        if mean <= self._limit:
            self._calm.append(mean)
            return None
        causes = "; ".join(self._causes(mean, largest))
        return (
            f"step {step}: trainer and engines differ by {mean:.2g} nats a token (largest {largest:.2g}) on what the "
            f"same weights sampled, more than trainer.gap_alarm {self._limit:g}. Likely: {causes}"
        )

    def _causes(self, mean: float, largest: float) -> list[str]:
        if self._calm and mean > JUMP * median(self._calm):
            usual = f"{median(self._calm):.2g} in the {len(self._calm)} steps before"
            return [f"it was {usual}, so an engine or a trainer rank may hold other weights than the others"]
        chosen = "experts chosen otherwise (model.routing_replay has the trainer choose alike)"
        few = [f"few tokens differ by much: {chosen}, or text that one side tokenizes otherwise"]
        return [
            *(few if largest > RARE * mean else []),
            *self._suspects,
            "another model, rotary setting or chat template in the engine than in model.path",
        ]
